"""The division of a global batch's rows among the replicas.

The division is a function of three numbers, so that every worker knows every
replica's part without communication: of R replicas, the first `rows % R` get one row
more than the others. Replicas are numbered over all workers in rank order, so the
parts in order are the global batch in order. With shares of different sizes
(`strategies.balance`) replica r has the rows from `rows * cuts[r] // WHOLE` to
`rows * cuts[r + 1] // WHOLE`.

A replica that gets none computes with a copy of another's row, which counts for
nothing: a layer might refuse a row that isn't from the data, such as an empty string
that isn't in a vocabulary.
"""

from __future__ import annotations

import abc
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.data.arrays import (
    ArrayData,
    ArrayRows,
    BatchIterator,
    CountedData,
)
from kerasdist.collectives.row_exchange import equal_part
from kerasdist.strategies.reduce.workers import WHOLE, ReplicaLayout, Workers

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


def order_of_arrays(data: ArrayData, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order of the samples of arrays in an epoch, see `epoch_order`."""
    return epoch_order(data.samples, data.batch_size, data.shuffle, seed, epoch)


def order_of_items(length: int | None, shuffle: bool, seed: int, epoch: int) -> Any:
    """Return the order of a PyDataset's items in an epoch; None: ascending."""
    if not shuffle or length is None:
        return None
    return epoch_order(length, 1, True, seed, epoch)


def _sizes(samples: int, batch_size: int) -> set[int]:
    """Return the numbers of rows that batches of an epoch have."""
    return {min(batch_size, samples), samples % batch_size} - {0}


def same_length(samples: int, batch_size: int, layout: ReplicaLayout) -> int | None:
    """Return the number of rows of all parts of a worker, or None if it varies.

    A step that is traced for one number of rows costs less than one for any. A replica
    without rows needs the latter, because it computes with another's row.

    Args:
        samples: Number of samples of an epoch.
        batch_size: Rows of the global batch.
        layout: The numbers of the worker's replicas; with cuts between their rows it
            varies from epoch to epoch.
    """
    if layout.cuts is not None:
        return None
    lengths = set()
    for rows in _sizes(samples, batch_size):
        for replica in range(layout.first, layout.first + layout.local):
            part = equal_part(rows, layout.total, replica)
            lengths.add(part.stop - part.start)
    return lengths.pop() or None if len(lengths) == 1 else None


# Epochs of arrays: a worker's rows of every batch, in an order common to all.


class ArrayEpochs(CountedData):
    """The iterable over this worker's parts of arrays; each iteration is an epoch.

    The order of an epoch depends on the number of the iteration, which is counted
    here, where all workers count alike, and not where TensorFlow prefetches.

    Args:
        workers: The connected workers.
        data: The arrays.
        seed: The seed of the orders; common to all workers.
        distribute: Distributes a dataset of parts among the worker's replicas.
    """

    def __init__(
        self,
        workers: Workers,
        data: ArrayData,
        seed: int,
        distribute: Callable[[Any], Any],
    ) -> None:
        self.workers = workers
        self._data = data
        self._seed = seed
        self._distribute = distribute
        self._rows = data.rows()
        self._epoch = 0
        # Made for one layout of the replicas: the parts, and all of an epoch.
        self._parts: ArrayParts | None = None
        self._whole: Any = None
        self._order: tuple[int, Any] = (0, None)

    def __iter__(self) -> Iterator[Any]:
        return self.begin(self.next_pass())

    @property
    def length(self) -> int:
        """The number of batches in an epoch."""
        return -(-self._data.samples // self._data.batch_size)

    def next_pass(self) -> int:
        """See `CountedData.next_pass`."""
        self._epoch += 1
        return self._epoch

    def turn_to(self, number: int) -> None:
        """See `CountedData.turn_to`."""
        self._epoch = number - 1

    def restart(self) -> None:
        """Let the next iteration be the first one."""
        self._epoch = 0

    def begin(self, epoch: int, first: int = 0) -> Iterator[Any]:
        """Return an iterator over the parts of an epoch's batches.

        They are for the present layout of the replicas.

        Args:
            epoch: The number of the epoch.
            first: The number of the first batch.
        """
        parts = ArrayParts(self.workers, self._data)
        if self._parts is None or not self._parts.is_like(parts):
            # A new object, because threads may still read ahead for the old one.
            self._parts, self._whole = parts, None
        parts = self._parts
        if first:
            dataset = self._distribute(parts.dataset(self._rows, first))
        else:
            if self._whole is None:
                self._whole = self._distribute(parts.dataset(self._rows))
            dataset = self._whole
        parts.order = self.order(epoch)
        return iter(dataset)

    def order(self, epoch: int) -> Any:
        """Return the order of the samples in an epoch."""
        if self._order[0] != epoch:
            self._order = epoch, order_of_arrays(self._data, self._seed, epoch)
        return self._order[1]


class ArrayParts:
    """A worker's parts of the batches of arrays, for the present layout.

    Args:
        workers: The connected workers.
        data: The arrays.

    Attributes:
        order: The order of all samples in the present epoch. Keras drops an epoch's
            iterator before it makes the next one.
    """

    def __init__(self, workers: Workers, data: ArrayData) -> None:
        self.order: Any = None
        self._layout = workers.layout
        # One worker knows the rows of the global batch without communication.
        self._alone = workers.communicator.size == 1
        self._data = data

    def is_like(self, other: ArrayParts) -> bool:
        """Return whether others are for the same layout."""
        return (self._layout, self._alone) == (other._layout, other._alone)

    def dataset(self, data: ArrayRows, first: int = 0) -> Any:
        """Return the dataset of the parts of the epoch that has begun when it's read.

        Args:
            data: The rows of the arrays.
            first: The number of the first batch.
        """
        samples, batch_size = self._data.samples, self._data.batch_size
        layout, local = self._layout, self._layout.local
        known = same_length(samples, batch_size, layout)

        def rows(part: Any) -> Any:
            chosen = tf.numpy_function(self._rows_of, [part], tf.int64)
            return tf.ensure_shape(chosen, [known])

        sizes = _sizes(samples, batch_size)
        filled = layout.cuts is not None or any(size < layout.total for size in sizes)

        def finish(batch: Any, part: Any) -> Any:
            if self._alone and not filled:
                return batch
            total = tf.minimum(samples - part // local * batch_size, batch_size)
            if not filled:
                return with_facts(batch, total)
            replica = layout.first + part % local
            start, stop = bounds_of_replica(total, replica, layout)
            return with_facts(batch, total, stop - start)

        # As few stages as possible, because each epoch creates all of them.
        batches = -(-samples // batch_size)
        parts = tf.data.Dataset.range(first * local, batches * local)
        return data.pipeline(parts, rows, finish)

    def _rows_of(self, part: Any) -> Any:
        layout, size = self._layout, self._data.batch_size
        batch, replica = divmod(int(part), layout.local)
        rows = self.order[batch * size : (batch + 1) * size]
        start, stop = bounds_of_replica(len(rows), layout.first + replica, layout)
        return rows[start:stop] if start < stop else rows[-1:]  # see above


class FetchedBatches(BatchIterator):
    """An iterator over batches, of which some are fetched when one is needed.

    Args:
        waiting: Batches that were fetched before.
    """

    def __init__(self, *waiting: Any) -> None:
        self._waiting = deque(waiting)

    def at_least_one(self) -> BatchIterator:
        """See `BatchIterator.at_least_one`."""
        while not self._waiting:
            self._waiting.extend(self._fetch())
        return self

    def __next__(self) -> Any:
        self.at_least_one()
        return self._waiting.popleft()

    @abc.abstractmethod
    def _fetch(self) -> list[Any]:
        """Return the next batches; raises StopIteration if there's none."""


# A part for a step: its rows, and facts about them.

_TOTAL = "kerasdist_total_rows"
_ROWS = "kerasdist_own_rows"


def count_rows(batch: Any) -> Any:
    """Return the number of rows of a batch, as a scalar int64 tensor.

    Args:
        batch: A nest of tensors or arrays whose first dimensions count rows; None is
            skipped.

    Raises:
        ValueError: It contains no tensor with a first dimension.
    """
    for tensor in tf.nest.flatten(batch, expand_composites=False):
        if tensor is None:
            continue
        if isinstance(tensor, tf.SparseTensor):
            return tensor.dense_shape[0]
        if isinstance(tensor, tf.RaggedTensor):
            return tensor.nrows(out_type=tf.int64)
        if isinstance(tensor, np.ndarray) and tensor.ndim:
            return tf.constant(len(tensor), tf.int64)
        if tf.is_tensor(tensor) and tensor.shape.rank != 0:
            if tensor.shape.rank and tensor.shape[0] is not None:
                return tf.constant(tensor.shape[0], tf.int64)
            return tf.shape(tensor, out_type=tf.int64)[0]
    raise ValueError(
        "A batch must have a first dimension that counts its samples. "
        f"Received: a batch of structure {batch!r}. Call `.batch(global_batch_size)` "
        "on the dataset."
    )


def rows_of(part: Any) -> Any:
    """Return the number of rows of a replica's part; 0 without a first dimension."""
    batch, rows, _ = split_part(part)
    if rows is not None:
        return rows
    try:
        return count_rows(batch)
    except ValueError:
        return tf.constant(0, tf.int64)


def fill_if_empty(batch: Any) -> Any:
    """Return the batch, or one row of zeros if it has none.

    This is the last resort: see `part_of_batch`.

    Args:
        batch: A nest of tensors with a common first dimension.
    """
    rows = count_rows(batch)

    def one_row(tensor: Any) -> Any:
        if isinstance(tensor, tf.SparseTensor):
            shape = tf.concat([[1], tensor.dense_shape[1:]], 0)
            return tf.SparseTensor(tensor.indices, tensor.values, shape)
        if isinstance(tensor, tf.RaggedTensor):
            return tf.RaggedTensor.from_row_splits(
                tensor.values, tf.zeros([2], tensor.row_splits.dtype)
            )
        if tensor.shape.rank == 0:
            return tensor
        shape = tf.concat([[1], tf.shape(tensor)[1:]], 0)
        return tf.zeros(shape, tensor.dtype)

    if tf.get_static_value(rows) == 0:
        return map_tensors(one_row, batch)
    flat = [tensor for tensor in tf.nest.flatten(batch) if tensor is not None]
    # Results of unequal shapes: XLA would make all that follow dynamic, and the shapes
    # of some of them are wrong then.
    with _tf.outside_of_xla():
        filled = tf.cond(rows > 0, lambda: flat, lambda: [one_row(t) for t in flat])
    for before, after in zip(flat, filled, strict=True):
        if not tf.executing_eagerly() and hasattr(after, "set_shape"):
            after.set_shape(before.shape)
    left = iter(filled)
    return map_tensors(lambda _: next(left), batch)


def for_replicas(devices: Sequence[str], make: Callable[[int], Any]) -> Any:
    """Return the parts of this worker's replicas: one, or a value with all of them.

    Args:
        devices: The replicas' devices, on which the parts are made.
        make: Returns a part, given the replica's number on this worker.
    """
    parts = []
    for replica, device in enumerate(devices):
        with tf.device(device):
            parts.append(make(replica))
    return parts[0] if len(parts) == 1 else _tf.regroup(parts)


def map_tensors(function: Callable[[Any], Any], batch: Any) -> Any:
    """Call a function with each tensor of a nest.

    None stays: it stands for a missing value, such as sample weights.
    """
    return tf.nest.map_structure(
        lambda tensor: None if tensor is None else function(tensor),
        batch,
        expand_composites=False,
    )


def part_of_batch(
    batch: Any,
    rows: Any,
    replica: int,
    layout: ReplicaLayout,
    *,
    whole: bool = True,
) -> Any:
    """Return the part of a global batch for a step of one replica.

    It consists of the replica's rows and the facts that `split_part` returns. Without
    rows it's a copy of the batch's last one.

    Args:
        batch: A nest of tensors whose first dimensions count rows.
        rows: Number of rows of the batch's first tensor, a scalar int64 tensor.
        replica: The replica's number over all workers.
        layout: A layout with the total and the cuts; its worker doesn't matter.
        whole: Whether `rows` are those of all replicas of the job.
    """

    def take(tensor: Any, start: Any, stop: Any) -> Any:
        if layout.cuts is None and isinstance(start, int) and start < stop:
            return slice_rows(tensor, start, stop)
        start, stop = (tf.convert_to_tensor(x, tf.int64) for x in (start, stop))
        if layout.cuts is not None:
            start, stop = varying(start), varying(stop)
        last = tf.maximum(tf.cast(count_rows(tensor), tf.int64) - 1, 0)
        first = tf.where(stop > start, start, last)
        return slice_rows(tensor, first, tf.maximum(stop, first + 1))

    part = _divided(batch, replica, layout, take)
    return with_own_facts(part, rows, replica, layout, whole=whole)


def with_own_facts(
    part: Any,
    rows: Any,
    replica: int,
    layout: ReplicaLayout,
    *,
    whole: bool = True,
) -> Any:
    """Add the facts for a step to a replica's part.

    Args: See `part_of_batch`; `rows` may be a number.
    """
    total = tf.convert_to_tensor(rows, tf.int64) if whole else None
    known = tf.get_static_value(rows)
    if layout.cuts is None and known is not None and known >= layout.total:
        return with_facts(part, total)
    start, stop = bounds_of_replica(rows, replica, layout)
    return with_facts(part, total, tf.cast(stop - start, tf.int64))


def _divided(
    batch: Any,
    replica: int,
    layout: ReplicaLayout,
    take: Callable[[Any, Any, Any], Any],
) -> Any:
    """Divide each tensor by its own rows: zipped datasets may differ in batch size."""

    def part(tensor: Any) -> Any:
        if not isinstance(tensor, tf.SparseTensor) and tensor.shape.rank == 0:
            return tensor
        return take(tensor, *bounds_of_replica(count_rows(tensor), replica, layout))

    return map_tensors(part, batch)


def varying(number: Any) -> Any:
    """Return a number whose value isn't a part of the graph that reads it.

    So steps aren't traced again for each number of rows.
    """
    return tf.raw_ops.PlaceholderWithDefault(input=number, shape=[])


def bounds_of_replica(
    rows: Any, replica: Any, layout: ReplicaLayout
) -> tuple[Any, Any]:
    """Return a replica's first row, and the one after its last: numbers or tensors.

    Args:
        rows: Number of rows of the batch: a number or a tensor.
        replica: The replica's number over all workers; a tensor only if `rows` is one.
        layout: See `part_of_batch`.
    """
    cuts, replicas = layout.cuts, layout.total
    known = rows if isinstance(rows, int) else tf.get_static_value(rows)
    if cuts is not None:
        whole = tf.cast(rows, tf.int64) if known is None else int(known)
        cuts = cuts if isinstance(replica, int) else tf.constant(cuts, tf.int64)
        return whole * cuts[replica] // WHOLE, whole * cuts[replica + 1] // WHOLE
    if known is not None:
        own = equal_part(int(known), replicas, replica)
        return own.start, own.stop
    length, longer = rows // replicas, rows % replicas
    start = replica * length + tf.minimum(tf.cast(replica, tf.int64), longer)
    return start, start + length + tf.cast(replica < longer, tf.int64)


def slice_rows(batch: Any, start: Any, stop: Any) -> Any:
    """Return the rows from `start` to `stop` of a nest of tensors; keep None."""

    def take(tensor: Any) -> Any:
        if isinstance(tensor, tf.SparseTensor):
            return _tf.sparse_rows(tensor, start, stop - start)
        if isinstance(tensor, tf.RaggedTensor) or tensor.shape.rank != 0:
            return tensor[start:stop]
        return tensor

    return map_tensors(take, batch)


def with_facts(part: Any, total: Any, rows: Any = None) -> Any:
    """Add the facts for a step to a replica's part, see `split_part`."""
    facts = {_TOTAL: total, _ROWS: rows}
    known = {name: fact for name, fact in facts.items() if fact is not None}
    return {"batch": part, **known} if known else part


def split_part(data: Any) -> tuple[Any, Any, Any]:
    """Split what `with_facts` has combined.

    Returns:
        The batch; the replica's number of rows; that of the global batch. Numbers are
        scalar int64 tensors. None for the replica's rows: see the batch; None for the
        global batch's: not known.
    """
    if isinstance(data, tuple) and len(data) == 1:
        # `predict_on_batch` passes it like this.
        batch, rows, total = split_part(data[0])
        return (batch,), rows, total
    if not isinstance(data, dict) or not {_TOTAL, _ROWS} & data.keys():
        return data, None, None
    return data["batch"], data.get(_ROWS), data.get(_TOTAL)


def slice_dataset(
    dataset: Any,
    layout: ReplicaLayout,
    wrap: Callable[[Any, Any, Any], Any] | None = None,
) -> Any:
    """Turn a dataset of global batches into one of this worker's parts of them.

    Args:
        dataset: Its elements are global batches, the same ones in the same order
            on every worker.
        layout: The numbers of this worker's replicas.
        wrap: Makes the element of index, global batch and result of `part_of_batch`.

    Returns:
        A dataset with an element for each replica of the worker and global batch: their
        parts in order. Without `wrap` parts may have no rows.
    """

    def part(index: Any, batch: Any, replica: int) -> Any:
        rows = count_rows(batch)
        if wrap is None:
            return _divided(batch, replica, layout, slice_rows)
        return wrap(index, batch, part_of_batch(batch, rows, replica, layout))

    replicas = range(layout.first, layout.first + layout.local)
    parts = parts_of_replicas(dataset.enumerate(), replicas, part)
    return read_ahead(parts, dataset)


def parts_of_replicas(
    dataset: Any, replicas: Sequence[int], part: Callable[..., Any]
) -> Any:
    """Return a dataset of the replicas' parts, in order, of each element.

    Args:
        dataset: Its elements are tuples.
        replicas: The numbers of the replicas.
        part: Returns a part, given an element and the number of a replica.
    """
    # No Python here depends on a tensor, and converting it takes the longest.
    plain = tf.autograph.experimental.do_not_convert
    if len(replicas) == 1:
        return dataset.map(plain(lambda *element: part(*element, replicas[0])))

    def parts(*element: Any) -> Any:
        every = [tf.data.Dataset.from_tensors(part(*element, i)) for i in replicas]
        return functools.reduce(lambda one, other: one.concatenate(other), every)

    return dataset.flat_map(plain(parts))


def read_ahead(parts: Any, dataset: Any) -> Any:
    """Let a dataset's parts be read ahead.

    A dataset without autotuning is prefetched by its reader, as Keras does for a
    PyDataset: an iterator that isn't used any more would take its items.
    """
    if dataset.options().autotune.enabled is False:
        return parts
    return parts.prefetch(tf.data.AUTOTUNE)
