"""A plan: the device of each layer, and the memory of each device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from kerasdist.errors import PlanError
from kerasdist.placement import advice, table
from kerasdist.placement.costs import LayerCost, ModelCost, Run
from kerasdist.placement.partition import FLOPS_PER_BYTE, Cut, StageCosts

__all__ = ["Device", "Plan", "make_plan"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A device as a plan sees it.

    Attributes:
        name: Its name, as in TensorFlow: "GPU:0".
        memory_limit: Bytes that it has for a model; None: not limited.
        found: The origin of the limit, in words.
    """

    name: str
    memory_limit: int | None = None
    found: str = ""

    @property
    def limit(self) -> float:
        """The limit as a number."""
        return float("inf") if self.memory_limit is None else self.memory_limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The assignment of layers to devices. `str(plan)` is the tables.

    Attributes:
        model: The layers and their costs.
        run: How the model is trained.
        devices: The devices, in the order of the stages.
        cut: The stages.
    """

    model: ModelCost
    run: Run
    devices: tuple[Device, ...]
    cut: Cut

    @functools.cached_property
    def placement(self) -> dict[str, str]:
        """The device's name by the path of each layer, in order."""
        found = {}
        for number, device in enumerate(self.devices):
            start, stop = self.cut.borders[number : number + 2]
            for layer in self.layers[start:stop]:
                found[layer.path] = device.name
        return found

    @property
    def layers(self) -> tuple[LayerCost, ...]:
        """The layers, in the order in which they run."""
        return self.model.layers

    @property
    def fits(self) -> bool:
        """Whether every device's memory is enough."""
        return all(
            used <= device.limit
            for used, device in zip(self.cut.memory, self.devices, strict=True)
        )

    @functools.cached_property
    def spared(self) -> tuple[int, ...]:
        """Bytes of each device that `rematerialize=True` saves in this cut, or would.

        0 where activations aren't the worst moment: where the optimizer's update is.
        """
        kept, again = (
            StageCosts(self.model, dataclasses.replace(self.run, rematerialize=value))
            .cut(self.cut.borders)
            .memory
            for value in (False, True)
        )
        return tuple(a - b for a, b in zip(kept, again, strict=True))

    def __str__(self) -> str:
        names = [device.name for device in self.devices]
        return "\n".join(
            [
                table.layers(self.model, self.run, self.placement),
                "",
                table.devices(
                    self.model,
                    self.run,
                    self.cut,
                    [(d.name, d.memory_limit, d.found) for d in self.devices],
                ),
                *table.spared(self.run, names, self.spared),
            ]
        )


def make_plan(
    model: ModelCost,
    run: Run,
    devices: Sequence[Device],
    flops_per_byte: float = FLOPS_PER_BYTE,
) -> Plan:
    """Return the plan with the fastest slowest stage.

    Raises:
        ValueError: There is no device.
        PlanError: No cut fits into the devices' memory. It has advice.
    """
    if not devices:
        raise ValueError("A plan needs a device. Received: devices=[].")
    costs = StageCosts(model, run, flops_per_byte)
    limits = [device.limit for device in devices]
    cut = costs.best(limits)
    if cut is not None:
        return Plan(model=model, run=run, devices=tuple(devices), cut=cut)
    # For the figures: the cut whose largest excess is least.
    cut = costs.smallest(limits)
    plan = Plan(model=model, run=run, devices=tuple(devices), cut=cut)
    found = advice.advise(model, run, limits)
    shown = table.devices(
        model, run, cut, [(d.name, d.memory_limit, d.found) for d in devices]
    )
    raise PlanError(
        f"The model doesn't fit into the memory of {len(devices)} device"
        f"{'s' if len(devices) > 1 else ''}, however it is cut. Received: "
        f"devices={[device.name for device in devices]}, {advice.run_in_words(run)}. "
        f"The cut that is nearest to fitting:\n\n{shown}\n\n"
        f"What would fit:\n{advice.in_lines(found)}",
        advice=found,
        plan=plan,
    )
