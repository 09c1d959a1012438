"""Epochs of arrays: a worker's rows of every batch, in an order common to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist._keras import ArrayData
from kerasdist.strategies.data.batch_split import with_facts
from kerasdist.strategies.data.shuffle import (
    epoch_order,
    has_empty_parts,
    own_rows,
    same_length,
)
from kerasdist.strategies.reduce.workers import ReplicaLayout, Workers


class ArrayEpochs:
    """The iterable over this worker's parts of arrays; each iteration is an epoch.

    The order of an epoch depends on the number of the iteration, which is counted
    here, where all workers count alike, and not where TensorFlow prefetches.
    """

    def __init__(
        self,
        workers: Workers,
        data: ArrayData,
        seed: int,
        distribute: Callable[[Any], Any],
    ) -> None:
        self._data = data
        self._seed = seed
        self._epoch = 0
        alone = workers.communicator.size == 1
        self._parts = ArrayParts(workers.layout, data, alone=alone)
        self._dataset = distribute(self._parts.dataset(data.take))

    def __iter__(self) -> Iterator[Any]:
        data = self._data
        self._epoch += 1
        self._parts.begin(
            epoch_order(
                data.samples, data.batch_size, data.shuffle, self._seed, self._epoch
            )
        )
        return iter(self._dataset)


class ArrayParts:
    """A worker's parts of the batches of arrays, for one layout of the replicas.

    Args:
        layout: The numbers of the worker's replicas.
        data: The arrays.
        alone: Whether there is one worker, which knows the rows of the global batch
            without communication.
    """

    def __init__(self, layout: ReplicaLayout, data: ArrayData, *, alone: bool) -> None:
        self._layout = layout
        self._data = data
        self._alone = alone
        # For this epoch: its samples, and the bounds between parts.
        self._order = self._samples = self._bounds = np.zeros(0, np.int64)

    def begin(self, order: Any) -> None:
        """Begin an epoch, given the order of all samples.

        Keras drops an epoch's iterator before it makes the next one.
        """
        self._order = order
        self._samples, self._bounds = own_rows(
            order, self._data.batch_size, *self._layout
        )

    def dataset(self, take: Callable[[Any, Any, Any], Any], first: int = 0) -> Any:
        """Return the dataset of the parts of the epoch that has begun when it's read.

        Args:
            take: See `ArrayData.take`.
            first: The number of the first batch.
        """
        data, layout = self._data, self._layout
        batches = -(-data.samples // data.batch_size)
        known = same_length(data.samples, data.batch_size, *layout)

        def rows(part: Any) -> Any:
            chosen = tf.numpy_function(self._rows_of, [part], tf.int64)
            return tf.ensure_shape(chosen, [known])

        filled = has_empty_parts(data.samples, data.batch_size, layout.total)

        def finish(batch: Any, part: Any) -> Any:
            if self._alone and not filled:
                return batch
            begin = part // layout.local * data.batch_size
            total = tf.minimum(data.samples - begin, data.batch_size)
            if not filled:
                return with_facts(batch, total)
            replica = layout.first + part % layout.local
            longer = tf.cast(replica < total % layout.total, tf.int64)
            return with_facts(batch, total, total // layout.total + longer)

        # As few stages as possible, because each epoch creates all of them.
        local = layout.local
        parts = tf.data.Dataset.range(first * local, batches * local)
        return take(parts, rows, finish)

    def _rows_of(self, part: Any) -> Any:
        begin, end = self._bounds[part], self._bounds[part + 1]
        if begin == end:  # see `strategies.data.batch_split`
            stop = (part // self._layout.local + 1) * self._data.batch_size
            return self._order[:stop][-1:]
        return self._samples[begin:end]
