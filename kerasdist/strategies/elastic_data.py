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
from kerasdist._keras.data.arrays import (
    BatchIterator,
    CountedData,
    RepeatableIterator,
)
from kerasdist._keras.protocols import StepTimer
from kerasdist._tf.row_pipelines import iterator_dataset
from kerasdist.strategies.data.batch_split import (
    ArrayEpochs,
    FetchedBatches,
    count_rows,
    part_of_batch,
    read_ahead,
    slice_rows,
    split_part,
)
from kerasdist.strategies.data.choice import CHECKSUM, checksum_of_batch
from kerasdist.strategies.data.own_rows import PerWorkerDataset, PerWorkerIterator
from kerasdist.strategies.reduce.workers import ReplicaLayout, Workers

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

# Datasets that are each worker's own, in a job whose workers may be lost.
#
# The others can't read a lost worker's data: what it hasn't trained on in this epoch is
# skipped, and one line reports that. A dataset that is divided by file is divided among
# the present workers at the beginning of each pass.


class ElasticOwnData(PerWorkerDataset, CountedData):
    """The iterable for Keras in place of a worker's own distributed dataset.

    Args:
        workers: The connected workers.
        timer: Measures steps, and the time of waiting.
        dataset: The worker's own dataset.

    Attributes:
        divide: Returns the worker's own part of data that all workers have; None: each
            worker has its own in any case.
        tell: Prints a line for the user, given its kind.
    """

    divide: Callable[[], Any] | None = None
    tell: Callable[[str, str], None]

    def __init__(self, workers: Workers, timer: StepTimer, dataset: Any) -> None:
        super().__init__(workers, timer, dataset)
        self._layout = workers.layout
        self._lost = 0

    def __iter__(self) -> PerWorkerIterator:
        if self.divide is not None and self._layout != self._workers.layout:
            self._layout = self._workers.layout
            self._dataset = self.divide()
        self.next_pass()
        return _Pass(self._workers, self._timer, self._dataset, self._report)

    def _report(self, lost: int) -> None:
        self._lost += lost
        text = (
            f"kerasdist: {lost} worker(s) with data of their own were lost; their "
            "batches that are left in this epoch are skipped."
        )
        if self.divide is not None:
            text += " The next epoch's data are divided among the others."
        self.tell(f"lost data {self._lost}", text)


class _Nothing:
    """An optional without a value, of any specification."""

    def has_value(self) -> bool:
        return False


class _Pass(PerWorkerIterator):
    """One pass over all present workers' own datasets."""

    def __init__(
        self,
        workers: Workers,
        timer: StepTimer,
        dataset: Any,
        report: Callable[[int], None],
    ) -> None:
        super().__init__(workers, timer, dataset)
        self._size = workers.size
        self._report = report
        self._paused = False
        # A batch that was read for its form, and not yielded yet.
        self._ahead: Any = None

    def pause(self, paused: bool) -> bool:
        """See `BatchIterator.pause`.

        Data that are divided by file are divided again in the next pass.
        """
        if paused and self._last is None:
            optional = self._iterator.get_next_as_optional()
            if optional.has_value():
                self._ahead, self._last = optional, optional.get_value()
        self._paused = paused or self._by_file is True
        return True

    @property
    def admits(self) -> bool:
        """See `BatchIterator.admits`: the first batch by file is another collective."""
        return self._paused or not self._by_file or self._last is not None

    def _next_own(self) -> Any:
        if self._paused:
            return _Nothing()
        ahead, self._ahead = self._ahead, None
        return super()._next_own() if ahead is None else ahead

    def _fetch(self) -> list[Any]:
        try:
            return super()._fetch()
        finally:
            # At the end of the data, too, of which the lost worker may have had more.
            before, self._size = self._size, self._workers.size
            if self._size < before:
                self._report(before - self._size)


class CountedBatches(RepeatableIterator):
    """One pass over a dataset, whose batches are counted here."""

    number = 0
    taken = 0
    # What reads the dataset.
    _source: Any = None

    def commit(self) -> None:
        """See `RepeatableIterator.commit`."""
        self.taken += 1

    def skip(self, batches: int) -> None:
        """See `RepeatableIterator.skip`: they are read."""
        while self.taken < batches and next(self._source, None) is not None:
            self.taken += 1


def _as_it_is(dataset: Any) -> Any:
    """Return a dataset that isn't optimized, and of which nothing is read ahead.

    Optimizing takes longer than it saves; see `ArrayRows.pipeline`.
    """
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    return dataset.with_options(options)


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
        self._layout = workers.layout
        self._divided = self._read_ahead()

    def __iter__(self) -> DatasetPass:
        layout = self.workers.layout
        if layout != self._layout:
            self._layout = layout
            self._divided = self._read_ahead()
        return DatasetPass(self, layout, self._divided, self.next_pass())

    def _read_ahead(self) -> Any:
        divided = self.divide(self._dataset.enumerate(), self._layout)
        return read_ahead(divided, self._dataset)

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


class DatasetPass(CountedBatches):
    """One pass over a dataset.

    Args:
        data: The iterable.
        layout: The present layout of the replicas.
        divided: The result of `data.divide` for that layout.
        number: See `RepeatableIterator.number`.
    """

    def __init__(
        self, data: ElasticDataset, layout: ReplicaLayout, divided: Any, number: int
    ) -> None:
        self._data = data
        self.number = number
        self._layout = layout
        # What reads the dataset, for any layout.
        self._divided = divided
        self._source = iter(divided)
        self._inner = _Parts(data.workers, self._source)
        self._once: Any = None

    @property
    def once(self) -> Any:
        """See `RepeatableIterator.once`."""
        workers = self._data.workers
        if workers.devices != (workers.host,):
            return self.inner
        if self._once is None:
            # In a graph the rows of a part aren't constants, as in the parts' facts.
            whole = iterator_dataset(self._source, self._divided)
            self._once = iter(whole.map(_first_part))
        return self._once

    @property
    def inner(self) -> Any:
        """See `RepeatableIterator.inner`."""
        layout = self._data.workers.layout
        if layout != self._layout:
            self._layout = layout
            unfinished = self._inner.unfinished
            divided = self._data.divide(self._rest(unfinished), layout)
            self._inner = _Parts(self._data.workers, iter(divided), unfinished)
        return self._inner

    def next_checksum(self) -> int:
        """See `RepeatableIterator.next_checksum`."""
        try:
            self.inner.at_least_one()
        except StopIteration:
            return 0
        _, batch = self._inner.unfinished
        return checksum_of_batch(batch)

    def commit(self) -> None:
        """See `RepeatableIterator.commit`."""
        super().commit()
        self._inner.commit()

    def renew(self) -> None:
        """See `RepeatableIterator.renew`."""
        self._inner.renew()

    def _rest(self, unfinished: Any) -> Any:
        """Return a dataset of the numbered global batches whose step isn't finished."""
        numbered = iterator_dataset(self._source, self._divided).map(_numbered)
        if unfinished is not None:
            first = tf.data.Dataset.from_tensors(unfinished)
            numbered = first.concatenate(numbered)
        # What is read ahead here would be missing after the next change.
        return _as_it_is(numbered)


class _Parts(BatchIterator):
    """This worker's parts, for one layout: per replica, if it has several.

    Args:
        workers: The connected workers.
        iterator: An iterator over a result of `ElasticDataset.divide`.
        unfinished: See below.

    Attributes:
        unfinished: The last numbered global batch that was read, for whatever layout;
            None: its step is finished.
    """

    def __init__(self, workers: Workers, iterator: Any, unfinished: Any = None) -> None:
        self._workers = workers
        self._iterator = iterator
        self._on_host = workers.devices == (workers.host,)
        if self._on_host:
            self.element_spec = iterator.element_spec["parts"][0]
        self.unfinished = unfinished
        self._element: Any = None
        self._again = False

    def commit(self) -> None:
        """Count the last batch as used up."""
        self.unfinished = self._element = None

    def renew(self) -> None:
        """Yield the last batch again unless it's used up."""
        self._again = self._element is not None

    def at_least_one(self) -> BatchIterator:
        """See `BatchIterator.at_least_one`."""
        if not self._again:
            self._element = next(self._iterator)
            self.unfinished = self._element["numbered"]
            self._again = True
        return self

    def __next__(self) -> Any:
        self.at_least_one()
        self._again = False
        parts = self._element["parts"]
        if self._on_host:
            return parts[0]
        placed = []
        for device, part in zip(self._workers.devices, parts, strict=True):
            with tf.device(device):
                placed.append(
                    tf.nest.map_structure(_copied, part, expand_composites=True)
                )
        return placed[0] if len(placed) == 1 else _tf.regroup(placed)


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


class CountedPass(CountedBatches):
    """One pass over a dataset.

    Args:
        data: The iterable.
        number: See `RepeatableIterator.number`.
    """

    kind = OWN_PASS

    def __init__(self, data: CountedDataset, number: int) -> None:
        self.kind = data.kind
        self.number = number
        self._dataset = data.dataset
        self._source = iter(data.dataset)

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


class ArrayEpoch(CountedBatches):
    """One epoch of arrays."""

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
