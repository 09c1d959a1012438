"""The extended object of a strategy whose workers may be lost, or join."""

from __future__ import annotations

import dataclasses
from typing import Any

from kerasdist import _tf
from kerasdist._keras import KerasHooks
from kerasdist.strategies.measure.step_clock import StepClock
from kerasdist.strategies.options import Options
from kerasdist.strategies.sync.elastic_data import ElasticData
from kerasdist.strategies.sync.extended import SynchronousExtended

__all__ = ["ElasticExtended"]


class ElasticExtended(SynchronousExtended):
    """Replicas of this worker, synchronous with those of the present workers.

    The job is an `ElasticJob`: its communicator knows when the workers change.
    """

    data_class = ElasticData

    def _make_hooks(self, options: Options, timer: StepClock) -> KerasHooks:
        elastic: Any = self.workers.communicator
        hooks = super()._make_hooks(options, timer)
        self.data.job_seed = self.common_seed()
        # Also of a worker that is alone until it joins the others.
        _tf.set_global_seed_if_none(self.common_seed)
        return dataclasses.replace(hooks, elastic=elastic)

    def common_seed(self) -> int:
        """See `SynchronousExtended.common_seed`; workers that join get it, too."""
        job: Any = self.workers.job
        if "seed" not in job.facts:
            job.facts["seed"] = super().common_seed()
        return int(job.facts["seed"])
