"""A step's work by device, in runs that wait for other devices only at their begin.

    key        the device and the micro-batch (`placement.micro_batch_order`) of an
               operation; some belong to no micro-batch: a loss, an update, and all if
               batches aren't divided
    level      number of changes of the key on the longest path to an operation
    visit      the operations with the same key and level

All inputs of a visit have a lower level: they are from other visits, or from before
the step. Its time is that from when the first of its operations can begin that takes
some time (an entry) to when the last of them ends:

    2 stages, 2 micro-batches     F: forward, B: backward, U: update; by level

    stage 0   F0 F1  .  .  .  B1 B0 U
    stage 1    . F0 F1  L  B1 B0  . U

Entries that wait for the same operations are a group. If a group also waits for a new
operation, which waits for just these, the order of all others stays the same: so clocks
can be inserted there, whatever other orders must be kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from kerasdist.placement.micro_batch_order import MicroBatch, part_of

# Of one visit, those that can begin first: an update has one for each variable.
_MOST_GROUPS = 4
# A visit is compared with all others: that takes too long if there are more of them.
_MOST_COMPARED = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation of a step's graph.

    Attributes:
        inputs: The operations that it waits for, as indices.
        device: Its device; empty: that of its inputs.
        before: Whether it's an input of the step and no part of it.
        orders: Whether it only sets the order of micro-batches.
        works: Whether it takes long enough to be worth measuring.
    """

    inputs: Sequence[int]
    device: str
    before: bool = False
    orders: bool = False
    works: bool = True


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
    order = _sorted(operations)
    parts: list[MicroBatch | None] = [None] * len(operations)
    joined = [False] * len(operations)
    devices = [operation.device for operation in operations]
    levels = [-1] * len(operations)

    def same_key(one: int, other: int) -> bool:
        return devices[one] == devices[other] and parts[one] == parts[other]

    members: dict[tuple[int, str, MicroBatch | None], list[int]] = {}
    for i in order:
        one = operations[i]
        if i in marks:
            parts[i] = marks[i]
        else:
            known = [j for j in one.inputs if not operations[j].orders]
            parts[i], joined[i] = part_of(known, parts, joined)
        if not one.device:
            devices[i] = next((devices[j] for j in one.inputs if devices[j]), "")
        if one.before:
            continue
        levels[i] = max(
            (levels[j] + (levels[j] < 0 or not same_key(i, j)) for j in one.inputs),
            default=0,
        )
        members.setdefault((levels[i], devices[i], parts[i]), []).append(i)
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
    for i in _sorted(operations):
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


def _sorted(operations: Sequence[Operation]) -> list[int]:
    """Return the indices of all operations, each after those that it waits for."""
    after: list[list[int]] = [[] for _ in operations]
    waits = [len(set(operation.inputs)) for operation in operations]
    for index, operation in enumerate(operations):
        for i in set(operation.inputs):
            after[i].append(index)
    order = [index for index, count in enumerate(waits) if count == 0]
    for index in order:
        for other in after[index]:
            waits[other] -= 1
            if waits[other] == 0:
                order.append(other)
    return order
