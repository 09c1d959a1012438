"""The check that all workers read the same global batches in the same order.

Every worker takes its rows of each global batch of a dataset. If the workers' datasets
are shuffled differently, some samples are used twice and others never, without any
sign. So the first batches of each iteration carry a checksum, and the step that uses
one compares it over the workers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist.strategies.data.messages import with_remedies
from kerasdist.strategies.reduce.workers import Workers

CHECKSUM = "kerasdist_checksum"
# A different order shows in the first batches, or almost never.
_CHECKED = 2


class SameBatches:
    """The check of one strategy.

    Args:
        workers: The workers that compare.
        explain: Returns the error that is raised in place of one.
    """

    def __init__(
        self,
        workers: Workers,
        explain: Callable[[ValueError], ValueError] = lambda error: error,
    ) -> None:
        self._workers = workers
        self._explain = explain

    def wrap(self, index: Any, batch: Any, part: Any) -> Any:
        """Return a dataset's element: the part, and the batch's checksum or 0."""
        return {CHECKSUM: self.checksum(index, lambda: batch), "batch": part}

    def checksum(self, index: Any, batch: Callable[[], Any]) -> Any:
        """Return the checksum of the batch with an index in its pass, or 0.

        Args:
            index: A scalar int64 tensor.
            batch: Returns the batch, inside a graph. Only a batch with a checksum is
                made by it.
        """

        def of_batch() -> Any:
            flat = _tensors_of(batch())
            return tf.ensure_shape(tf.numpy_function(checksum_of, flat, tf.int64), [])

        return tf.cond(index < _CHECKED, of_batch, lambda: tf.constant(0, tf.int64))

    def compare(self, checksum: Any) -> None:
        """Compare a step's checksum over the workers, unless it's 0.

        Raises:
            ValueError: It differs. In a graph TensorFlow raises an error of its
                own with this text, and `Workers.fault` is this one.
        """
        ops = self._workers.ops

        def compare() -> Any:
            return ops.call(self._compare, [checksum], [tf.int64], [tf.TensorShape([])])

        tf.cond(checksum != 0, compare, lambda: [checksum])

    def _compare(self, checksum: Any) -> list[Any]:
        communicator = self._workers.communicator
        every = [int(c[0]) for c in communicator.all_gather(np.int64(checksum))]
        if len(set(every)) > 1:
            ranks = communicator.ranks
            others = [r for r, c in zip(ranks, every, strict=True) if c != every[0]]
            self._workers.fault = self._explain(different_batches(others, ranks[0]))
            raise self._workers.fault
        return [np.int64(checksum)]


def different_batches(others: list[int], first: int) -> ValueError:
    """Return the error that these ranks' batches differ from those of `first`."""
    return with_remedies(
        "The workers read different global batches: each takes its own rows of every "
        "batch, or its own batches, so all datasets must yield the same batches in the "
        "same order",
        f"ranks {others} differ from rank {first}",
    )


def checksum_of_batch(batch: Any) -> int:
    """Return the checksum of a batch, eagerly."""
    return int(checksum_of(*(tensor.numpy() for tensor in _tensors_of(batch))))


def _tensors_of(batch: Any) -> list[Any]:
    return [
        tensor
        for tensor in tf.nest.flatten(batch, expand_composites=True)
        if tensor is not None and tensor.dtype not in (tf.resource, tf.variant)
    ]


def checksum_of(*arrays: Any) -> Any:
    """Return a checksum of arrays, never 0."""
    crc = 0
    for array in arrays:
        data = np.ascontiguousarray(array)
        if data.dtype == object:
            crc = zlib.crc32(repr(data.tolist()).encode(), crc)
        else:
            crc = zlib.crc32(data.tobytes(), crc)
    return np.int64(crc + 1)
