"""The uses of a script's data by Keras, with which another process catches up.

The order of a shuffled `tf.data.Dataset` depends on how often it was iterated over, in
whichever calls of Keras, and a `PyDataset` may change in `on_epoch_begin` and
`on_epoch_end`. A worker that joins a job hasn't done that as often as the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras.src.trainers.data_adapters import py_dataset_adapter

from kerasdist._keras.protocols import KerasHooks
from kerasdist._tf.graph.row_pipelines import has_cache
from kerasdist._tf.marks import WHOLE_DATA


class DataUse:
    """The uses of one dataset.

    Args:
        data: A `tf.data.Dataset` or a `PyDataset`; not kept.

    Attributes:
        passes: How often it was iterated over.
        begun: How often an epoch of it was begun.
        ended: How often one was ended.
    """

    def __init__(self, data: Any) -> None:
        self.passes = self.begun = self.ended = 0
        self._data = weakref.ref(data)

    def is_of(self, data: Any) -> bool:
        """Return whether these are the uses of a dataset."""
        return self._data() is data

    def counts(self) -> list[int]:
        """Return the numbers of uses, for `catch_up`."""
        return [self.passes, self.begun, self.ended]

    def catch_up(self, counts: Sequence[int]) -> None:
        """Use the dataset until the counts are at least these.

        Passes are begun, but not read: that draws the seed of their order. Only of a
        dataset with a cache one is read, because it fills the cache.
        """
        passes, begun, ended = counts
        data: Any = self._data()
        is_dataset = isinstance(data, tf.data.Dataset)
        fills = is_dataset and self.passes < passes and has_cache(data)
        while self.passes < passes:
            self.passes += 1
            iterator = iter(data) if is_dataset else iter(())
            if fills:
                fills = False
                for _ in iterator:
                    pass
        while self.begun < begun:
            self.begun += 1
            if data is not None:
                data.on_epoch_begin()
        while self.ended < ended:
            self.ended += 1
            if data is not None:
                data.on_epoch_end()

    def count_epochs(self, adapter: Any) -> None:
        """Count the epochs of Keras's adapter of a `PyDataset`."""
        begin: Callable[[], None] = adapter.on_epoch_begin
        end: Callable[[], None] = adapter.on_epoch_end

        def on_epoch_begin() -> None:
            self.begun += 1
            begin()

        def on_epoch_end() -> None:
            self.ended += 1
            end()

        adapter.on_epoch_begin, adapter.on_epoch_end = on_epoch_begin, on_epoch_end


_uses: weakref.WeakKeyDictionary[KerasHooks, DataUses] = weakref.WeakKeyDictionary()


def uses_of(hooks: KerasHooks) -> DataUses:
    """Return the uses of the data that the models of a strategy were given."""
    if hooks not in _uses:
        _uses[hooks] = DataUses()
    return _uses[hooks]


class DataUses:
    """The uses of all datasets that one strategy's models were given, in that order."""

    def __init__(self) -> None:
        self._known: list[DataUse] = []
        # By `id`, which another object may have later.
        self._places: dict[int, int] = {}

    def of(self, data: Any) -> DataUse | None:
        """Return the uses of data, which are added if they aren't known.

        None: of such data all uses are the same.
        """
        # A dataset that the script has distributed is divided again, and read itself.
        whole = WHOLE_DATA.get(data)
        data = data if whole is None else whole
        if not isinstance(data, (tf.data.Dataset, py_dataset_adapter.PyDataset)):
            return None
        place = self._places.get(id(data))
        if place is not None and self._known[place].is_of(data):
            return self._known[place]
        self._places[id(data)] = len(self._known)
        self._known.append(DataUse(data))
        return self._known[-1]

    def index(self, use: DataUse | None) -> int | None:
        """Return the place of some uses among all."""
        return None if use is None else self._known.index(use)

    def counts(self) -> list[list[int]]:
        """Return the numbers of uses of all."""
        return [use.counts() for use in self._known]

    def catch_up(self, counts: Sequence[Sequence[int]]) -> None:
        """Use each dataset until its counts are at least these."""
        for use, each in zip(self._known, counts, strict=False):
            use.catch_up(each)
