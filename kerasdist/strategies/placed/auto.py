"""`placement="auto"`: a plan is made from the model, and its variables move there.

    1. in the strategy's scope variables are made in host memory
    2. `fit`, `evaluate` or `predict` is called: the model's layers are all there, the
       optimizer that it was compiled with is known, and so are a batch's rows
    3. before the optimizer is built and before any step is traced, a plan is made, and
       each variable moves to its device

From then on it's a placement like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kerasdist import _tf
from kerasdist._keras import LayerFacts
from kerasdist._keras.costs.describe import describe_built
from kerasdist.placement.costs import Run
from kerasdist.placement.patterns import Patterns
from kerasdist.placement.plan import Device, Plan, make_plan
from kerasdist.strategies.devices import resolve_devices
from kerasdist.strategies.placed.placer import Placer

__all__ = ["AutoPlacer"]


class AutoPlacer(Placer):
    """A placement that isn't known before the first model is used.

    Args:
        devices: The devices, in the order of the stages.
        micro_batches: Into how many parts each batch is divided.
        rematerialize: Whether activations are computed again instead of kept.
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
        self.plan: Plan | None = None

    def variable_device(
        self, path: str, called: tuple[str, ...], device: str | None
    ) -> str:
        """See `LayerPlacer`."""
        if self.plan is None and self.stage is None:
            return self._host
        return super().variable_device(path, called, device)

    def device_of(self, layer: LayerFacts) -> str | None:
        """See `LayerPlacer`."""
        # While a model is built.
        return self._host if self.plan is None else super().device_of(layer)

    def make_plan(self, model: Any, rows: int, inputs: Any) -> None:
        """Plan for a model; later ones are placed by the same plan.

        Args:
            model: The model, all of whose layers are built.
            rows: Rows of a batch.
            inputs: What the model is called with, if it doesn't say.

        Raises:
            PlanError: It doesn't fit.
        """
        if self.plan is not None:
            return
        run = Run(
            batch_size=rows,
            micro_batches=self._micro_batches,
            rematerialize=self._rematerialize,
        )
        costs = describe_built(model, max(2, run.part_rows), inputs)
        plan = make_plan(costs, run, self._described)
        names = {
            device.name: full
            for device, full in zip(self._described, self.devices, strict=True)
        }
        found = {path: names[device] for path, device in plan.placement.items()}
        self.patterns = Patterns(found)
        self.plan = plan
