"""The extended object of `ModelParallelStrategy`: one replica on several devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasdist import _keras, _tf
from kerasdist._tf import gradient_placement, patches
from kerasdist._tf.facets import Facets
from kerasdist.collectives.backends.single import SingleCommunicator
from kerasdist.strategies.measure.stages import StageClock
from kerasdist.strategies.measure.step_clock import StepClock
from kerasdist.strategies.placed.micro_batches import in_micro_batches
from kerasdist.strategies.placed.placer import Placer
from kerasdist.strategies.placed.remote import RemoteDevices


def install_hooks() -> None:
    """Install the hooks for placements in Keras and TensorFlow, once per process."""
    _keras.install("placement", "rematerialize", "micro_batches")
    patches.install("core")
    patches.install("placement")


@contextlib.contextmanager
def placed_step(facets: Facets) -> Iterator[None]:
    """Run a step of a placed replica inside of the block.

    Args:
        facets: The strategy's: its placer, micro-batches and stage clock count.
    """
    with contextlib.ExitStack() as stack:
        if not _tf.executing_eagerly():
            choose = facets.placer.choose(tf.compat.v1.get_default_graph())
            stack.enter_context(gradient_placement.default_placement(choose))
        stack.enter_context(
            in_micro_batches(
                facets.micro_batches,
                rematerialize=facets.rematerialize,
                clock=facets.stage_clock,
            )
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
    """

    # A function that two layers share is traced for the device of each.
    _retrace_functions_for_each_device = True

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
        # This process reads the data, wherever the layers are.
        self._host = _tf.canonical_device("CPU:0")
        self._remote = remote
        self.kerasdist = Facets(
            timer=StepClock([self._host], SingleCommunicator(), in_turn=True),
            placer=placer,
            stage_clock=StageClock(placer.devices, self._host),
            step_counter=None if remote is None else remote.communicator,
            failure=self._failure,
            places_gradients=True,
            micro_batches=micro_batches,
            rematerialize=rematerialize,
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
        with self._step():
            if _tf.executing_eagerly():
                return super()._call_for_each_replica(fn, args, kwargs)
            with gradient_placement.replica_of(self._container_strategy()):
                return fn(*args, **kwargs)

    def _step(self) -> contextlib.AbstractContextManager[None]:
        return placed_step(self.kerasdist)

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
