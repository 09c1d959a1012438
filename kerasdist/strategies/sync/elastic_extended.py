"""The extended object of a strategy whose workers may be lost, or join."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.data.pydataset import ItemData
from kerasdist._keras.elastic.training_state import CheckpointFile
from kerasdist._keras.protocols import KerasHooks
from kerasdist._tf.variables import OWN_DATA, WHOLE_DATA
from kerasdist.strategies.data.choice import in_elastic_job
from kerasdist.strategies.data.own_rows import (
    PerWorkerDataset,
    has_own_policy,
    is_by_file,
)
from kerasdist.strategies.elastic_data import (
    OWN_PASS,
    SHARED_PASS,
    CountedDataset,
    ElasticArrays,
    ElasticDataset,
)
from kerasdist.strategies.measure.step_clock import StepClock
from kerasdist.strategies.options import Options
from kerasdist.strategies.sync.data import SynchronousData
from kerasdist.strategies.sync.extended import SynchronousExtended

# The data of one worker whose job is elastic: another start may continue with them.


class DataAlone(SynchronousData):
    """The iterables of a job of one worker, whose passes and batches are counted.

    Args: See `SynchronousData`.
    """

    array_epochs = ElasticArrays

    def distribute_dataset(
        self,
        dataset: Any,
        length: int | None,
        generator: Any = None,
        *,
        is_items: bool = False,
    ) -> tuple[Any, int | None]:
        """See `SynchronousData.distribute_dataset`."""
        whole = WHOLE_DATA.get(dataset)
        dataset = dataset if whole is None else whole
        made, length = super().distribute_dataset(
            dataset, length, generator, is_items=is_items
        )
        if isinstance(dataset, tf.distribute.DistributedDataset):
            return made, length
        shared = self.shards and not has_own_policy(dataset)
        kind = SHARED_PASS if shared else OWN_PASS
        return CountedDataset(made, kind), length


# The division of Keras's data among workers that may be lost, or join.


class ElasticData(SynchronousData):
    """Iterables that go on, in the midst of an epoch, for other workers.

    They yield `RepeatableIterator`s, except for each worker's own data. All
    other data must be the same on all workers, also with data="auto": the chief's can't
    be used in their place, because the chief may be lost.

    Args: See `SynchronousData`.
    """

    array_epochs = ElasticArrays
    makes_own_rows = False  # which are its own may change at any step
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

    def distribute_dataset(
        self,
        dataset: Any,
        length: int | None,
        generator: Any = None,
        *,
        is_items: bool = False,
    ) -> tuple[Any, int | None]:
        """See `SynchronousData.distribute_dataset`."""
        # It is divided again when the workers change.
        whole = WHOLE_DATA.get(dataset)
        dataset = dataset if whole is None else whole
        own, length = super().distribute_dataset(
            dataset, length, generator, is_items=is_items
        )
        if isinstance(own, PerWorkerDataset):
            own.tell = self._log_once
            made = isinstance(dataset, tf.distribute.DistributedDataset)
            if self.shards and not made:
                own.divide = lambda: self._own_part(dataset)
        return own, length

    def _divide(self, dataset: Any, head: Any = None) -> Any:
        del head
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


class ElasticExtended(SynchronousExtended):
    """Replicas of this worker, synchronous with those of the present workers.

    The job is an `ElasticJob`: its membership knows when the workers change.
    """

    data_class: type[SynchronousData] = ElasticData

    def _make_hooks(self, options: Options, timer: StepClock) -> KerasHooks:
        job: Any = self.workers.job
        self._checkpoint = CheckpointFile(job.name)
        hooks = super()._make_hooks(options, timer)
        self.data.job_seed = self.common_seed()
        # Also of a worker that is alone until it joins the others.
        _tf.set_global_seed_if_none(self.common_seed)
        return dataclasses.replace(
            hooks, elastic=job.membership, checkpoint=self._checkpoint
        )

    @property
    def workers_in_sync(self) -> int:
        """See `SynchronousExtended.workers_in_sync`.

        A script may choose its global batch by it. So a worker that is to join sees the
        numbers with which the others started, until its `fit` has joined theirs.
        """
        return self._of_start("workers", super().workers_in_sync)

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._of_start("replicas", super()._num_replicas_in_sync)

    def _of_start(self, name: str, present: int) -> int:
        job: Any = self.workers.job
        return int(job.facts[name]) if job.membership.joining else present

    def common_seed(self) -> int:
        """See `SynchronousExtended.common_seed`; workers that join get it, too.

        After a preemption it's that of the preempted job.
        """
        job: Any = self.workers.job
        if "seed" not in job.facts:
            seed, fit = self._preempted() or (super().common_seed(), 0)
            communicator = job.communicator
            mine = np.array([communicator.size, sum(job.replicas)])
            workers, replicas = communicator.broadcast([mine])[0]
            # The last one makes the job ready for workers that join.
            job.facts.update(resumes=fit, workers=int(workers), replicas=int(replicas))
            job.facts["seed"] = seed
        return int(job.facts["seed"])

    def _preempted(self) -> tuple[int, int] | None:
        """Return the seed of a preempted job, and the number of its `fit`, if any.

        Raises:
            SnapshotError: Its checkpoint is damaged.
        """
        known = self._checkpoint.facts()
        mine = [0, 0, 0]
        if known is not None:
            # Of several files, in folders of several hosts, the newest one counts.
            mine = [int(known["saved"] * 1e6), known["seed"], known["fit"]]
        communicator = self.workers.communicator
        every = communicator.all_gather(np.array(mine, np.int64))
        saved, seed, fit = max(tuple(map(int, each)) for each in every)
        return (seed, fit) if saved else None


class ExtendedAlone(ElasticExtended):
    """Replicas of one worker, whose job is a `JobAlone`."""

    data_class = DataAlone
