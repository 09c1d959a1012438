"""Data that go on, in the midst of an epoch, for another layout of the replicas.

The order of an epoch is a function of numbers, so that any layout's parts of the
remaining batches are known without communication:

    batch       0      1      2      3      4
    committed   x      x
    layout A    A0     A1     A2*                     * taken, and not committed
    layout B                  B2     B3     B4
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.data.arrays import (
    BatchIterator,
    CountedData,
    RepeatableIterator,
)
from kerasdist._keras.data.pydataset import ItemData
from kerasdist._tf.row_pipelines import iterator_dataset
from kerasdist._tf.variables import OWN_DATA, WHOLE_DATA
from kerasdist.strategies.data.batch_split import (
    ArrayEpochs,
    FetchedBatches,
    count_rows,
    for_replicas,
    part_of_batch,
    read_ahead,
    slice_rows,
    split_part,
)
from kerasdist.strategies.data.choice import (
    CHECKSUM,
    checksum_of_batch,
    in_elastic_job,
)
from kerasdist.strategies.data.own_rows import (
    PerWorkerDataset,
    has_own_policy,
    is_by_file,
)
from kerasdist.strategies.reduce.workers import ReplicaLayout, Workers
from kerasdist.strategies.sync.data import SynchronousData

# Datasets of global batches that go on for another layout of the replicas.
#
# The elements of the pipeline hold a whole global batch besides this worker's part of
# it. A step is given the part. After a change, the part for the new layout is made of
# the whole ones, beginning with that of the unfinished step:
#
#     layout A    (0, A0)  (1, A1)  (2, A2)*            * taken, and not committed
#                                    |   (3, A3)  (4, A4)  ...      some are read ahead
#     layout B                      (2, B2)  (3, B3)  (4, B4)  ...
#
# So nothing that has been read is lost, and the dataset is read once per pass: by the
# pipeline for the layout at the beginning of the pass, of whose elements later layouts
# take the whole batches.


def _as_it_is(dataset: Any) -> Any:
    """Return a dataset that isn't optimized, and of which nothing is read ahead.

    Optimizing takes longer than it saves; see `ArrayRows.pipeline`.
    """
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    return dataset.with_options(options)


# The kinds of passes over data that several workers divide, and over each one's own.
SHARED_PASS = "DatasetPass"
OWN_PASS = "OwnPass"


class ElasticDataset(CountedData):
    """The iterable over this worker's parts of a dataset; each iteration is a pass.

    Args:
        workers: The connected workers.
        dataset: Its elements are global batches, the same ones in the same order on
            every worker.
        wrap: See `strategies.data.batch_split.slice_dataset`.
    """

    def __init__(
        self, workers: Workers, dataset: Any, wrap: Callable[[Any, Any, Any], Any]
    ) -> None:
        self.workers = workers
        self._wrap = wrap
        self._dataset = dataset
        self._layout: ReplicaLayout | None = None
        self._divided: Any = None  # for that layout

    def __iter__(self) -> DatasetPass:
        layout = self.workers.layout
        if layout != self._layout:
            divided = self.divide(self._dataset.enumerate(), layout)
            self._layout = layout
            self._divided = read_ahead(divided, self._dataset)
        return DatasetPass(self, layout, self._divided, self.next_pass())

    def divide(self, numbered: Any, layout: ReplicaLayout) -> Any:
        """Return a dataset of numbers, global batches, and this worker's parts of them.

        Args:
            numbered: A dataset of numbers and global batches.
            layout: The layout of the replicas.
        """

        # No Python here depends on a tensor, and converting it takes the longest.
        @tf.autograph.experimental.do_not_convert
        def divided(number: Any, batch: Any) -> Any:
            if layout.total == 1:
                parts = [batch]
            else:
                rows = count_rows(batch)
                parts = [
                    self._wrap(number, batch, part_of_batch(batch, rows, i, layout))
                    for i in range(layout.first, layout.first + layout.local)
                ]
            return {"numbered": (number, batch), "parts": tuple(parts)}

        return numbered.map(divided)


class DatasetPass(RepeatableIterator, BatchIterator):
    """One pass over a dataset: this worker's parts, per replica if it has several.

    Args:
        data: The iterable.
        layout: The present layout of the replicas.
        divided: The result of `data.divide` for that layout.
        number: See `RepeatableIterator.number`.
    """

    kind = SHARED_PASS

    def __init__(
        self, data: ElasticDataset, layout: ReplicaLayout, divided: Any, number: int
    ) -> None:
        self._data = data
        self.number = number
        # What reads the dataset, for any layout.
        self._divided = divided
        self._source = iter(divided)
        self._once: Any = None
        # The last numbered global batch that was read, for whatever layout; None: its
        # step is finished. And the element that it was read in, for the present one.
        self._unfinished: Any = None
        self._element: Any = None
        self._again = False
        self._read(self._source, layout)

    def __iter__(self) -> DatasetPass:
        return self

    def _read(self, iterator: Any, layout: ReplicaLayout) -> None:
        """Read from an iterator over a result of `ElasticDataset.divide`."""
        self._iterator, self._layout = iterator, layout
        self._element, self._again = None, False
        if self._is_on_host:
            self.element_spec = iterator.element_spec["parts"][0]

    @property
    def _is_on_host(self) -> bool:
        workers = self._data.workers
        return workers.devices == (workers.host,)

    @property
    def once(self) -> Any:
        """See `RepeatableIterator.once`."""
        if not self._is_on_host:
            return self.inner
        if self._once is None:
            # In a graph the rows of a part aren't constants, as in the parts' facts.
            whole = iterator_dataset(self._source, self._divided)
            self._once = iter(whole.map(_first_part))
        return self._once

    @property
    def inner(self) -> DatasetPass:
        """See `RepeatableIterator.inner`."""
        self._adapt()
        return self

    def _adapt(self) -> None:
        """Adapt to a change of the layout, if there was one."""
        layout = self._data.workers.layout
        if layout != self._layout:
            divided = self._data.divide(self._rest(), layout)
            self._read(iter(divided), layout)

    def _rest(self) -> Any:
        """Return a dataset of the numbered global batches whose step isn't finished."""
        numbered = iterator_dataset(self._source, self._divided).map(_numbered)
        if self._unfinished is not None:
            first = tf.data.Dataset.from_tensors(self._unfinished)
            numbered = first.concatenate(numbered)
        # What is read ahead here would be missing after the next change.
        return _as_it_is(numbered)

    def next_checksum(self) -> int:
        """See `RepeatableIterator.next_checksum`."""
        if not self.admits:
            return 0
        _, batch = self._unfinished
        return checksum_of_batch(batch)

    def commit(self) -> None:
        """See `RepeatableIterator.commit`."""
        super().commit()
        self._unfinished = self._element = None

    def renew(self) -> None:
        """See `RepeatableIterator.renew`."""
        self._again = self._element is not None

    def at_least_one(self) -> DatasetPass:
        """See `BatchIterator.at_least_one`."""
        self._adapt()
        if not self._again:
            self._element = next(self._iterator)
            self._unfinished = self._element["numbered"]
            self._again = True
        return self

    def __next__(self) -> Any:
        self.at_least_one()
        self._again = False
        parts = self._element["parts"]
        if self._is_on_host:
            return parts[0]

        def placed(replica: int) -> Any:
            part = parts[replica]
            return tf.nest.map_structure(_copied, part, expand_composites=True)

        return for_replicas(self._data.workers.devices, placed)


def _copied(tensor: Any) -> Any:
    return None if tensor is None else tf.identity(tensor)


@tf.autograph.experimental.do_not_convert
def _first_part(element: Any) -> Any:
    return element["parts"][0]


@tf.autograph.experimental.do_not_convert
def _numbered(element: Any) -> Any:
    return element["numbered"]


# Datasets of a worker that is alone in its job: counted, and otherwise unchanged.
#
# No other layout of the replicas follows, so the iterators are those of any other job.
# Only what continues a preempted pass reads up to its place first.


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
        return CountedPass(self.dataset, self.kind, self.next_pass())


class CountedPass(RepeatableIterator):
    """One pass over a dataset.

    Args:
        dataset: See `CountedDataset`.
        kind: See `RepeatableIterator.kind`.
        number: See `RepeatableIterator.number`.
    """

    def __init__(self, dataset: Any, kind: str, number: int) -> None:
        self.kind, self.number = kind, number
        self._dataset = dataset
        self._source = iter(dataset)

    @property
    def inner(self) -> Any:
        """See `RepeatableIterator.inner`."""
        return self._source

    def renew(self) -> None:
        """See `RepeatableIterator.renew`: no step is repeated."""

    def next_checksum(self) -> int:
        """See `RepeatableIterator.next_checksum`."""
        first = next(self._source, None)
        if first is None:
            return 0
        rest = self._source
        if isinstance(self._dataset, tf.data.Dataset):
            # In a graph several steps may be one execution.
            following = iterator_dataset(rest, self._dataset)
            whole = tf.data.Dataset.from_tensors(first).concatenate(following)
            self._source = iter(_as_it_is(whole))
        else:
            self._source = _WithFirst(first, rest)
        return checksum_of_batch(_global_batch(first))


class _WithFirst(FetchedBatches):
    """An iterator of which a batch was read.

    Args:
        first: The batch.
        rest: The iterator.
    """

    def __init__(self, first: Any, rest: Any) -> None:
        super().__init__(first)
        self._rest = rest
        self.element_spec = rest.element_spec

    def _fetch(self) -> list[Any]:
        return [next(self._rest)]


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


class ElasticArrays(ArrayEpochs):
    """See `ArrayEpochs`; epochs go on after a change of the workers."""

    def __iter__(self) -> ArrayEpoch:
        return ArrayEpoch(self, self.next_pass())

    def checksum(self, epoch: int, batch: int) -> int:
        """Return a checksum of a global batch; 0 if there is none of this number."""
        size = self._data.batch_size
        rows = self.order(epoch)[batch * size : (batch + 1) * size]
        with tf.device(self.workers.host):
            return checksum_of_batch(self._rows.take(rows)) if len(rows) else 0


class ArrayEpoch(RepeatableIterator):
    """One epoch of arrays."""

    kind = "ArrayEpoch"

    def __init__(self, arrays: ElasticArrays, epoch: int) -> None:
        self._arrays = arrays
        self.number = epoch
        self._layout: ReplicaLayout | None = None
        self._inner: Any = None

    @property
    def inner(self) -> Any:
        """See `RepeatableIterator.inner`."""
        layout = self._arrays.workers.layout
        if self._inner is None or layout != self._layout:
            self._inner = None  # first, see `ArrayParts.order`
            self._layout = layout
            self._inner = self._arrays.begin(self.number, self.taken)
        return self._inner

    def skip(self, batches: int) -> None:
        """See `RepeatableIterator.skip`."""
        self.taken = batches
        self._inner = None

    def next_checksum(self) -> int:
        """See `RepeatableIterator.next_checksum`."""
        return self._arrays.checksum(self.number, self.taken)

    def renew(self) -> None:
        """See `RepeatableIterator.renew`."""
        self._inner = None


# The division of Keras's data in a job that goes on: after a change of its workers, or
# at another start.


class ContinuableData(SynchronousData, abc.ABC):
    """Iterables whose passes and batches are counted.

    Args: See `SynchronousData`.
    """

    array_epochs = ElasticArrays

    def distribute_dataset(self, dataset: Any, *args: Any) -> tuple[Any, int | None]:
        """See `SynchronousData.distribute_dataset`."""
        # It is divided again when the workers change.
        whole = WHOLE_DATA.get(dataset)
        dataset = dataset if whole is None else whole
        made, length = super().distribute_dataset(dataset, *args)
        return self._continuable(made, dataset), length

    @abc.abstractmethod
    def _continuable(self, made: Any, dataset: Any) -> Any:
        """Return the iterable over a dataset, made from this worker's parts of it."""


class DataAlone(ContinuableData):
    """The iterables of a job of one worker, with which another start may continue."""

    def _continuable(self, made: Any, dataset: Any) -> Any:
        if isinstance(dataset, tf.distribute.DistributedDataset):
            return made
        shared = self.shards and not has_own_policy(dataset)
        return CountedDataset(made, SHARED_PASS if shared else OWN_PASS)


class ElasticData(ContinuableData):
    """Iterables that go on, in the midst of an epoch, for other workers.

    They yield `RepeatableIterator`s, except for each worker's own data. All
    other data must be the same on all workers, also with data="auto": the chief's can't
    be used in their place, because the chief may be lost.
    """

    may_be_joined = True
    data_mode = "same"
    explain = staticmethod(in_elastic_job)

    def distribute_items(self, data: ItemData) -> None:
        """Compare the items of all workers; each reads all of them, see `DataHooks`.

        Raises:
            ValueError: The workers were given different data.
        """
        orders = self.orders
        super().distribute_items(data)
        # The order is drawn next, also by a worker that is alone and compares nothing.
        self.orders = orders

    def _continuable(self, made: Any, dataset: Any) -> Any:
        if isinstance(made, PerWorkerDataset):
            made.tell = self._log_once
            is_given = isinstance(dataset, tf.distribute.DistributedDataset)
            if self.shards and not is_given:
                made.divide = lambda: self._own_part(dataset)
        return made

    def _divide(self, dataset: Any, compared: bool = False) -> Any:
        del compared
        return ElasticDataset(self._workers, dataset, self._same.wrap)

    def _own_part(self, dataset: Any) -> Any | None:
        own = super()._own_part(dataset)
        if own is None and has_own_policy(dataset):
            # All of it is the part of a worker that is alone until others join.
            own = self._extended.distribute_parts(
                dataset.prefetch(tf.data.AUTOTUNE), complete=False
            )
            OWN_DATA.set(own, is_by_file(dataset))
        return own
