"""The extended object of `ModelParallelStrategy`: one replica on several devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasdist import _keras, _tf
from kerasdist._tf import gradient_placement, patches
from kerasdist.collectives.backends.single import SingleCommunicator
from kerasdist.strategies.measure.stages import StageClock
from kerasdist.strategies.measure.step_clock import StepClock
from kerasdist.strategies.placed.micro_batches import in_micro_batches
from kerasdist.strategies.placed.placer import Placer
from kerasdist.strategies.placed.remote import RemoteDevices

__all__ = ["PlacedExtended", "install_hooks", "placed_step"]


def install_hooks() -> None:
    """Install the hooks for placements in Keras and TensorFlow, once per process."""
    _keras.install("placement", "rematerialize", "micro_batches")
    patches.install("core")
    patches.install("placement")


@contextlib.contextmanager
def placed_step(
    placer: Placer,
    micro_batches: int,
    clock: StageClock,
    *,
    rematerialize: bool = False,
) -> Iterator[None]:
    """Run a step of a placed replica inside of the block.

    Args:
        placer: The placement.
        micro_batches: The number of parts into which the replica's batch is divided.
        clock: Measures the stages, if the step is measured.
        rematerialize: Whether activations are recomputed instead of kept.
    """
    with contextlib.ExitStack() as stack:
        if not _tf.executing_eagerly():
            choose = placer.choose(tf.compat.v1.get_default_graph())
            stack.enter_context(gradient_placement.default_placement(choose))
        stack.enter_context(
            in_micro_batches(micro_batches, rematerialize=rematerialize, clock=clock)
        )
        yield


class PlacedExtended(gradient_placement.OneDeviceExtended):
    """TensorFlow's strategy of one device, with other devices for what is placed there.

    Args:
        container: The strategy.
        placer: The placement.
        remote: The other workers, if some of the devices are theirs.
        micro_batches: The number of parts into which each batch is divided.
        rematerialize: Whether activations are recomputed instead of kept.

    Attributes:
        step_counter: An object with the chief's current `step`, for error messages.
            None if no other worker can be lost.
    """

    # A function that two layers share is traced for the device of each.
    _retrace_functions_for_each_device = True
    # See `_tf.gradient_placement`.
    places_gradients = True

    def __init__(
        self,
        container: Any,
        placer: Placer,
        remote: RemoteDevices | None = None,
        *,
        micro_batches: int = 1,
        rematerialize: bool = False,
    ) -> None:
        super().__init__(container, placer.devices[0])
        self._retrace_functions_for_each_device = True
        self.layer_placer = placer
        self.micro_batches = micro_batches
        self.rematerialize = rematerialize
        # This process reads the data, wherever the layers are.
        self._host = _tf.canonical_device("CPU:0")
        self._remote = remote
        self.step_counter = None if remote is None else remote.communicator
        self.timer = StepClock([self._host], SingleCommunicator(), in_turn=True)
        self.stage_clock = StageClock(placer.devices, self._host)

    def failure(self, error: Exception) -> Exception | None:
        """Return the failure of the job behind TensorFlow's `error`, or None."""
        return None if self._remote is None else self._remote.failure(error)

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        beside = kwargs.pop("colocate_with", None)
        if beside is not None:
            device = beside.device
        else:
            device = self.layer_placer.new_variable()
        with gradient_placement.on_device(device):
            return next_creator(**kwargs)

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with self._step():
            if _tf.executing_eagerly():
                return super()._call_for_each_replica(fn, args, kwargs)
            with gradient_placement.replica_of(self._container_strategy()):
                return fn(*args, **kwargs)

    def _step(self) -> contextlib.AbstractContextManager[None]:
        return placed_step(
            self.layer_placer,
            self.micro_batches,
            self.stage_clock,
            rematerialize=self.rematerialize,
        )

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
