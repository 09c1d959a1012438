"""The extended object of `RingStrategy(placement=...)`: replicas on several devices.

Each worker has one replica. Between the workers it's one of `SynchronousExtended`; its
own devices are determined by a `Placer`, as in `PlacedExtended`:

    worker 0   CPU:0 encoder  CPU:1 decoder     rows 0..15 of each global batch
    worker 1   CPU:0 encoder  CPU:1 decoder     rows 16..31
                  gradients ── host ── all workers ── host ── to each variable's device
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kerasdist import _tf
from kerasdist.strategies.job import StrategyJob
from kerasdist.strategies.measure.stages import StageClock
from kerasdist.strategies.options import Options
from kerasdist.strategies.placed.extended import placed_step
from kerasdist.strategies.placed.placer import Placer
from kerasdist.strategies.sync.extended import SynchronousExtended


class HybridExtended(SynchronousExtended):
    """One replica on several devices, synchronous with those of all other workers.

    Args:
        container: The strategy.
        devices: The placer's.
        job: The connected workers.
        placer: The placement of this worker's replica.
        micro_batches: The number of parts into which the replica's batch is divided.
        rematerialize: Whether activations are recomputed instead of kept.
        options: The options of `SynchronousExtended`.
    """

    def __init__(
        self,
        container: Any,
        devices: Sequence[str],
        job: StrategyJob,
        options: Options,
        *,
        placer: Placer,
        micro_batches: int,
        rematerialize: bool = False,
    ) -> None:
        super().__init__(container, devices[:1], job, options)
        # A function that two layers share is traced for the device of each.
        self._retrace_functions_for_each_device = True
        facets = self.kerasdist
        facets.placer = placer
        facets.micro_batches = micro_batches
        facets.rematerialize = rematerialize
        # See `_tf.gradient_placement`.
        facets.places_gradients = True
        facets.stage_clock = StageClock(placer.devices, _tf.host_of(devices[0]))

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        if kwargs.get("colocate_with") is None:
            kwargs["colocate_with"] = _Beside(self.kerasdist.placer.new_variable())
        return super()._create_variable(next_creator, **kwargs)

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with placed_step(self.kerasdist):
            if _tf.executing_eagerly():
                return super()._call_for_each_replica(fn, args, kwargs)
            return _tf.call_replica(
                self._container_strategy(),
                self.workers.layout.first,
                fn,
                args,
                kwargs,
                None,
            )


class _Beside:
    """A stand-in for a variable, by which TensorFlow puts another one on its device."""

    def __init__(self, device: str) -> None:
        self._devices = (device,)
