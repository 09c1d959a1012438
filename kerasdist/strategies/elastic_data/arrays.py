"""Epochs of arrays that go on for another layout of the replicas.

The order of an epoch is a function of numbers, so that any layout's parts of the
remaining batches are known without communication:

    batch       0      1      2      3      4
    committed   x      x
    layout A    A0     A1     A2*                     * taken, and not committed
    layout B                  B2     B3     B4
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras import ArrayData, BatchIterator, CountedData, RepeatableIterator
from kerasdist._tf.graph.row_pipelines import iterator_dataset
from kerasdist.strategies.data.array_epochs import ArrayParts, epoch_order
from kerasdist.strategies.data.batch_split import (
    CHECKSUM,
    checksum_of_batch,
    slice_rows,
    split_part,
)
from kerasdist.strategies.elastic_data.datasets import DatasetPass
from kerasdist.strategies.reduce.workers import ReplicaLayout, Workers

# Datasets of a worker that is alone in its job: counted, and otherwise unchanged.
#
# No other layout of the replicas follows, so the iterators are those of any other job.
# Only what continues a preempted pass reads up to its place first.

# Of data that several workers would divide, and of data that are each worker's own.
SHARED_PASS = DatasetPass.__name__
OWN_PASS = "OwnPass"


class CountedDataset(CountedData):
    """The iterable over this worker's data; each iteration is a pass.

    Args:
        dataset: A dataset, or one that is distributed among this worker's replicas.
        kind: See `RepeatableIterator.kind`.
    """

    def __init__(self, dataset: Any, kind: str) -> None:
        self.dataset = dataset
        self.kind = kind

    def __iter__(self) -> CountedPass:
        return CountedPass(self, self.next_pass())


class CountedPass(RepeatableIterator):
    """One pass over a dataset.

    Args:
        data: The iterable.
        number: See `RepeatableIterator.number`.
    """

    def __init__(self, data: CountedDataset, number: int) -> None:
        self._data = data
        self._number = number
        self._taken = 0
        self._inner = iter(data.dataset)

    @property
    def kind(self) -> str:
        """See `RepeatableIterator.kind`."""
        return self._data.kind

    @property
    def inner(self) -> Any:
        """See `RepeatableIterator.inner`."""
        return self._inner

    @property
    def number(self) -> int:
        """See `RepeatableIterator.number`."""
        return self._number

    @property
    def taken(self) -> int:
        """See `RepeatableIterator.taken`."""
        return self._taken

    def commit(self) -> None:
        """See `RepeatableIterator.commit`."""
        self._taken += 1

    def renew(self) -> None:
        """See `RepeatableIterator.renew`: no step is repeated."""

    def skip(self, batches: int) -> None:
        """See `RepeatableIterator.skip`: they are read."""
        while self._taken < batches and next(self._inner, None) is not None:
            self._taken += 1

    def next_checksum(self) -> int:
        """See `RepeatableIterator.next_checksum`."""
        first = next(self._inner, None)
        if first is None:
            return 0
        rest = self._inner
        if isinstance(self._data.dataset, tf.data.Dataset):
            # In a graph several steps may be one execution.
            following = iterator_dataset(rest, self._data.dataset)
            whole = tf.data.Dataset.from_tensors(first).concatenate(following)
            options = tf.data.Options()
            options.experimental_optimization.apply_default_optimizations = False
            options.autotune.enabled = False
            self._inner = iter(whole.with_options(options))
        else:
            self._inner = _WithFirst(first, rest)
        return checksum_of_batch(_global_batch(first))


class _WithFirst(BatchIterator):
    """An iterator of which a batch was read.

    Args:
        first: The batch.
        rest: The iterator.
    """

    def __init__(self, first: Any, rest: Any) -> None:
        self._waiting = [first]
        self._rest = rest
        self.element_spec = rest.element_spec

    def __next__(self) -> Any:
        return self._waiting.pop() if self._waiting else next(self._rest)

    def at_least_one(self) -> BatchIterator:
        """See `BatchIterator.at_least_one`."""
        if not self._waiting:
            self._waiting.append(next(self._rest))
        return self


def _global_batch(element: Any) -> Any:
    """Return the batch of which the replicas have parts."""
    if isinstance(element, dict) and CHECKSUM in element:
        element = element["batch"]
    local = [_tf.local_results(each) for each in tf.nest.flatten(element)]
    parts = []
    for index in range(max(map(len, local))):
        # What isn't a tensor is the same on all replicas.
        flat = [each[index if len(each) > 1 else 0] for each in local]
        part = tf.nest.pack_sequence_as(element, flat)
        batch, rows, _ = split_part(part)
        parts.append(batch if rows is None else slice_rows(batch, 0, rows))
    return parts[0] if len(parts) == 1 else tf.nest.map_structure(_joined, *parts)


def _joined(*parts: Any) -> Any:
    first = parts[0]
    if isinstance(first, tf.SparseTensor):
        return tf.sparse.concat(0, parts)
    if isinstance(first, tf.RaggedTensor) or (first is not None and first.shape.rank):
        return tf.concat(parts, 0)
    return first


class ElasticArrays(CountedData):
    """The iterable over this worker's parts of arrays; each iteration is an epoch.

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
        self._epoch = 0
        self._distribute = distribute
        self._take = data.pipelines()
        self._made_for: tuple[ReplicaLayout, bool] | None = None
        self._parts: ArrayParts | None = None
        self._whole: Any = None  # the parts of all batches, for that layout
        self._order: tuple[int, Any] = (0, None)

    def __iter__(self) -> ArrayEpoch:
        return ArrayEpoch(self, self.next_pass())

    def next_pass(self) -> int:
        """See `CountedData.next_pass`."""
        self._epoch += 1
        return self._epoch

    def turn_to(self, number: int) -> None:
        """See `CountedData.turn_to`."""
        self._epoch = number - 1

    def begin(self, layout: ReplicaLayout, epoch: int, first: int) -> Any:
        """Return an iterator over the parts of an epoch's batches.

        Args:
            layout: The present layout of the replicas.
            epoch: The number of the epoch.
            first: The number of the first batch.
        """
        data = self._data
        alone = self.workers.communicator.size == 1
        if self._parts is None or self._made_for != (layout, alone):
            # Also a new object, because threads may still read ahead for the old one.
            self._parts = ArrayParts(layout, data, alone=alone)
            self._made_for, self._whole = (layout, alone), None
        parts = self._parts
        parts.begin(self._order_of(epoch))
        if first:
            return iter(self._distribute(parts.dataset(self._take, first)))
        if self._whole is None:
            self._whole = self._distribute(parts.dataset(self._take))
        return iter(self._whole)

    def checksum(self, epoch: int, batch: int) -> int:
        """Return a checksum of a global batch; 0 if there is none of this number."""
        data = self._data
        rows = self._order_of(epoch)[batch * data.batch_size :][: data.batch_size]
        if not len(rows):
            return 0
        one = tf.data.Dataset.range(1)
        for found in self._take(one, lambda _: tf.constant(rows), lambda b, _: b):
            return checksum_of_batch(found)
        return 0

    def _order_of(self, epoch: int) -> Any:
        data = self._data
        if self._order[0] != epoch:
            order = epoch_order(
                data.samples, data.batch_size, data.shuffle, self._seed, epoch
            )
            self._order = epoch, order
        return self._order[1]


class ArrayEpoch(RepeatableIterator):
    """One epoch of arrays."""

    def __init__(self, arrays: ElasticArrays, epoch: int) -> None:
        self._arrays = arrays
        self._epoch = epoch
        self._committed = 0
        self._layout: ReplicaLayout | None = None
        self._inner: Any = None

    @property
    def inner(self) -> Any:
        """See `RepeatableIterator.inner`."""
        layout = self._arrays.workers.layout
        if self._inner is None or layout != self._layout:
            self._inner = None  # first, see `ArrayParts.begin`
            self._layout = layout
            self._inner = self._arrays.begin(layout, self._epoch, self._committed)
        return self._inner

    def commit(self) -> None:
        """See `RepeatableIterator.commit`."""
        self._committed += 1

    @property
    def number(self) -> int:
        """See `RepeatableIterator.number`."""
        return self._epoch

    @property
    def taken(self) -> int:
        """See `RepeatableIterator.taken`."""
        return self._committed

    def skip(self, batches: int) -> None:
        """See `RepeatableIterator.skip`."""
        self._committed = batches
        self._inner = None

    def next_checksum(self) -> int:
        """See `RepeatableIterator.next_checksum`."""
        return self._arrays.checksum(self._epoch, self._committed)

    def renew(self) -> None:
        """See `RepeatableIterator.renew`."""
        self._inner = None
