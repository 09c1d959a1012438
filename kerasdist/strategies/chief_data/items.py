"""PyDatasets given to Keras: each worker reads its share, or the chief reads all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from kerasdist._keras import ItemData, StepTimer
from kerasdist.strategies.chief_data.choice import DataChoice
from kerasdist.strategies.chief_data.comparison.content import Content, batch_of
from kerasdist.strategies.chief_data.comparison.origin import of_object
from kerasdist.strategies.chief_data.feed import ChiefFeed
from kerasdist.strategies.chief_data.transfer import chiefs_facts, size_of
from kerasdist.strategies.data.messages import used
from kerasdist.strategies.data.shuffle import epoch_order
from kerasdist.strategies.reduce.workers import Workers


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
