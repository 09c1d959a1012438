"""Sources from which dynamic batches are read by their numbers.

arrays               number n is the n-th batch in the order of the pass, which all
                     workers agree on
PyDataset            the n-th item in that order: one worker reads it
tf.data.Dataset      the n-th element: every worker reads all elements before it
each worker's own    the next one, whatever its number

The thread that reads ahead calls `read`, Keras's loop calls the other methods.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist._keras import ArrayData, ItemData
from kerasdist.strategies.data.batch_check import checksum_of
from kerasdist.strategies.data.shuffle import epoch_order

# How many batches of a pass are compared over the workers.
_CHECKED = 2


class Source(abc.ABC):
    """A source of batches; `read` is called from another thread than the rest.

    Attributes:
        length: Number of batches in a pass; None: not known.
        is_distributed: Whether a batch is divided over this worker's replicas already.
        is_shared: Whether all workers have the same batches, each for one of them.
        seed: The seed of the orders of passes, the same on all workers; None if unused.
        evidence: A checksum of each of the first batches of this pass that this worker
            has read, by number, if all workers should read the same.
    """

    length: int | None = None
    is_distributed = False
    is_shared = True
    seed: int | None = None

    def __init__(self) -> None:
        self.evidence: dict[int, int] = {}

    @abc.abstractmethod
    def example(self) -> Any:
        """Return a batch, for its shapes and dtypes."""

    @abc.abstractmethod
    def begin(self, number: int) -> None:
        """Begin a pass over the data.

        Args:
            number: The pass's number; the same on all workers.
        """

    def skip(self, passes: int) -> None:
        """Skip passes that the others have made before this worker started."""
        del passes

    @abc.abstractmethod
    def read(self, number: int) -> tuple[Any] | None:
        """Read a batch of this pass, alone in a tuple; None if there is none.

        Args:
            number: The batch's number; larger than in any call before.
        """


class ArraySource(Source):
    """Batches of arrays.

    Args:
        data: The arrays.
        seed: The seed of the orders; the same on all workers.
    """

    def __init__(self, data: ArrayData, seed: int) -> None:
        super().__init__()
        self.length = -(-data.samples // data.batch_size)
        self._data = data
        self.seed = seed
        self._take = data.reader()
        self._order = np.zeros(0, np.int64)

    def example(self) -> Any:
        """See `Source.example`."""
        return self._take(np.arange(min(self._data.samples, self._data.batch_size)))

    def begin(self, number: int) -> None:
        """See `Source.begin`."""
        data = self._data
        self._order = epoch_order(
            data.samples, data.batch_size, data.shuffle, self.seed or 0, number
        )

    def read(self, number: int) -> tuple[Any] | None:
        """See `Source.read`."""
        start = number * self._data.batch_size
        rows = self._order[start : start + self._data.batch_size]
        return (self._take(rows),) if rows.size else None


class ItemSource(Source):
    """The items of a PyDataset.

    Args:
        data: The PyDataset.
        seed: The seed of the orders; the same on all workers.
    """

    def __init__(self, data: ItemData, seed: int) -> None:
        super().__init__()
        self.length = data.length
        self._data = data
        self.seed = seed
        self._order: Any = None

    def example(self) -> Any:
        """See `Source.example`."""
        return _without_nones(self._data.read(0))

    def begin(self, number: int) -> None:
        """See `Source.begin`."""
        self.length = self._data.length
        self._order = None
        if self._data.shuffle and self.length is not None:
            self._order = epoch_order(self.length, 1, True, self.seed or 0, number)

    def read(self, number: int) -> tuple[Any] | None:
        """See `Source.read`."""
        if self.length is not None and number >= self.length:
            return None
        index = number if self._order is None else int(self._order[number])
        return (_without_nones(self._data.read(index)),)


class DatasetSource(Source):
    """A `tf.data.Dataset` of batches, the same on all workers.

    Args:
        dataset: The dataset.
        length: Number of its elements; None: not known.
    """

    def __init__(self, dataset: Any, length: int | None) -> None:
        super().__init__()
        self.length = length
        self._dataset = dataset
        self._elements: Iterator[tuple[int, Any]] = iter(())

    def example(self) -> Any:
        """See `Source.example`."""
        return next(iter(self._dataset))

    def begin(self, number: int) -> None:
        """See `Source.begin`."""
        self.evidence = {}
        self._elements = zip(itertools.count(), self._dataset, strict=False)

    def skip(self, passes: int) -> None:
        """Skip passes, see `Source.skip`: a shuffled dataset counts its passes."""
        for _ in range(passes):
            iter(self._dataset)

    def read(self, number: int) -> tuple[Any] | None:
        """See `Source.read`."""
        for place, element in self._elements:
            if place < _CHECKED:
                leaves = tf.nest.flatten(element, expand_composites=True)
                self.evidence[place] = int(
                    checksum_of(*[leaf.numpy() for leaf in leaves])
                )
            if place == number:
                return (element,)
        return None


class OwnSource(Source):
    """Data that are this worker's own.

    Args:
        dataset: The iterable of its batches.
        length: Number of batches; None: not known.
    """

    is_shared = False

    def __init__(self, dataset: Any, length: int | None) -> None:
        super().__init__()
        self.length = length
        self.is_distributed = isinstance(dataset, tf.distribute.DistributedDataset)
        self._dataset = dataset
        self._elements: Iterator[Any] = iter(())

    def example(self) -> Any:
        """See `Source.example`."""
        return next(iter(self._dataset))

    def begin(self, number: int) -> None:
        """See `Source.begin`."""
        self._elements = iter(self._dataset)

    def read(self, number: int) -> tuple[Any] | None:
        """See `Source.read`."""
        for element in self._elements:
            return (element,)
        return None


def _without_nones(batch: Any) -> Any:
    """Drop the missing values at the end of (x, y, sample_weight)."""
    if not isinstance(batch, tuple):
        return batch
    while len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]
    return batch
