"""The extended object of `ModelParallelStrategy`: one replica on several devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from kerasdist import _keras, _tf
from kerasdist._tf import gradient_placement, patches
from kerasdist._tf.variables import StrategyExtensions
from kerasdist.collectives.checked import SingleCommunicator
from kerasdist.strategies.measure.stages import StageClock
from kerasdist.strategies.measure.step_clock import StepClock
from kerasdist.strategies.options import Options, StrategyJob
from kerasdist.strategies.placed.placer import Placer, in_micro_batches
from kerasdist.strategies.placed.remote import RemoteDevices
from kerasdist.strategies.sync.extended import SynchronousExtended

# The extended object of `RingStrategy(placement=...)`: replicas on several devices.
#
# Each worker has one replica. Between the workers it's one of `SynchronousExtended`;
# its own devices are determined by a `Placer`, as in `PlacedExtended`:
#
#     worker 0   CPU:0 encoder  CPU:1 decoder     rows 0..15 of each global batch
#     worker 1   CPU:0 encoder  CPU:1 decoder     rows 16..31
#                   gradients ── host ── all workers ── host ── each variable's device


class HybridExtended(SynchronousExtended):
    """One replica on several devices, synchronous with those of all other workers.

    Args:
        container: The strategy.
        devices: The placer's.
        job: The connected workers.
        placer: The placement of this worker's replica.
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
    ) -> None:
        super().__init__(container, devices[:1], job, options)
        # A function that two layers share is traced for the device of each.
        self._retrace_functions_for_each_device = True
        facets = self.kerasdist
        facets.placer = placer
        # See `_tf.gradient_placement`.
        facets.places_gradients = True
        facets.stage_clock = StageClock(placer.devices, _tf.host_of(devices[0]))

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        if kwargs.get("colocate_with") is None:
            kwargs["colocate_with"] = _Beside(self.kerasdist.placer.new_variable())
        return super()._create_variable(next_creator, **kwargs)

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with placed_step(self.kerasdist):
            if tf.executing_eagerly():
                return super()._call_for_each_replica(fn, args, kwargs)
            first = self.workers.layout.first
            with _tf.own_seed(self.workers.current_replica()):
                return _tf.call_replica(
                    self._container_strategy(), first, fn, args, kwargs, None
                )


class _Beside:
    """A stand-in for a variable, by which TensorFlow puts another one on its device."""

    def __init__(self, device: str) -> None:
        self._devices = (device,)


def install_hooks() -> None:
    """Install the hooks for placements in Keras and TensorFlow, once per process."""
    _keras.install("placement", "rematerialize", "micro_batches")
    patches.install("core")
    patches.install("placement")


@contextlib.contextmanager
def placed_step(facets: StrategyExtensions) -> Iterator[None]:
    """Run a step of a placed replica inside of the block.

    Args:
        facets: The strategy's: its placer and stage clock count.
    """
    with contextlib.ExitStack() as stack:
        if not tf.executing_eagerly():
            choose = facets.placer.choose(tf.compat.v1.get_default_graph())
            stack.enter_context(gradient_placement.default_placement(choose))
        stack.enter_context(in_micro_batches(facets.placer, facets.stage_clock))
        yield


class PlacedExtended(gradient_placement.OneDeviceExtended):
    """TensorFlow's strategy of one device, with other devices for what is placed there.

    Args:
        container: The strategy.
        placer: The placement.
        remote: The other workers, if some of the devices are theirs.
    """

    def __init__(
        self, container: Any, placer: Placer, remote: RemoteDevices | None = None
    ) -> None:
        super().__init__(container, placer.devices[0])
        # A function that two layers share is traced for the device of each.
        self._retrace_functions_for_each_device = True
        # This process reads the data, wherever the layers are.
        self._host = _tf.canonical_device("CPU:0")
        self._remote = remote
        self.kerasdist = StrategyExtensions(
            timer=StepClock([self._host], SingleCommunicator(), in_turn=True),
            placer=placer,
            stage_clock=StageClock(placer.devices, self._host),
            step_counter=None if remote is None else remote.communicator,
            failure=self._failure,
            places_gradients=True,
        )

    def _failure(self, error: Exception) -> Exception | None:
        """Return the failure of the job behind TensorFlow's `error`, or None."""
        return None if self._remote is None else self._remote.failure(error)

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        beside = kwargs.pop("colocate_with", None)
        if beside is not None:
            device = beside.device
        else:
            device = self.kerasdist.placer.new_variable()
        with gradient_placement.on_device(device):
            return next_creator(**kwargs)

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with placed_step(self.kerasdist):
            if tf.executing_eagerly():
                return super()._call_for_each_replica(fn, args, kwargs)
            with gradient_placement.replica_of(self._container_strategy()):
                return fn(*args, **kwargs)

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        with gradient_placement.update_on(var.device):
            result = fn(var, *args, **kwargs)
        if group:
            return result
        return tf.nest.map_structure(self._local_results, result)

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        # TensorFlow's distributed iterator costs more than it is worth for one replica,
        # see `SynchronousExtended.distribute_parts`.
        if self.worker_devices == (self._host,) or self._remote is not None:
            return dataset
        return super()._experimental_distribute_dataset(dataset, options)
