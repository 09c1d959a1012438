"""Epochs of arrays: a worker's rows of every batch, in an order common to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from kerasdist._keras import ArrayData
from kerasdist.collectives.row_exchange import equal_part
from kerasdist.strategies.data.batch_split import with_facts
from kerasdist.strategies.reduce.workers import ReplicaLayout, Workers

# The order of samples in an epoch, the same on all workers, and their division.
#
# These are pure functions of numbers: nothing is communicated but the seed.


def epoch_order(
    samples: int, batch_size: int, shuffle: bool | str, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Return the order of the samples in an epoch.

    Args:
        samples: Number of samples.
        batch_size: Rows of the global batch.
        shuffle: False, True, or "batch": only within each batch.
        seed: The seed, common to all workers.
        epoch: Number of the epoch; each has its own order.
    """
    order = np.arange(samples, dtype=np.int64)
    if not shuffle:
        return order
    random = np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, epoch]))
    )
    if shuffle == "batch":
        for start in range(0, samples, batch_size):
            random.shuffle(order[start : start + batch_size])
    else:
        random.shuffle(order)
    return order


def own_rows(
    order: npt.NDArray[np.int64],
    batch_size: int,
    first: int,
    local: int,
    replicas: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the samples of a worker's replicas, batch by batch.

    The division is that of `kerasdist.strategies.data.batch_split`.

    Args:
        order: All samples in the order of the epoch.
        batch_size: Rows of the global batch.
        first: Number of the worker's first replica over all workers.
        local: Number of its replicas.
        replicas: Number of replicas over all workers.

    Returns:
        The samples, and the bounds between parts: part i, which is replica
        `i % local`'s of batch `i // local`, is `samples[bounds[i]:bounds[i + 1]]`.
    """
    starts = np.arange(0, len(order), batch_size, dtype=np.int64)
    rows = np.minimum(batch_size, len(order) - starts)
    replica = first + np.arange(local, dtype=np.int64)
    length, longer = rows // replicas, rows % replicas
    lengths = length[:, None] + (replica[None, :] < longer[:, None])
    begins = starts[:, None] + (
        length[:, None] * replica[None, :]
        + np.minimum(replica[None, :], longer[:, None])
    )
    lengths, begins = lengths.reshape(-1), begins.reshape(-1)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    places = np.repeat(begins - bounds[:-1], lengths) + np.arange(bounds[-1])
    return order[places], bounds


def has_empty_parts(samples: int, batch_size: int, replicas: int) -> bool:
    """Return whether a batch of an epoch has fewer rows than there are replicas.

    Args:
        samples: Number of samples of an epoch.
        batch_size: Rows of the global batch.
        replicas: Number of replicas over all workers.
    """
    return (
        0 < min({min(batch_size, samples), samples % batch_size or samples}) < replicas
    )


def same_length(
    samples: int, batch_size: int, first: int, local: int, replicas: int
) -> int | None:
    """Return the number of rows of all parts of a worker, or None if it varies.

    A step that is traced for one number of rows costs less than one for any. A replica
    without rows needs the latter, because it computes with another's row.

    Args:
        samples: Number of samples of an epoch.
        batch_size: Rows of the global batch.
        first: Number of the worker's first replica over all workers.
        local: Number of its replicas.
        replicas: Number of replicas over all workers.
    """
    lengths = set()
    for rows in {min(batch_size, samples), samples % batch_size} - {0}:
        for replica in range(first, first + local):
            part = equal_part(rows, replicas, replica)
            lengths.add(part.stop - part.start)
    return lengths.pop() or None if len(lengths) == 1 else None


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

    def skip_epoch(self) -> None:
        """Count an iteration that isn't made: the later ones have the same orders."""
        self._epoch += 1


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
