"""Automatic placements: a plan is made from the model, and its variables are moved.

    1. in the strategy's scope variables are created in host memory
    2. `fit`, `evaluate` or `predict` is called: by then all layers of the model exist,
       and the optimizer of `compile` and a batch's rows are known
    3. before the optimizer is built and before any step is traced, a plan is made, and
       each variable is moved to its device

From then on it's a placement like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kerasdist import _tf
from kerasdist._keras import LayerFacts
from kerasdist._keras.costs.describe import describe
from kerasdist.placement.partition import Run
from kerasdist.placement.patterns import Patterns
from kerasdist.placement.plan import Device, make_plan
from kerasdist.strategies.devices import resolve_devices
from kerasdist.strategies.placed.placer import Placer


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
        self._micro_batches = micro_batches
        self._rematerialize = rematerialize
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
        run = Run(
            batch_size=rows,
            micro_batches=self._micro_batches,
            rematerialize=self._rematerialize,
        )
        costs = describe(lambda: model, max(2, run.part_rows), inputs=inputs)
        plan = make_plan(costs, run, self._described)
        names = {
            device.name: full
            for device, full in zip(self._described, self.devices, strict=True)
        }
        found = {path: names[device] for path, device in plan.placement.items()}
        self.patterns = Patterns(found)
        self.plan = plan
