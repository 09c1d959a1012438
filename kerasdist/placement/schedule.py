"""GPipe's schedule: the micro-batch of each stage at each time.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", 2019.

A batch is divided into M micro-batches, the layers into S stages. A stage works on a
micro-batch as soon as the stage before has finished it; when all stages have finished
all of them, the backward pass runs in the opposite order. With stages that take equally
long:

    2 stages, 4 micro-batches; Fm: forward of micro-batch m, Bm: its backward

    stage 0   F0 F1 F2 F3  .  . B3 B2 B1 B0
    stage 1    . F0 F1 F2 F3 B3 B2 B1 B0  .

A stage idles S - 1 of M + S - 1 slots, each way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The schedule of a step; as text it's the diagram.

    Attributes:
        stages: The devices, in the order in which a batch passes through them.
        micro_batches: Number of parts of a batch.
    """

    stages: tuple[str, ...]
    micro_batches: int

    @property
    def bubble(self) -> float:
        """The part of the time that a stage idles, with stages that take equally long.

        (S - 1) / (M + S - 1): from 0, for one stage, to below 1.
        """
        stages = len(self.stages)
        return (stages - 1) / (self.micro_batches + stages - 1)

    @property
    def bound(self) -> float:
        """The least time of a step, relative to all of its work on one device.

        (M + S - 1) / (M S): 1 with one micro-batch, towards 1 / S with many.
        """
        stages, parts = len(self.stages), self.micro_batches
        return (parts + stages - 1) / (parts * stages)

    def slots(self) -> list[list[str]]:
        """Return each stage's work in each slot: `"F0"`, `"B3"`, or empty."""
        stages, parts = len(self.stages), self.micro_batches
        length = parts + stages - 1
        table = [[""] * (2 * length) for _ in range(stages)]
        for stage in range(stages):
            for part in range(parts):
                table[stage][stage + part] = f"F{part}"
                # Backward the last stage begins, with the last micro-batch.
                after = (stages - 1 - stage) + (parts - 1 - part)
                table[stage][length + after] = f"B{part}"
        return table

    def __str__(self) -> str:
        names = _short(self.stages)
        width = max(len(name) for name in names)
        slots = self.slots()
        cell = max(len(text) for row in slots for text in row)
        rows = [
            f"{name:<{width}}  " + " ".join(f"{text or '.':>{cell}}" for text in row)
            for name, row in zip(names, slots, strict=True)
        ]
        parts, stages = self.micro_batches, len(self.stages)
        return "\n".join(
            [
                f"{stages} stage{_s(stages)}, {parts} micro-batch"
                f"{'es' if parts > 1 else ''}; Fm: forward of micro-batch m, Bm: its "
                "backward",
                "",
                *rows,
                "",
                f"Each stage idles {self.bubble:.0%} of a step: (S-1)/(M+S-1), if all "
                f"take equally long. A step takes at least {self.bound:.0%} of the "
                "time of one device.",
            ]
        )


def _short(devices: Sequence[str]) -> list[str]:
    """Return device names without the parts that all have in common."""
    parts = [
        device.replace("/device:", "/").strip("/").split("/") for device in devices
    ]
    while len(parts[0]) > 1 and len({name[0] for name in parts}) == 1:
        if any(len(name) == 1 for name in parts):
            break
        parts = [name[1:] for name in parts]
    return ["/".join(name) for name in parts]


def _s(count: int) -> str:
    return "s" if count != 1 else ""
