"""Plans: `kerasdist.plan`, before anything runs, and `placement="auto"`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kerasdist import _tf
from kerasdist._keras.costs.describe import describe
from kerasdist._keras.placement.layers import LayerFacts
from kerasdist.placement.partition import Run
from kerasdist.placement.patterns import Patterns
from kerasdist.placement.plan import Device, Plan, make_plan
from kerasdist.strategies.devices import Limits, find_devices, resolve_devices
from kerasdist.strategies.placed.placer import Placer


def plan(
    model_fn: Callable[[], Any],
    devices: Sequence[str] | None = None,
    *,
    batch_size: int,
    optimizer: Any = None,
    micro_batches: int = 1,
    memory_limits: Limits = None,
    rematerialize: bool = False,
    inputs: Any = None,
) -> Plan:
    """Plan which layer goes to which device, and what each device will hold.

    Nothing is trained and no weights are allocated: the model is built from shapes.
    The plan is the division with the fastest slowest device that fits into the memory
    of every device.

        plan = kerasdist.plan(
            build_model, ["GPU:0", "GPU:1"], batch_size=256, optimizer="adam"
        )
        print(plan)
        strategy = kerasdist.ModelParallelStrategy(placement=plan.placement)

    Args:
        model_fn: Returns the model; takes no arguments. It's called once, or twice if
            it calls the model on data.
        devices: Names as in TensorFlow, in the order in which the layers pass through
            them; by default all logical GPUs, or else all logical CPUs. Devices of
            other machines can be planned for if their memory limits are given.
        batch_size: Rows of a batch (of one replica).
        optimizer: A Keras optimizer or its name. By default the one that the model was
            compiled with; without one there are no slots.
        micro_batches: The number of parts into which a batch is divided.
        memory_limits: Bytes for the model on each device, as numbers or like "16GB":
            one for all, a list, or a mapping from device names. By default what the
            device reports: the limit of a logical device, a GPU's memory, or for each
            CPU device an equal part of the machine's memory (or of its control group's
            limit, if that is less).
        rematerialize: Whether activations are recomputed in the backward pass.
        inputs: The inputs of the model, if it doesn't define them itself (a
            subclassed model that isn't built): shapes without the batch or
            `keras.Input`s, in the structure of `call`'s argument.

    Returns:
        The plan: `placement` (from layer path to device), `layers`, `devices`, `fits`;
        `str(plan)` is a table of the layers and one of the devices.

    Raises:
        ValueError: An argument is wrong, or the model can't be built from shapes.
        PlanError: Nothing fits. The message has the figures, and what would fit.
    """
    run = Run(
        batch_size=batch_size,
        micro_batches=micro_batches,
        rematerialize=bool(rematerialize),
    )
    found = find_devices(devices, memory_limits)
    costs = describe(model_fn, run.part_rows, optimizer, inputs)
    return make_plan(costs, run, found)


# Automatic placements: a plan is made from the model, and its variables are moved.
#
#     1. in the strategy's scope variables are created in host memory
#     2. `fit`, `evaluate` or `predict` is called: by then all layers of the model
#        exist, and the optimizer of `compile` and a batch's rows are known
#     3. before the optimizer is built and before any step is traced, a plan is made,
#        and each variable is moved to its device
#
# From then on it's a placement like any other.


class AutoPlacer(Placer):
    """A placement that is planned when the first model is used.

    Args:
        devices: The devices, in the order of the stages.
        micro_batches: The number of parts into which each batch is divided.
        rematerialize: Whether activations are recomputed instead of kept.
    """

    def __init__(
        self, devices: Sequence[Device], micro_batches: int, *, rematerialize: bool
    ) -> None:
        names = resolve_devices([device.name for device in devices], "devices")
        super().__init__(Patterns({}), names)
        self._described = tuple(devices)
        # Of a batch whose rows aren't known yet.
        self._run = Run(
            batch_size=1, micro_batches=micro_batches, rematerialize=rematerialize
        )
        self._host = _tf.host_of(names[0])

    @property
    def needs_plan(self) -> bool:
        """See `LayerPlacer`."""
        return self.plan is None

    def variable_device(
        self, path: str, called: tuple[str, ...], device: str | None
    ) -> str:
        """See `LayerPlacer`."""
        if self.plan is None and self.stage is None:
            return self._host
        return super().variable_device(path, called, device)

    def device_of(self, layer: LayerFacts) -> str | None:
        """See `LayerPlacer`."""
        # Without a plan, the model is being built.
        return self._host if self.plan is None else super().device_of(layer)

    def make_plan(self, model: Any, rows: int, inputs: Any) -> None:
        """Make the plan for a model; later models are placed by the same plan.

        Args:
            model: The model, all of whose layers are built.
            rows: Rows of a batch.
            inputs: The model's inputs, if it doesn't define them.

        Raises:
            PlanError: The model doesn't fit.
        """
        if self.plan is not None:
            return
        run = dataclasses.replace(self._run, batch_size=rows)
        costs = describe(lambda: model, run.part_rows, inputs=inputs)
        plan = make_plan(costs, run, self._described)
        full = dict(zip((one.name for one in plan.devices), self.devices, strict=True))
        self.patterns = Patterns({p: full[name] for p, name in plan.placement.items()})
        self.plan = plan
