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

In the forward pass all edges lead from operations made earlier to ones made later, like
all others in the graph, so there can't be a cycle. Gradients are made layer by layer,
of all micro-batches in turn: there cycles are searched for. Where there would be one,
or where operations with effects must run in the order in which they were made, edges
that lead backwards are left out.

In the finished graph the visits of all devices, also those of no micro-batch, are found
once more, to measure them: see `find_visits`.
"""

from __future__ import annotations

import dataclasses
import graphlib
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
        parts = self.micro_batches
        table = []
        for stage in range(len(self.stages)):
            slots = range(-stage, parts + len(self.stages) - 1 - stage)
            # Backward the last stage begins, with the last micro-batch.
            table.append(
                [
                    f"{way}{part}" if 0 <= part < parts else ""
                    for way, order in (("F", slots), ("B", slots[::-1]))
                    for part in order
                ]
            )
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
                f"{stages} stage{'s' if stages > 1 else ''}, {parts} micro-batch"
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
class Operation:
    """An operation of a step's graph.

    Attributes:
        inputs: The operations that it waits for, as indices.
        device: Its device; empty: that of its inputs.
        has_effects: Whether its place in the order of making may have to be kept.
        before: Whether it's an input of the step and no part of it.
        orders: Whether it only sets the order of micro-batches.
        works: Whether it takes long enough to be worth measuring.
    """

    inputs: Sequence[int]
    device: str
    has_effects: bool = False
    before: bool = False
    orders: bool = False
    works: bool = True


def find_parts(
    inputs: Sequence[Sequence[int]],
    marks: Mapping[int, MicroBatch],
    order: Iterable[int] | None = None,
) -> list[MicroBatch | None]:
    """Find the micro-batch of each operation along the edges of the graph.

    An operation with inputs of several micro-batches (a loss, a sum of gradients)
    belongs to none, and all operations after it are the backward pass.

    Args:
        inputs: For each operation those that it depends on, as indices.
        marks: The operations at which micro-batches begin: those that divide batches,
            and those of gradients.
        order: All operations, each after its inputs; by default as they are listed.
    """
    parts: list[MicroBatch | None] = [None] * len(inputs)
    # Whether it depends on an operation of several micro-batches.
    joined = [False] * len(inputs)
    for i in range(len(inputs)) if order is None else order:
        if i in marks:
            parts[i] = marks[i]
            continue
        known = [part for j in inputs[i] if (part := parts[j]) is not None]
        found = {(part.call, part.number) for part in known}
        after_join = any(joined[j] for j in inputs[i])
        if len(found) == 1:
            backward = after_join or any(part.backward for part in known)
            parts[i] = MicroBatch(*found.pop(), backward)
        else:
            joined[i] = bool(found) or after_join
    return parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edges:
    """Extra edges on one device: each of `after` waits for all of `before`."""

    device: str
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclasses.dataclass
class _PartVisit:
    nodes: list[int] = dataclasses.field(default_factory=list)
    entries: list[int] = dataclasses.field(default_factory=list)
    used: set[int] = dataclasses.field(default_factory=set)


# By call, direction, device and changes of device; then by part.
_PartVisits: TypeAlias = dict[tuple[int, bool, str, int], dict[int, _PartVisit]]


def find_edges(
    operations: Sequence[Operation], marks: Mapping[int, MicroBatch]
) -> list[Edges]:
    """Find the edges.

    Args:
        operations: All operations, in the order in which they were made.
        marks: The operations at which parts begin.
    """
    visits = _part_visits(operations, marks)
    found = _edges(operations, visits, only_on=False)
    # Each of the edges is an operation, too, when cycles are searched for.
    inputs = [list(one.inputs) for one in operations]
    for one in found:
        for i in one.after:
            inputs[i].append(len(inputs))
        inputs.append(list(one.before))
    try:
        _sorted(inputs)
    except graphlib.CycleError:
        return _edges(operations, visits, only_on=True)
    return found


def _edges(
    operations: Sequence[Operation], visits: _PartVisits, *, only_on: bool
) -> list[Edges]:
    """Return all edges, or only those from operations made earlier."""
    found = []
    for (_, backward, device, _), chain in visits.items():
        # Backward the last micro-batch is first: its activations were used last.
        numbers = sorted(
            (number for number, visit in chain.items() if visit.entries),
            reverse=backward,
        )
        for one, other in itertools.pairwise(chain[number] for number in numbers):
            bound = only_on or any(
                operations[i].has_effects for i in one.nodes + other.nodes
            )
            first = min(other.entries)
            exits = (i for i in one.nodes if i not in one.used)
            before = tuple(i for i in exits if i < first or not bound)
            if before:
                edges = Edges(device=device, before=before, after=tuple(other.entries))
                found.append(edges)
    return found


def _part_visits(
    operations: Sequence[Operation], marks: Mapping[int, MicroBatch]
) -> _PartVisits:
    """Return all visits of micro-batches."""
    parts = find_parts([one.inputs for one in operations], marks)
    devices = [""] * len(parts)
    levels = [-1] * len(parts)  # changes of device so far; -1: marked
    visits: _PartVisits = {}
    for i, part in enumerate(parts):
        if part is None or i in marks:
            continue
        inside = [j for j in operations[i].inputs if parts[j] == part]
        device = operations[i].device
        if inside and not device:
            device = devices[max(inside, key=levels.__getitem__)]
        moved = (levels[j] + (levels[j] >= 0 and devices[j] != device) for j in inside)
        devices[i], levels[i] = device, max([0, *moved])
        if not device:
            continue
        key = (part.call, part.backward, device, levels[i])
        visit = visits.setdefault(key, {}).setdefault(part.number, _PartVisit())
        visit.nodes.append(i)
        same = [j for j in inside if (levels[j], devices[j]) == (levels[i], device)]
        visit.used.update(same)
        if len(same) < len(inside):
            visit.entries.append(i)
    return visits


# A step's work by device, in runs that wait for other devices only at their begin.
#
#     key        the device and the micro-batch of an operation; some belong to no
#                micro-batch: a loss, an update, and all if batches aren't divided
#     level      number of changes of the key on the longest path to an operation
#     visit      the operations with the same key and level
#
# All inputs of a visit have a lower level: they are from other visits, or from before
# the step. Its time is that from when the first of its operations can begin that takes
# some time (an entry) to when the last of them ends:
#
#     2 stages, 2 micro-batches     F: forward, B: backward, U: update; by level
#
#     stage 0   F0 F1  .  .  .  B1 B0 U
#     stage 1    . F0 F1  L  B1 B0  . U
#
# Entries that wait for the same operations are a group. If a group also waits for a new
# operation, which waits for just these, the order of all others stays the same: so
# clocks can be inserted there, whatever other orders must be kept.

# Of one visit, those that can begin first: an update has one for each variable.
_MOST_GROUPS = 4
# A visit is compared with all others: that takes too long if there are more of them.
_MOST_COMPARED = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntryGroup:
    """Entries of a visit that wait for the same operations.

    Attributes:
        after: The operations that they wait for.
        entries: Operations that take some time, and wait for no other such one of the
            same visit.
    """

    after: tuple[int, ...]
    entries: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visit:
    """The work of a device without waiting for other devices.

    Attributes:
        device: The device.
        part: The micro-batch; None if it's of none, or of all.
        groups: Its first operations.
        exits: Operations that take some time and precede no other such one of the
            same visit: it ends with the last of them.
    """

    device: str
    part: MicroBatch | None
    groups: tuple[EntryGroup, ...]
    exits: tuple[int, ...]


def find_visits(
    operations: Sequence[Operation], marks: Mapping[int, MicroBatch]
) -> list[Visit]:
    """Find all visits that take some time, in the order in which they can begin.

    Args:
        operations: All operations, without cycles.
        marks: Those at which micro-batches begin.
    """
    order = _sorted([one.inputs for one in operations])
    known = [[j for j in one.inputs if not operations[j].orders] for one in operations]
    parts = find_parts(known, marks, order)
    devices = [one.device for one in operations]
    levels = [-1] * len(operations)
    members: dict[tuple[int, str, MicroBatch | None], list[int]] = {}
    for i in order:
        one = operations[i]
        if not one.device:
            devices[i] = next((devices[j] for j in one.inputs if devices[j]), "")
        if one.before:
            continue
        key = devices[i], parts[i]
        levels[i] = max(
            (
                levels[j] + (levels[j] < 0 or (devices[j], parts[j]) != key)
                for j in one.inputs
            ),
            default=0,
        )
        members.setdefault((levels[i], *key), []).append(i)
    found = []
    for level, device, part in sorted(members, key=lambda key: key[0]):
        inside = members[level, device, part]
        if device and any(operations[i].works for i in inside):
            groups, exits = _ends(operations, inside)
            found.append(Visit(device=device, part=part, groups=groups, exits=exits))
    return [visit for visit in found if visit.groups]


def find_next(
    operations: Sequence[Operation], visits: Sequence[Visit], most: int
) -> list[list[tuple[int, int]]]:
    """Find for each visit those that begin when it ends, because they wait for it.

    Args:
        operations: All operations, without cycles.
        visits: Visits in the order in which they can begin.
        most: The number of them to return, at most: the first ones.

    Returns:
        For each visit the numbers of those visits, and of their groups.
    """
    if len(visits) > _MOST_COMPARED:
        return [[] for _ in visits]
    # Each exit is a bit; an operation's bits are the exits that it waits for.
    bits = {
        exit_: 1 << n
        for n, exit_ in enumerate(exit_ for visit in visits for exit_ in visit.exits)
    }
    over = [0] * len(operations)
    for i in _sorted([one.inputs for one in operations]):
        over[i] = bits.get(i, 0)
        for j in operations[i].inputs:
            over[i] |= over[j]
    waits = []
    for number, visit in enumerate(visits):
        for place, group in enumerate(visit.groups):
            found = 0
            for i in group.after:
                found |= over[i]
            waits.append(((number, place), found))
    following = []
    for visit in visits:
        exits = 0
        for i in visit.exits:
            exits |= bits[i]
        after = (where for where, found in waits if exits & ~found == 0)
        following.append(list(itertools.islice(after, most)))
    return following


def _ends(
    operations: Sequence[Operation], inside: Sequence[int]
) -> tuple[tuple[EntryGroup, ...], tuple[int, ...]]:
    """Return the groups with which the work of a visit begins, and its exits.

    Args:
        operations: All operations.
        inside: Those of the visit, each after those that it waits for.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    # The last working operations of the visit on each path to an operation.
    last: dict[int, frozenset[int]] = {}
    followed: set[int] = set()
    for i in inside:
        before: set[int] = set()
        for j in operations[i].inputs:
            before |= last.get(j, frozenset())
        if not operations[i].works:
            last[i] = frozenset(before)
            continue
        last[i] = frozenset((i,))
        followed |= before
        if not before:
            groups.setdefault(tuple(sorted(set(operations[i].inputs))), []).append(i)
    return (
        tuple(
            EntryGroup(after=after, entries=tuple(entries))
            for after, entries in list(groups.items())[:_MOST_GROUPS]
            if after
        ),
        tuple(i for i in inside if operations[i].works and i not in followed),
    )


def union_length(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans, each (begin, end)."""
    length, reached = 0.0, -float("inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def _sorted(inputs: Sequence[Sequence[int]]) -> list[int]:
    """Return all operations, each after its inputs.

    Raises:
        graphlib.CycleError: That isn't possible.
    """
    sorter = graphlib.TopologicalSorter(dict(enumerate(inputs)))
    return list(sorter.static_order())
