"""The extended object of a strategy whose workers may be lost, or join."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kerasdist import _tf
from kerasdist._keras.elastic.training_state import CheckpointFile
from kerasdist._keras.protocols import KerasHooks
from kerasdist.strategies.elastic_data import DataAlone, ElasticData
from kerasdist.strategies.measure.step_clock import StepClock
from kerasdist.strategies.options import Options
from kerasdist.strategies.sync.data import SynchronousData
from kerasdist.strategies.sync.extended import SynchronousExtended


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
