"""The extended object of a strategy whose workers may be lost, or join."""

from __future__ import annotations

import dataclasses
from typing import Any

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
        return dataclasses.replace(super()._make_hooks(options, timer), elastic=elastic)
