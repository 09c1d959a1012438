"""Datasets that are each worker's own: iterate until the longest has ended.

`distribute_datasets_from_function` lets every worker make its own dataset, and their
lengths may differ. A worker whose dataset has ended continues with empty batches, which
weigh nothing, until all have ended: so no worker waits for one that has left. Each
batch costs one small collective. The same holds for datasets that are divided by file,
see `own_rows`; there a worker without any data is an error.
"""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras import BatchIterator, StepTimer
from kerasdist._tf.marks import OWN_DATA
from kerasdist.strategies.data.batch_split import slice_rows, split_part, with_facts
from kerasdist.strategies.reduce.consensus import Consensus
from kerasdist.strategies.reduce.workers import Workers

# TensorFlow's message on each rank that has a file; the last of them has seen all.
_TOO_FEW_FILES = re.compile(r"the dataset only has (\d+) file")


class PerWorkerDataset:
    """The iterable for Keras in place of a worker's own distributed dataset."""

    def __init__(self, workers: Workers, timer: StepTimer, dataset: Any) -> None:
        self._workers, self._timer = workers, timer
        self._dataset = dataset

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._workers, self._timer, self._dataset)


class PerWorkerIterator(BatchIterator):
    """One pass over all workers' own datasets."""

    def __init__(self, workers: Workers, timer: StepTimer, dataset: Any) -> None:
        self._workers, self._timer = workers, timer
        self._iterator = iter(dataset)
        self._spec = dataset.element_spec
        self._by_file = OWN_DATA.get(dataset)
        self._waiting: list[Any] = []
        self._last: Any = None

    def at_least_one(self) -> PerWorkerIterator:
        """See `BatchIterator.at_least_one`."""
        if not self._waiting:
            self._waiting.append(self._fetch())
        return self

    def __next__(self) -> Any:
        return self._waiting.pop() if self._waiting else self._fetch()

    def _fetch(self) -> Any:
        begin = time.time()
        optional = self._next_own()
        here = bool(optional.has_value())
        fetched = time.time()
        self._timer.waited(fetched - begin)
        any_left = Consensus(self._workers).any_of(here)
        self._timer.waited(time.time() - fetched, others=True)
        if not any_left:
            raise StopIteration
        if here:
            self._last = optional.get_value()
            return self._last
        if self._last is None:
            return tf.nest.map_structure(self._empty, self._spec)
        # This worker's results count for nothing, see `data.batch_split`.
        local = self._workers.local_replicas
        none = tf.constant(0, tf.int64)
        idle = []
        for replica in range(local):
            batch, _, _ = split_part(_tf.select_replica(replica, self._last))
            idle.append(with_facts(slice_rows(batch, 0, 1), None, none))
        return idle[0] if local == 1 else _tf.regroup(idle)

    def _next_own(self) -> Any:
        """Return this worker's next batch as an optional."""
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
