"""The order of micro-batches on a device, as extra edges of a graph of operations.

An executor runs the operations that are ready, in the order in which they became so. As
all micro-batches are ready at once, the first stage would run the first layer of each
of them, then the second layer of each: the next stage would have to wait for its first
micro-batch until nearly all of the work is done. So extra edges make each device finish
one micro-batch before it begins the next:

    visit       the operations of one micro-batch from its arrival on a device until
                it leaves it; forward and backward are different visits, and so are two
                that begin after a different number of changes of device
    entry       an operation of a visit with an input from outside of it
    exit        an operation of a visit whose results nothing in it uses
    edges       the entries of a visit wait for the exits of the same visit with the
                micro-batch before

The micro-batch of an operation is found along the edges of the graph, from marked
operations: those that divide batches, and those of gradients. An operation with inputs
of several micro-batches (a loss, a sum of gradients) belongs to none, and all
operations after it are the backward pass.

In the forward pass all edges lead from operations made earlier to ones made later, like
all others in the graph, so there can't be a cycle. Gradients are made layer by layer,
of all micro-batches in turn: there cycles are searched for. Where there would be one,
or where operations with effects must run in the order in which they were made, edges
that lead backwards are left out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

# GPipe's schedule: the micro-batch of each stage at each time.
#
#     Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
#     Parallelism", 2019.
#
# A batch is divided into M micro-batches, the layers into S stages. A stage works on a
# micro-batch as soon as the stage before has finished it; when all stages have finished
# all of them, the backward pass runs in the opposite order. With stages that take
# equally long:
#
#     2 stages, 4 micro-batches; Fm: forward of micro-batch m, Bm: its backward
#
#     stage 0   F0 F1 F2 F3  .  . B3 B2 B1 B0
#     stage 1    . F0 F1 F2 F3 B3 B2 B1 B0  .
#
# A stage idles S - 1 of M + S - 1 slots, each way.


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


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """A micro-batch in the forward or backward pass.

    Attributes:
        call: The number of the model's call that it is a part of.
        number: Its number in this call.
        backward: Whether it's in the backward pass.
    """

    call: int
    number: int
    backward: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """An operation.

    Attributes:
        inputs: The operations that it waits for, as indices of a list in the order in
            which they were made.
        device: Its device; empty: that of its inputs.
        has_effects: Whether its place in the order of making may have to be kept.
    """

    inputs: Sequence[int]
    device: str
    has_effects: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edges:
    """Extra edges on one device: each of `after` waits for all of `before`."""

    device: str
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclasses.dataclass
class _Visit:
    device: str
    nodes: list[int] = dataclasses.field(default_factory=list)
    entries: list[int] = dataclasses.field(default_factory=list)
    used: set[int] = dataclasses.field(default_factory=set)

    @property
    def exits(self) -> list[int]:
        return [node for node in self.nodes if node not in self.used]


# By call, direction, device and changes of device; then by part.
_Visits: TypeAlias = dict[tuple[int, bool, str, int], dict[int, _Visit]]


def find_edges(nodes: Sequence[Node], marks: Mapping[int, MicroBatch]) -> list[Edges]:
    """Find the edges.

    Args:
        nodes: All operations, in the order in which they were made.
        marks: The operations at which parts begin.
    """
    visits = _visits(nodes, marks)
    found = _edges(nodes, visits, only_on=False)
    return found if _can_be_run(nodes, found) else _edges(nodes, visits, only_on=True)


def _edges(nodes: Sequence[Node], visits: _Visits, *, only_on: bool) -> list[Edges]:
    """Return all edges, or only those from operations made earlier."""
    found = []
    for (_, backward, device, _), chain in visits.items():
        # Backward the last micro-batch is first: its activations were used last.
        numbers = sorted(
            (number for number, visit in chain.items() if visit.entries),
            reverse=backward,
        )
        for number, following in itertools.pairwise(numbers):
            one, other = chain[number], chain[following]
            bound = only_on or any(
                nodes[i].has_effects for i in one.nodes + other.nodes
            )
            first = min(other.entries)
            before = tuple(i for i in one.exits if i < first or not bound)
            if before:
                edges = Edges(device=device, before=before, after=tuple(other.entries))
                found.append(edges)
    return found


def _can_be_run(nodes: Sequence[Node], edges: Sequence[Edges]) -> bool:
    """Return whether the graph with these edges has no cycle."""
    after: list[list[int]] = [[] for _ in range(len(nodes) + len(edges))]
    waits = [0] * len(after)

    def wait(late: int, early: int) -> None:
        after[early].append(late)
        waits[late] += 1

    for index, node in enumerate(nodes):
        for i in node.inputs:
            wait(index, i)
    for number, one in enumerate(edges, len(nodes)):
        for i in one.before:
            wait(number, i)
        for i in one.after:
            wait(i, number)
    ready = [index for index, count in enumerate(waits) if count == 0]
    done = 0
    while ready:
        done += 1
        for index in after[ready.pop()]:
            waits[index] -= 1
            if waits[index] == 0:
                ready.append(index)
    return done == len(after)


def _visits(nodes: Sequence[Node], marks: Mapping[int, MicroBatch]) -> _Visits:
    """Return all visits."""
    parts: list[MicroBatch | None] = []
    joined: list[bool] = []  # whether it depends on an operation of several parts
    devices: list[str] = []
    levels: list[int] = []  # changes of device so far; -1: marked
    visits: _Visits = {}
    for index, node in enumerate(nodes):
        if index in marks:
            parts.append(marks[index])
            joined.append(False)
            devices.append("")
            levels.append(-1)
            continue
        part, is_joined = part_of(node.inputs, parts, joined)
        parts.append(part)
        joined.append(is_joined)
        inside = [i for i in node.inputs if part is not None and parts[i] == part]
        device, level = node.device, 0
        deepest = max(inside, key=lambda i: levels[i], default=None)
        if deepest is not None and not device:
            device = devices[deepest]
        for i in inside:
            moved = levels[i] >= 0 and devices[i] != device
            level = max(level, levels[i] + moved)
        devices.append(device)
        levels.append(level)
        if part is None or not device:
            continue
        key = (part.call, part.backward, device, level)
        visit = visits.setdefault(key, {}).setdefault(part.number, _Visit(device))
        visit.nodes.append(index)
        same = [i for i in inside if levels[i] == level and devices[i] == device]
        visit.used.update(same)
        if len(same) < len(inside):
            visit.entries.append(index)
    return visits


def part_of(
    inputs: Iterable[int], parts: Sequence[MicroBatch | None], joined: Sequence[bool]
) -> tuple[MicroBatch | None, bool]:
    """Return the part that an operation belongs to, and whether it's of several."""
    after_join, found = False, set()
    backward = False
    for i in inputs:
        after_join |= joined[i]
        part = parts[i]
        if part is not None:
            backward |= part.backward
            found.add((part.call, part.number))
    if not found:
        return None, after_join
    if len(found) > 1:
        return None, True
    ((call, number),) = found
    return MicroBatch(call, number, backward or after_join), False
