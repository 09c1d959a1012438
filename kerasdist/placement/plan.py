"""A plan: the device of each layer, and the memory of each device, as tables."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kerasdist.errors import PlanError
from kerasdist.placement.partition import Cut, LayerCost, ModelCost, Run, StageCosts

# Numbers, bytes and operations as text, and sizes that users write.

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def counted(number: int, noun: str) -> str:
    """Return a number of things as text, for instance `1 worker` or `2 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def human_bytes(count: float) -> str:
    """Return bytes as text, for instance `1.5 GB`; 1 KB is 1,000 bytes."""
    return "not limited" if math.isinf(count) else f"{_scaled(count)}B"


def human_flops(count: float) -> str:
    """Return operations as text, for instance `1.5 G`."""
    return _scaled(count).rstrip()


def _scaled(count: float) -> str:
    for unit, size in reversed(_UNITS.items()):
        # A number that would be rounded up to a thousand is one of the next unit.
        if unit and count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} "


def parse_bytes(text: str) -> int:
    """Return the bytes that a text like `16GB`, `512 MiB` or `1e9` means.

    Raises:
        ValueError: It's none.
    """
    match = re.fullmatch(
        r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE
    )
    try:
        if match is None:
            raise ValueError
        number, unit, binary = match.groups()
        power = "KMGT".index(unit.upper()) + 1 if unit else 0
        if binary and not power:
            raise ValueError
        size = float(number) * (1024 if binary else 1000) ** power
        if not 1 <= size < 2**63:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"A size must be a number of bytes. Received: {text!r}; expected for "
            "instance '16GB', '512MiB' or '1e9'."
        ) from None
    return int(size)


_LAYER_HEAD = (
    *("layer", "class", "parameters", "gradients + slots", "activations", "FLOPs"),
    "device",
)
_DEVICE_HEAD = (
    *("device", "layers", "parameters", "gradients + slots", "activations", "inputs"),
    *("at most", "memory", "used", "work"),
)


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
        return {
            layer.path: device.name
            for number, device in enumerate(self.devices)
            for layer in self._stage(number)
        }

    @property
    def layers(self) -> tuple[LayerCost, ...]:
        """The layers, in the order in which they run."""
        return self.model.layers

    def _stage(self, number: int) -> tuple[LayerCost, ...]:
        start, stop = self.cut.borders[number : number + 2]
        return self.layers[start:stop]

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
        text = f"{self._layer_table()}\n\n{self.device_table()}"
        if not self.run.rematerialize:
            return text
        each = ", ".join(
            f"{human_bytes(size)} on {device.name}"
            for size, device in zip(self.spared, self.devices, strict=True)
        )
        return f"{text}\n\nComputing activations again saves {each}."

    def _layer_table(self) -> str:
        run = self.run
        rows = [
            (
                *(layer.path, layer.kind, *self._figures([layer])),
                human_flops(layer.flops(run)),
                self.placement[layer.path],
            )
            for layer in self.layers
        ]
        flops = human_flops(sum(layer.flops(run) for layer in self.layers))
        rows.append(("all layers", "", *self._figures(self.layers), flops, ""))
        count = run.micro_batches
        parts = "" if count == 1 else f" in {count} micro-batches"
        again = ", activations computed again" if run.rematerialize else ""
        return (
            f"Layers, for a batch of {run.batch_size} rows{parts}{again}:\n\n"
            f"{_aligned(_LAYER_HEAD, rows, left=(0, 1, 6))}"
        )

    def device_table(self) -> str:
        """Return the table of devices."""
        work = sum(layer.flops(self.run) for layer in self.layers)
        rows = []
        for number, device in enumerate(self.devices):
            mine, used = self._stage(number), self.cut.memory[number]
            if device.memory_limit is None:
                verdict = ""
            elif used <= device.memory_limit:
                verdict = f"{100 * used / device.memory_limit:.0f} %"
            else:
                verdict = f"{human_bytes(used - device.memory_limit)} too much"
            share = sum(layer.flops(self.run) for layer in mine) / work if work else 0.0
            rows.append(
                (
                    *(device.name, str(len(mine)), *self._figures(mine)),
                    human_bytes(self.cut.entering[number]),
                    human_bytes(used),
                    human_bytes(device.limit),
                    verdict,
                    f"{100 * share:.0f} %",
                )
            )
        text = f"Devices:\n\n{_aligned(_DEVICE_HEAD, rows, left=(0,))}"
        sources = sorted({f"\n  {d.name}: {d.found}" for d in self.devices if d.found})
        return f"{text}\n\nMemory is{''.join(sources)}" if sources else text

    def _figures(self, layers: Sequence[LayerCost]) -> tuple[str, str, str]:
        """Return the parameters, gradients with slots, and activations of layers."""
        return (
            human_bytes(sum(x.parameter_bytes for x in layers)),
            human_bytes(sum(x.gradient_bytes + x.slot_bytes for x in layers)),
            human_bytes(sum(x.activation_bytes(self.run) for x in layers)),
        )


def make_plan(model: ModelCost, run: Run, devices: Sequence[Device]) -> Plan:
    """Return the plan with the fastest slowest stage.

    Raises:
        ValueError: There is no device.
        PlanError: No cut fits into the devices' memory. It has advice.
    """
    if not devices:
        raise ValueError("A plan needs a device. Received: devices=[].")
    costs = StageCosts(model, run)
    limits = [device.limit for device in devices]
    cut = costs.best(limits)
    # For the figures: the cut whose largest excess is least.
    chosen = costs.smallest(limits) if cut is None else cut
    plan = Plan(model=model, run=run, devices=tuple(devices), cut=chosen)
    if cut is not None:
        return plan
    advice = _Advisor(model, run, limits).advice()
    lines = advice or [
        f"nothing that was tried: up to {_MOST_DEVICES} devices, a batch of one row, "
        "as many micro-batches as rows, rematerialization"
    ]
    raise PlanError(
        f"The model doesn't fit into the memory of {counted(len(devices), 'device')}, "
        f"however it is cut. Received: devices={[device.name for device in devices]}, "
        f"batch_size={run.batch_size}, micro_batches={run.micro_batches}"
        f"{', rematerialize=True' if run.rematerialize else ''}. "
        f"The cut that is nearest to fitting:\n\n{plan.device_table()}\n\n"
        "What would fit:\n" + "\n".join(f"  - {line}" for line in lines),
        advice=tuple(advice),
        plan=plan,
    )


def _aligned(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int]
) -> str:
    cells = [tuple(head), *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


# Advice for a model that doesn't fit: changes that were found to make it fit.
#
# Each search changes one setting and leaves the others as given: the number of devices,
# the batch size, the number of micro-batches, rematerialization, the order of the
# devices. Where one alone isn't enough, two together are tried.

_MOST_DEVICES = 64
# Orders of devices are tried as long as there are few.
_MOST_ORDERED = 5


class _Advisor:
    """The search for changes that would make a model fit.

    Args:
        model: The model.
        run: How it is to be trained.
        limits: Bytes of each device, in order.
    """

    def __init__(self, model: ModelCost, run: Run, limits: Sequence[float]) -> None:
        self._layers = model.layers
        self._run = run
        self._limits = tuple(limits)
        # Many devices are tried with the costs of one run, one run after the other.
        self._costs = functools.lru_cache(maxsize=1)(lambda run: StageCosts(model, run))

    def advice(self) -> list[str]:
        """Return one sentence for each change that helps, without full stops."""
        run, limits, largest = self._run, self._limits, max(self._limits)
        found = []
        if len(set(limits)) > 1 and len(limits) <= _MOST_ORDERED:
            orders = itertools.permutations(limits)
            if order := next(filter(self._fits, orders), None):
                shown = ", ".join(map(human_bytes, order))
                found.append(f"the devices in another order, with {shown}")
        count = _least(
            lambda count: self._fits(self._extended(count)),
            len(limits) + 1,
            _MOST_DEVICES,
        )
        if count:
            more = counted(count - len(limits), "more device")
            found.append(f"{more} with {human_bytes(largest)} ({count} in all)")
        if rows := self._rows(limits):
            found.append(f"a smaller batch: batch_size={rows} (at most)")
        if parts := self._parts():
            found.append(f"more micro-batches: micro_batches={parts} (at least)")
        if not run.rematerialize:
            if self._fits(limits, rematerialize=True):
                found.append("rematerialize=True")
            elif parts := self._parts(rematerialize=True):
                found.append(
                    f"rematerialize=True with micro_batches={parts} (at least)"
                )
        if not found:
            found += self._together()
        for layer in self._layers:
            needed = layer.parameter_bytes + layer.slot_bytes + layer.gradient_bytes
            if needed > largest:
                found.append(
                    f"nothing while layer {layer.path!r} is whole: its weights, "
                    f"gradients and slots alone are {human_bytes(needed)}, the "
                    f"largest device has {human_bytes(largest)}. Divide it over "
                    "several devices (`kerasdist.layers.ShardedDense`, "
                    "`ShardedEmbedding`)"
                )
        return found

    def _together(self) -> list[str]:
        """Return a smaller batch with everything else that saves memory."""
        count = given = len(self._limits)
        while count <= _MOST_DEVICES:
            if rows := self._rows(self._extended(count), rematerialize=True):
                where = f"{count} devices, " if count > given else ""
                return [f"{where}rematerialize=True and batch_size={rows} (at most)"]
            count *= 2
        return []

    def _extended(self, count: int) -> tuple[float, ...]:
        """Return the limits of more devices, the new ones like the largest."""
        more = count - len(self._limits)
        return (*self._limits, *[max(self._limits)] * more)

    def _fits(self, limits: Sequence[float], **changes: Any) -> bool:
        run = dataclasses.replace(self._run, **changes)
        return self._costs(run).best(limits) is not None

    def _rows(self, limits: Sequence[float], **changes: Any) -> int | None:
        """Return the largest smaller batch that fits."""
        rows = self._run.batch_size
        less = _least(
            lambda less: self._fits(limits, batch_size=rows - less, **changes),
            1,
            rows - 1,
        )
        return None if less is None else rows - less

    def _parts(self, **changes: Any) -> int | None:
        """Return the smallest larger number of micro-batches that fits."""
        return _least(
            lambda parts: self._fits(self._limits, micro_batches=parts, **changes),
            self._run.micro_batches + 1,
            self._run.batch_size,
        )


def _least(enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the least number that is enough, by bisection; None if there's none."""
    if low > high or not enough(high):
        return None
    return low + bisect.bisect_left(range(low, high), True, key=enough)
