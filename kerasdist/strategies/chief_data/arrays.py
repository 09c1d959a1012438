"""Arrays given to Keras: the same on all workers, or replaced by the chief's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerasdist._keras import ArrayData
from kerasdist.collectives import Communicator
from kerasdist.strategies.chief_data.choice import DataChoice
from kerasdist.strategies.chief_data.comparison.content import Batch, Content
from kerasdist.strategies.chief_data.encoding import encode
from kerasdist.strategies.chief_data.transfer import (
    chiefs_facts,
    chiefs_leaves,
    size_of,
)
from kerasdist.strategies.data.messages import used, with_remedies


def settle_arrays(
    communicator: Communicator,
    choice: DataChoice,
    data: ArrayData,
    log_once: Callable[[str, str], None],
) -> None:
    """Make all workers hold the same arrays: if theirs differ, the chief's.

    Args:
        communicator: The communicator of all workers, which call this together.
        choice: Decides whose data are used.
        data: This worker's arrays; the chief's afterwards.
        log_once: Logs a line on the chief, given the kind of data and a line.

    Raises:
        ValueError: They differ, and the chief's can't be used. All workers raise it.
    """
    if communicator.size == 1:
        return
    x, rest = (tuple(encode(leaf) for leaf in leaves) for leaves in data.leaves())
    settings = {"shuffle": str(data.shuffle), "batch_size": data.batch_size}

    def different(others: list[int], asked: list[Any]) -> ValueError:
        del others
        named = zip(communicator.ranks, asked, strict=True)
        every = "; ".join(f"rank {rank}: {_text(each)}" for rank, each in named)
        return with_remedies(
            "All workers must be given the same data: each takes its own part of every "
            "global batch",
            f"arrays that differ, here samples={data.samples}; {every}",
        )

    why = choice.of_chief(
        communicator,
        "arrays",
        Content([Batch(x, rest)]),
        settings=settings,
        different=different,
    )
    if not why:
        return
    facts = chiefs_facts(communicator, {"batch_size": data.batch_size})
    leaves = [*x, *rest]
    megabytes = size_of(leaves) / 1e6
    data.replace(chiefs_leaves(communicator, leaves), int(facts["batch_size"]))
    log_once("arrays", used("arrays", why, f"{megabytes:.3g} MB are sent once"))


def _text(asked: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in asked.items())
