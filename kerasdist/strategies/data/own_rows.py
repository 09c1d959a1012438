"""This worker's parts of global batches, of which it makes its own rows only.

Every worker reads all elements up to the maps: they cost little, and their order is
that of one process. Of each window of elements, which is one global batch, it then
takes its own, calls the maps with these, and makes a batch of them:

    window of B elements -> own M of them -> maps -> batch(M) -> a part per replica

The division is that of `batch_split`. A window always yields M elements, so that
windows and batches never get out of step: where the last one has fewer, its last
element is repeated, and cut off from the batch.

The first batches of each pass are made as a whole, for the check that all workers have
the same ones, unless they have been compared before.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.data.arrays import CountedData
from kerasdist._keras.protocols import StepTimer
from kerasdist._tf.row_pipelines import RowPipeline
from kerasdist._tf.variables import OWN_DATA
from kerasdist.collectives.row_exchange import equal_part
from kerasdist.strategies.data.batch_split import (
    FetchedBatches,
    bounds_of_replica,
    for_replicas,
    parts_of_replicas,
    read_ahead,
    slice_rows,
    split_part,
    varying,
    with_facts,
    with_own_facts,
)
from kerasdist.strategies.data.choice import (
    CHECKSUM,
    SameBatches,
)
from kerasdist.strategies.reduce.consensus import Consensus
from kerasdist.strategies.reduce.workers import ReplicaLayout, Workers

# Datasets that are each worker's own: iterate until the longest has ended.
#
# `distribute_datasets_from_function` lets every worker make its own dataset, and their
# lengths may differ. A worker whose dataset has ended continues with empty batches,
# which weigh nothing, until all have ended: so no worker waits for one that has left.
# Each batch costs one small collective. The same holds for datasets that are divided by
# file, see `own_part`; there a worker without any data is an error.
#
# Where workers may be lost, the others can't read a lost worker's data: what it hasn't
# trained on in this epoch is skipped, and one line reports that. A dataset that is
# divided by file is divided among the present workers at the beginning of each pass.

# TensorFlow's message on each rank that has a file; the last of them has seen all.
_TOO_FEW_FILES = re.compile(r"the dataset only has (\d+) file")


class PerWorkerDataset(CountedData):
    """The iterable for Keras in place of a worker's own distributed dataset.

    Args:
        workers: The connected workers.
        timer: Measures steps, and the time of waiting.
        dataset: The worker's own dataset.

    Attributes:
        dataset: See above.
        divide: Returns the worker's own part of data that all workers have; None: each
            worker has its own in any case.
        tell: Prints a line for the user, given its kind; None: no worker may be lost.
    """

    divide: Callable[[], Any] | None = None
    tell: Callable[[str, str], None] | None = None

    def __init__(self, workers: Workers, timer: StepTimer, dataset: Any) -> None:
        self.workers, self.timer, self.dataset = workers, timer, dataset
        self._layout = workers.layout
        self._lost = 0

    def __iter__(self) -> PerWorkerIterator:
        if self.divide is not None and self._layout != self.workers.layout:
            self._layout = self.workers.layout
            self.dataset = self.divide()
        self.next_pass()
        return PerWorkerIterator(self)

    def report(self, lost: int) -> None:
        """Report workers that were lost in a pass."""
        self._lost += lost
        text = (
            f"kerasdist: {lost} worker(s) with data of their own were lost; their "
            "batches that are left in this epoch are skipped."
        )
        if self.divide is not None:
            text += " The next epoch's data are divided among the others."
        if self.tell is not None:
            self.tell(f"lost data {self._lost}", text)


class PerWorkerIterator(FetchedBatches):
    """One pass over all present workers' own datasets."""

    def __init__(self, data: PerWorkerDataset) -> None:
        super().__init__()
        self._data, self._workers = data, data.workers
        self._size = data.workers.size
        self._iterator = iter(data.dataset)
        self._spec = data.dataset.element_spec
        self._by_file = OWN_DATA.get(data.dataset)
        self._last: Any = None
        self._paused = False
        # Whether the others had fetched the next batch before this worker joined.
        self._is_known = False
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
        self._is_known = paused
        return True

    @property
    def admits(self) -> bool:
        """See `BatchIterator.admits`: the first batch by file is another collective."""
        is_first = self._by_file and self._last is None and not self._paused
        return not is_first and super().admits

    def _fetch(self) -> list[Any]:
        try:
            return self._fetch_one()
        finally:
            # At the end of the data, too, of which the lost worker may have had more.
            before, self._size = self._size, self._workers.size
            if self._size < before:
                self._data.report(before - self._size)

    def _fetch_one(self) -> list[Any]:
        timer = self._data.timer
        begin = time.time()
        optional = None if self._paused else self._next_own()
        here = optional is not None and bool(optional.has_value())
        fetched = time.time()
        timer.waited(fetched - begin)
        known, self._is_known = self._is_known, False
        any_left = known or Consensus(self._workers).any_of(here)
        timer.waited(time.time() - fetched, others=True)
        if not any_left:
            raise StopIteration
        if optional is not None and here:
            self._last = optional.get_value()
            return [self._last]
        if self._last is None:
            return [tf.nest.map_structure(self._empty, self._spec)]
        # This worker's results count for nothing, see `data.batch_split`.
        none = tf.constant(0, tf.int64)

        def idle(replica: int) -> Any:
            batch, _, _ = split_part(_tf.select_replica(replica, self._last))
            return with_facts(slice_rows(batch, 0, 1), None, none)

        return [for_replicas(self._workers.devices, idle)]

    def _next_own(self) -> Any:
        """Return this worker's next batch as an optional."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return ahead
        if self._by_file and self._last is None:
            return self._first_by_file()
        return self._iterator.get_next_as_optional()

    def _first_by_file(self) -> Any:
        """Return the first batch of a dataset that is divided by file.

        Raises:
            ValueError: Some workers have no data. All workers raise it.
        """
        communicator = self._workers.communicator
        optional, fault, state = None, None, 0
        try:
            optional = self._iterator.get_next_as_optional()
            state = int(bool(optional.has_value()))
        except tf.errors.InvalidArgumentError as error:
            found = _TOO_FEW_FILES.search(str(error))
            if found is None:
                raise
            fault, state = error, -int(found[1])
        every = [int(s[0]) for s in communicator.all_gather(np.int64(state))]
        files = -min(every)
        if files > 0:
            raise ValueError(
                "The dataset is divided by file (AutoShardPolicy.FILE), and there are "
                f"fewer files than workers. Received: {files} file(s), "
                f"{communicator.size} workers. Write the data into more files, at "
                "least one per worker, or use AutoShardPolicy.DATA, with which every "
                "worker reads all files and takes its rows."
            ) from fault
        ranks = communicator.ranks
        without = [rank for rank, s in zip(ranks, every, strict=True) if s == 0]
        if without:
            raise ValueError(
                "The dataset is divided by file (AutoShardPolicy.FILE), and some "
                f"workers' files hold no data. Received: nothing on ranks {without} of "
                f"{communicator.size}. Divide the data among the files more evenly, or "
                "use AutoShardPolicy.DATA, with which every worker reads all files and "
                "takes its rows."
            )
        return optional

    def _empty(self, like: Any) -> Any:
        """Return a batch without rows that matches a specification."""
        empty = []
        for part in getattr(like, "_value_specs", [like]):
            inner = [1 if size is None else size for size in part.shape[1:]]
            empty.append(tf.zeros([0, *inner], part.dtype))
        return empty[0] if len(empty) == 1 else _tf.regroup(empty)


# The user's own choice of how a `tf.data.Dataset` is divided among the workers.
#
# It's TensorFlow's option `experimental_distribute.auto_shard_policy`:
#
#     AUTO, DATA, HINT   each worker reads the whole dataset and takes its rows of each
#                        global batch: the numbers of one process
#                        (`strategies.data.batch_split`)
#     FILE               each worker reads every N-th file, N workers
#     OFF                each worker's dataset is its own
#
# With FILE and OFF the batch size of the dataset is still that of the global batch:
# each worker divides its batches among as many steps as make its share of one.

_Policy = tf.data.experimental.AutoShardPolicy


def is_by_file(dataset: Any) -> bool:
    """Return whether the user has chosen that each worker reads its own files."""
    return bool(_policy(dataset) == _Policy.FILE)


def has_own_policy(dataset: Any) -> bool:
    """Return whether the user has chosen FILE or OFF."""
    return _policy(dataset) in (_Policy.FILE, _Policy.OFF)


def own_part(
    workers: Workers,
    dataset: Any,
    layout: ReplicaLayout | None = None,
) -> Any | None:
    """Return this worker's part of a dataset with the policy FILE or OFF.

    Args:
        workers: The connected workers.
        dataset: The dataset.
        layout: The replicas that divide a batch; by default `workers.layout`.

    Returns:
        A dataset of batches for the worker's replicas in turn. Those of other workers
        may have other lengths. None with another policy.

    Raises:
        ValueError: The dataset's elements aren't batches, or TensorFlow finds no files
            that it reads. All workers raise it.
    """
    if not has_own_policy(dataset):
        return None
    by_file = is_by_file(dataset)
    communicator = workers.communicator
    first, _, replicas, _ = layout or workers.layout
    if any(
        spec.shape.rank == 0
        for spec in tf.nest.flatten(dataset.element_spec)
        if isinstance(spec, tf.TensorSpec)
    ):
        raise ValueError(
            "A dataset's elements must be global batches: their first dimension counts "
            f"samples. Received: elements of {dataset.element_spec!r}. Call "
            "`.batch(global_batch_size)` on the dataset."
        )
    batch_size = _tf.static_batch_size(dataset)
    if batch_size is None:
        # A function after `batch` may change the size, so each batch is divided by
        # itself.
        dataset = _tf.RebatchDataset(dataset, replicas)
    else:
        dataset = dataset.rebatch(own_sizes(batch_size, first, replicas))
    if by_file:
        try:
            dataset = _tf.AutoShardDataset(
                dataset, communicator.size, communicator.rank, replicas
            )
        except tf.errors.NotFoundError as error:
            raise ValueError(
                "The dataset can't be divided by file: TensorFlow finds no files that "
                "it reads (as `TFRecordDataset`, `TextLineDataset` or "
                "`FixedLengthRecordDataset` do). Received: "
                "auto_shard_policy=AutoShardPolicy.FILE. Use AutoShardPolicy.DATA, or "
                "`strategy.distribute_datasets_from_function`."
            ) from error
    return dataset.prefetch(tf.data.AUTOTUNE)


def own_sizes(batch_size: int, first: int, replicas: int) -> list[int]:
    """Return the sizes of the batches that a worker's replicas get in turn.

    Args:
        batch_size: Rows of the global batch.
        first: Number of the worker's first replica over all workers.
        replicas: Number of replicas over all workers.

    Returns:
        One size per replica, repeated. Workers begin at different places, so that all
        replicas together get a global batch in each step.
    """
    parts = [equal_part(batch_size, replicas, i) for i in range(replicas)]
    return [part.stop - part.start for part in parts[first:] + parts[:first]]


def _policy(dataset: Any) -> Any:
    return dataset.options().experimental_distribute.auto_shard_policy


class OwnRows:
    """The division of one pipeline.

    Args:
        pipeline: The pipeline.
        layout: The layout of the replicas.
        same: The check.
    """

    def __init__(
        self, pipeline: RowPipeline, layout: ReplicaLayout, same: SameBatches
    ) -> None:
        self._pipeline = pipeline
        self._layout = layout
        self._same = same
        start, stop = self._bounds(pipeline.batch_size)
        # Of a smaller batch a share may be a row more.
        self._most = max(stop - start + (layout.cuts is not None), 1)

    def divide(self, windows: Any, compared: bool = False) -> Any:
        """Return a dataset of this worker's parts, as `slice_dataset` does.

        Args:
            windows: A dataset as `RowPipeline.windows`.
            compared: Whether the first batches have been compared already.
        """
        # As in `parts_of_replicas`.
        plain = tf.autograph.experimental.do_not_convert

        def own(index: Any, window: Any) -> Any:
            return self._own_elements(index, window, compared)

        rows = self._pipeline.make_rows(windows.enumerate().flat_map(plain(own)))
        # Only whole batches: see above.
        batches = rows.batch(self._most, drop_remainder=True)
        layout = self._layout
        replicas = range(layout.first, layout.first + layout.local)
        parts = parts_of_replicas(batches, replicas, self._part)
        return read_ahead(parts, windows).with_options(self._pipeline.options)

    def _own_elements(self, index: Any, window: Any, compared: bool) -> Any:
        """Return a window's own elements, each with the facts of the batch."""
        elements = tf.data.Dataset.zip(window)
        total = self._total(elements.cardinality())
        start, stop = self._bounds(total)
        start, stop = (tf.cast(each, tf.int64) for each in (start, stop))
        last = elements.skip(tf.cast(total, tf.int64) - 1)
        own = elements.skip(start).take(stop - start)
        own = own.concatenate(last.repeat(self._most - (stop - start)))
        checksum = tf.constant(0, tf.int64)
        if not compared:
            checksum = self._same.checksum(
                index, lambda: self._pipeline.batch_of(window)
            )
        facts = tf.data.Dataset.from_tensors((tf.cast(total, tf.int64), checksum))
        return tf.data.Dataset.zip((facts.repeat(self._most), own))

    def _part(self, facts: Any, rows: Any, replica: int) -> Any:
        """Return a replica's part: see `batch_split.part_of_batch`."""
        totals, checksums = facts
        total = self._total(totals[0])
        begin, _ = self._bounds(total)
        start, stop = bounds_of_replica(total, replica, self._layout)
        start, stop, own = start - begin, stop - begin, stop - start
        if isinstance(own, int):
            if not own:
                start, stop = self._most - 1, self._most
        else:
            start = tf.where(own > 0, start, self._most - 1)
            stop = tf.maximum(stop, start + 1)
        if self._layout.cuts is not None:
            start, stop = (
                varying(tf.convert_to_tensor(each, tf.int64)) for each in (start, stop)
            )
        part = slice_rows(rows, start, stop)
        part = with_own_facts(part, total, replica, self._layout)
        return {CHECKSUM: checksums[0], "batch": part}

    def _total(self, rows: Any) -> Any:
        """Return the rows of a global batch: a number if all have as many."""
        pipeline = self._pipeline
        return pipeline.batch_size if pipeline.drop_remainder else rows

    def _bounds(self, total: Any) -> tuple[Any, Any]:
        """Return this worker's first row of a batch, and the one after its last."""
        layout = self._layout
        start, _ = bounds_of_replica(total, layout.first, layout)
        last = layout.first + layout.local - 1
        return start, bounds_of_replica(total, last, layout)[1]
