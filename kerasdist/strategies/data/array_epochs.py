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
from kerasdist.strategies.reduce.workers import Workers

__all__ = ["ArrayEpochs"]


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
        self._first, self._local, self._replicas = workers.layout
        batches = -(-data.samples // data.batch_size)
        # For this epoch: its samples, and the bounds between parts.
        self._order = self._samples = self._bounds = np.zeros(0, np.int64)

        known = same_length(
            data.samples, data.batch_size, self._first, self._local, self._replicas
        )

        def rows(part: Any) -> Any:
            chosen = tf.numpy_function(self._rows_of, [part], tf.int64)
            return tf.ensure_shape(chosen, [known])

        # A single worker knows the rows of the global batch without communication.
        alone = workers.communicator.size == 1
        filled = has_empty_parts(data.samples, data.batch_size, self._replicas)

        def finish(batch: Any, part: Any) -> Any:
            if alone and not filled:
                return batch
            begin = part // self._local * data.batch_size
            total = tf.minimum(data.samples - begin, data.batch_size)
            if not filled:
                return with_facts(batch, total)
            replica = self._first + part % self._local
            longer = tf.cast(replica < total % self._replicas, tf.int64)
            return with_facts(batch, total, total // self._replicas + longer)

        # As few stages as possible, because each epoch creates all of them.
        parts = tf.data.Dataset.range(batches * self._local)
        self._dataset = distribute(data.take(parts, rows, finish))

    def __iter__(self) -> Iterator[Any]:
        data = self._data
        self._epoch += 1
        self._order = epoch_order(
            data.samples, data.batch_size, data.shuffle, self._seed, self._epoch
        )
        # Keras drops an epoch's iterator before it makes the next one.
        self._samples, self._bounds = own_rows(
            self._order, data.batch_size, self._first, self._local, self._replicas
        )
        return iter(self._dataset)

    def _rows_of(self, part: Any) -> Any:
        begin, end = self._bounds[part], self._bounds[part + 1]
        if begin == end:  # see `strategies.data.batch_split`
            stop = (part // self._local + 1) * self._data.batch_size
            return self._order[:stop][-1:]
        return self._samples[begin:end]
