"""PyDatasets given to Keras: each worker reads its share, or the chief reads all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist._keras import ArrayData, ItemData, StepTimer
from kerasdist.collectives import Communicator
from kerasdist.strategies.chief_data.choice import DataChoice
from kerasdist.strategies.chief_data.comparison.fingerprint import (
    Batch,
    Content,
    batch_of,
    hash_text,
)
from kerasdist.strategies.chief_data.comparison.origin import of_object
from kerasdist.strategies.chief_data.encoding import (
    chiefs_facts,
    chiefs_leaves,
    decode,
    encode,
    pack,
    size_of,
    unpack,
)
from kerasdist.strategies.chief_data.feed import ChiefFeed
from kerasdist.strategies.data.array_epochs import epoch_order
from kerasdist.strategies.data.item_codec import used, with_remedies
from kerasdist.strategies.reduce.workers import Workers

# Batches of `train_on_batch` and the like: the same on all, or the chief's.


def settle_batch(
    communicator: Communicator,
    choice: DataChoice,
    data: Any,
    log_once: Callable[[str, str], None],
) -> Any:
    """Return a global batch that all workers hold: if theirs differ, the chief's.

    Args:
        communicator: The communicator of all workers, which call this together.
        choice: Decides whose data are used.
        data: This worker's batch, a nest of arrays, or of values that
            NumPy converts to arrays.
        log_once: Logs a line on the chief, given the kind of data and a line.

    Raises:
        ValueError: They differ, and the chief's can't be used. All workers raise it.
    """
    content = Content([batch_of(data)])
    if choice.mode != "chief" and _is_same(communicator, content):
        return data
    why = choice.of_chief(
        communicator,
        "batches",
        content,
        different=lambda others, _: with_remedies(
            "All workers must be given the same global batch, of which each takes its "
            "rows",
            f"batches of ranks {others} differ from rank {communicator.ranks[0]}'s",
        ),
    )
    if not why:
        return data
    leaves = [encode(leaf) for leaf in tf.nest.flatten(data)]
    packed = pack({}, leaves) if communicator.rank == 0 else np.zeros(0, np.uint8)
    _, chiefs = unpack(communicator.all_gather(packed)[0])
    cost = f"rank 0 sends {size_of(chiefs) / 1e6:.3g} MB in each step"
    log_once("batches", used("batches", why, cost))
    return tf.nest.pack_sequence_as(data, [decode(leaf) for leaf in chiefs])


def _is_same(communicator: Communicator, content: Content) -> bool:
    """Return whether all workers hold the same; one small collective."""
    mine = hash_text("".join([content.form, *content.digests()]).encode()) >> 1
    most = communicator.all_reduce([np.array([mine, -mine], np.int64)], "max")[0]
    return bool(most[0] == -most[1])


# Arrays given to Keras: the same on all workers, or replaced by the chief's.


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


class ChiefItems:
    """The chief's items, for all workers, if theirs differ.

    Args:
        workers: The connected workers.
        timer: Measures steps, and what they wait for.
        choice: Decides whose data are used.
        data: This worker's PyDataset.
        seed: Returns a seed that all workers agree on.
        log_once: Logs a line on the chief, given the kind of data and a line.
    """

    def __init__(
        self,
        workers: Workers,
        timer: StepTimer,
        choice: DataChoice,
        data: ItemData,
        seed: Callable[[], int],
        log_once: Callable[[str, str], None],
    ) -> None:
        self._workers, self._timer = workers, timer
        self._choice = choice
        self._data = data
        self._seed = seed
        self._log_once = log_once
        self._epoch = 0

    def settle(self, different: ValueError | None) -> ChiefFeed | None:
        """Return the feed of the chief's items; None if all workers have the same.

        Args:
            different: The error that describes how the workers' datasets differ.

        Raises:
            ValueError: They differ, and the chief's can't be used; on all workers.
        """
        data, communicator = self._data, self._workers.communicator
        item = data.read(0) if data.length != 0 else None
        content = Content([] if item is None else [batch_of(item)])

        def error(others: list[int], _: Any) -> ValueError:
            return different or ValueError(
                "The workers' PyDatasets hold different items. Received: item 0 of "
                f"ranks {others} differs from rank 0's."
            )

        why = self._choice.of_chief(
            communicator,
            "PyDatasets",
            content,
            length=data.length,
            settings={"shuffle": data.shuffle},
            origin=lambda: of_object(data.dataset),
            different=error,
        )
        if not why:
            if different is not None:
                raise different
            return None
        self._seeded = self._seed()
        length = chiefs_facts(communicator, {"length": data.length})["length"]
        feed = ChiefFeed(self._workers, self._timer, self._pass, item, item)
        feed.length = length
        sizes = [size_of(batch.leaves) for batch in content.batches]
        feed.rows = content.rows
        cost = f"rank 0 reads all and sends {sum(sizes) / 1e6:.3g} MB in each step"
        self._log_once("PyDatasets", used("PyDatasets", why, cost))
        return feed

    def _pass(self) -> Iterator[Any]:
        """Read all items, in the order of the next epoch."""
        data, order = self._data, None
        self._epoch += 1
        if data.shuffle and data.length is not None:
            drawn = epoch_order(data.length, 1, True, self._seeded, self._epoch)
            order = drawn.tolist()
        reader = data.reader(0, 1, order)
        try:
            for _ in itertools.repeat(None, *_times(data.length)):
                yield reader.read()[1]
        finally:
            reader.close()


def _times(length: int | None) -> tuple[int, ...]:
    return () if length is None else (length,)
