"""The place of a running `fit` in its data, from which another process can continue.

    data      pass 1     pass 2       the number of a pass is that of its order
    members   x x x x x  x x x . .    x: a batch that is used up
    another              - - - . .    -: a batch that is skipped

A `tf.data.Dataset` and a `PyDataset` are read up to the place. Each worker's own data
have no place in common: a worker that joins begins with its own in the next epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kerasdist._keras.context import current
from kerasdist._keras.data.batches import (
    BatchIterator,
    CountedData,
    RepeatableIterator,
)
from kerasdist._keras.data.epoch_iterators import adapter_of
from kerasdist._keras.data.pydataset import ItemsInOrder, discard_read
from kerasdist._keras.data.uses import uses_of
from kerasdist._keras.protocols import KerasHooks


class DataPlace:
    """The place in the training data of the present call of `fit`.

    Args:
        hooks: The hooks of the model's strategy.

    Raises:
        RuntimeError: `fit` has no data.
    """

    def __init__(self, hooks: KerasHooks) -> None:
        epoch: Any = None if current.iterator is None else current.iterator()
        if epoch is None:
            raise RuntimeError("`fit` has no data iterator.")
        self._epoch = epoch
        self._uses = uses_of(hooks)
        # Where another process continues: Keras's generator of an epoch's steps, and
        # the step that it has yielded last.
        self._steps: Any = None
        self._reached: Any = None
        self._facts: dict[str, Any] = {}

    def facts(self, iterator: Any, step: int) -> dict[str, Any]:
        """Return the facts about the place, as JSON.

        Args:
            iterator: The iterator of the step.
            step: The number of the next step in the epoch.
        """
        known = isinstance(iterator, RepeatableIterator)
        data = self._epoch._distributed_dataset
        use = data.use if isinstance(data, CountedData) else None
        items = self._items()
        return {
            "kind": _kind(iterator),
            "pass": iterator.number if known else 0,
            "batch": iterator.taken if known else 0,
            "step": step,
            "steps_seen": self._epoch._steps_seen,
            "steps_per_epoch": self._epoch.steps_per_epoch,
            "batches": self._epoch._num_batches,
            "order": 0 if items is None else items.number,
            "data": self._uses.index(use),
            "uses": self._uses.counts(),
        }

    def move_to(self, facts: dict[str, Any]) -> str:
        """Move to the place of other processes; it may be called again with later ones.

        Args:
            facts: Those of `facts` there.

        Returns:
            Why that isn't possible; an empty text if it is.
        """
        if facts["steps_per_epoch"] != self._epoch.steps_per_epoch:
            return "another `steps_per_epoch` than the others'"
        if len(facts["uses"]) != len(self._uses.counts()):
            return "other data than the others'"
        self._facts = facts
        number = facts["pass"]
        if self._reached is None or number != getattr(self.iterator, "number", number):
            self._begin_epoch()
        batches = self.iterator
        if facts["kind"] != _kind(batches):
            return "data that are divided in another way than the others'"
        if isinstance(batches, RepeatableIterator):
            if batches.number != number:
                return "data that were used more often than the others'"
            batches.skip(facts["batch"])
        elif not (isinstance(batches, BatchIterator) and batches.pause(True)):
            return "data whose place in an epoch can't be continued from"
        return ""

    def resume(self) -> None:
        """Let the next epoch of `fit` begin at the place of the last `move_to`."""
        self._uses.catch_up(self._facts["uses"])
        self._epoch._enumerate_iterator = self._rest

    @property
    def iterator(self) -> Any:
        """The iterator that `move_to` has moved; None before."""
        return None if self._reached is None else self._reached[2]

    def _items(self) -> ItemsInOrder | None:
        items = getattr(adapter_of(self._epoch), "py_dataset", None)
        return items if isinstance(items, ItemsInOrder) else None

    def _begin_epoch(self) -> None:
        """Begin the epoch of the place, at its first step."""
        epoch, facts = self._epoch, self._facts
        if self._steps is not None:
            epoch.data_adapter.on_epoch_end()
            discard_read(adapter_of(epoch))
        uses = [list(counts) for counts in facts["uses"]]
        if facts["data"] is not None:
            # Keras's generator, below, begins one pass, and one epoch.
            mine = uses[facts["data"]]
            mine[0], mine[1] = facts["pass"] - 1, mine[1] - 1
        self._uses.catch_up(uses)
        items = self._items()
        if items is not None:
            items.turn_to(facts["order"])
        if isinstance(epoch._distributed_dataset, CountedData):
            epoch._distributed_dataset.turn_to(facts["pass"])
        epoch._num_batches = facts["batches"]
        epoch._current_iterator = None
        self._steps = epoch._enumerate_iterator()
        self._reached = next(self._steps)

    def _rest(self) -> Iterator[Any]:
        """Yield the steps from the place on, as Keras's generator does."""
        epoch, facts = self._epoch, self._facts
        del epoch._enumerate_iterator
        while self._reached[0] < facts["step"]:
            self._reached = next(self._steps, None)
            if self._reached is None:
                return
        epoch._steps_seen = facts["steps_seen"]
        batches = self.iterator
        yield self._reached
        yield from self._steps
        if isinstance(batches, BatchIterator):
            batches.pause(False)


def _kind(batches: Any) -> str:
    known = isinstance(batches, RepeatableIterator)
    return batches.kind if known else type(batches).__name__
