"""The division of a graph into parts to compile, and what runs between them.

    part 1 ──▶ collective 1 ──▶ ... ──▶ part n ──▶ collective n ──▶ part n + 1

An operation belongs to the part before the first collective that waits for it: as late
as possible. So bucket 1 leaves when the backward pass has computed its gradients, and
part 2 computes the next bucket's meanwhile. What no collective waits for, above all the
update, is in the last part.

Some operations beside the collectives aren't compiled either, and devices differ. Where
an operation of a part waits for such a one that waits for the same part, the part is
divided: later pieces have larger numbers of `hop`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """One operation.

    Attributes:
        before: Numbers of the nodes that it waits for, all smaller than its own.
        device: Where it's compiled for; None: it isn't compiled.
        collective: Whether it is, or contains, communication; not compiled.
    """

    before: tuple[int, ...]
    device: str | None
    collective: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Operations that run together.

    Attributes:
        nodes: Their numbers, in order.
        device: Where they're compiled for; None: one operation, which isn't.
    """

    nodes: tuple[int, ...]
    device: str | None


def divide(nodes: Sequence[Node]) -> list[Part]:
    """Divide the operations of a graph into parts, in an order in which they can run.

    Args:
        nodes: All operations, each after those that it waits for.
    """
    count = sum(node.collective for node in nodes)
    # The number of the first collective that waits for a node: itself for one.
    needed = [count + 1] * len(nodes)
    number = count
    for index in reversed(range(len(nodes))):
        if nodes[index].collective:
            # Not the number in the order of the graph, if another one waits for it.
            needed[index] = min(needed[index], number)
            number -= 1
        for before in nodes[index].before:
            needed[before] = min(needed[before], needed[index])
    hops: list[int] = []
    for index, node in enumerate(nodes):
        hop = 0
        for before in node.before:
            if needed[before] != needed[index]:
                continue
            other = nodes[before].device
            crosses = node.device is not None and other != node.device
            hop = max(hop, hops[before] + crosses)
        hops.append(hop)
    groups: dict[tuple[int, int, int, str], list[int]] = {}
    for index, node in enumerate(nodes):
        own = index + 1 if node.device is None else 0
        key = needed[index], hops[index], own, node.device or ""
        groups.setdefault(key, []).append(index)
    # Of one hop the compiled ones first: the others may wait for them.
    return [
        Part(nodes=tuple(group), device=nodes[group[0]].device)
        for _, group in sorted(groups.items())
    ]
