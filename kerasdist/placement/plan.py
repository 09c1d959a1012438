"""A plan: the device of each layer, and the memory of each device, as tables."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence

from kerasdist.errors import PlanError
from kerasdist.placement import advice
from kerasdist.placement.advice import human_bytes, human_flops
from kerasdist.placement.costs import LayerCost, ModelCost, Run
from kerasdist.placement.partition import FLOPS_PER_BYTE, Cut, StageCosts

# Patterns of layer paths, and the device that each stands for.
#
# A pattern is a regular expression, as in `keras.distribution.LayoutMap`. It matches a
# layer if it matches the whole of the layer's path, or of the end of it that begins
# after a "/". A pattern that ends in "/.*" also matches the layer before the "/":
#
#     pattern          matches                              doesn't match
#     encoder/.*       encoder, encoder/dense,              encoder_2/dense
#                      my_model/encoder/block/dense
#     dense_1          dense_1, my_model/dense_1            dense_10, dense_1/inner
#     .*dense.*        every path with "dense" in it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """The match of a path.

    Attributes:
        pattern: The pattern.
        device: The device that it stands for.
        above: The level of the match: 0 if the path itself matches, 1 for its parent.
    """

    pattern: str
    device: str
    above: int


class Patterns:
    """A mapping from patterns to devices, in order.

    Args:
        devices: From each pattern to a device.

    Raises:
        ValueError: Patterns aren't regular expressions; all of them are named.
    """

    def __init__(self, devices: Mapping[str, str]) -> None:
        self._devices = dict(devices)
        self._matchers: dict[str, re.Pattern[str]] = {}
        faults = []
        for pattern in self._devices:
            try:
                re.compile(pattern)
                self._matchers[pattern] = re.compile(f"(?:.*/)?(?:{pattern})")
            except re.error as error:
                faults.append(f"{pattern!r} ({error})")
        if faults:
            raise ValueError(
                "The patterns of a placement must be regular expressions. Received: "
                f"{', '.join(faults)}. To match one layer write its path, to match all "
                "layers inside of one write 'path/.*'."
            )

    def find(self, paths: Iterable[str]) -> Match | None:
        """Find the innermost match of a layer.

        The layer itself precedes its parent, and so on upwards. Of several patterns
        that match at one level, a pattern that equals the path precedes the others,
        else the first of the mapping counts.

        Args:
            paths: The names by which the layer is known, as "model/encoder/dense".
        """
        found = [match for path in paths if (match := self._of_path(path)) is not None]
        return min(found, key=lambda match: match.above, default=None)

    @functools.cached_property
    def _of_path(self) -> functools._lru_cache_wrapper[Match | None]:
        return functools.lru_cache(maxsize=None)(self._search)

    def _search(self, path: str) -> Match | None:
        above = 0
        while path:
            pattern = self._matching(path)
            if pattern is not None:
                return Match(
                    pattern=pattern, device=self._devices[pattern], above=above
                )
            path, _, _ = path.rpartition("/")
            above += 1
        return None

    def _matching(self, path: str) -> str | None:
        """Return the pattern that matches a path itself, not one of its parents."""
        literal = [
            pattern
            for pattern in self._devices
            if path == pattern or path.endswith(f"/{pattern}")
        ]
        if literal:
            # "block/dense" rather than "dense".
            return max(literal, key=len)
        for pattern, matcher in self._matchers.items():
            if _matches(matcher, path):
                return pattern
        return None

    @property
    def has_catch_all(self) -> bool:
        """Whether a pattern matches all layers."""
        return any(
            matcher.fullmatch("a") and matcher.fullmatch("b_1")
            for matcher in self._matchers.values()
        )

    def unmatched(self, layers: Iterable[Iterable[str]]) -> list[str]:
        """Return the patterns that match no layer; each layer is given by its paths."""
        paths = [path for layer in layers for path in layer]
        return [
            pattern
            for pattern, matcher in self._matchers.items()
            if not any(_matches(matcher, path) for path in paths)
        ]


def _matches(matcher: re.Pattern[str], path: str) -> bool:
    return bool(matcher.fullmatch(path) or matcher.fullmatch(f"{path}/"))


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
    raise PlanError(
        f"The model doesn't fit into the memory of {len(devices)} device"
        f"{'s' if len(devices) > 1 else ''}, however it is cut. Received: "
        f"devices={[device.name for device in devices]}, {advice.run_in_words(run)}. "
        f"The cut that is nearest to fitting:\n\n{plan.device_table()}\n\n"
        f"What would fit:\n{advice.in_lines(found)}",
        advice=found,
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
