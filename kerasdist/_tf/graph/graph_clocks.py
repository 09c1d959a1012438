"""Clocks in the graph of a step: when each device begins and ends what it has to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps, ops

from kerasdist._tf.graph.micro_batch_order import ORDER
from kerasdist.placement.micro_batch_order import Part
from kerasdist.placement.visits import Operation, Visit, find_next, find_visits

__all__ = ["CLOCK", "COLLECTIVE", "Marked", "can_be_marked", "mark_visits"]

# The name of an operation in which workers communicate.
COLLECTIVE = "kerasdist_collective"
# The scope of what measures, and is no part of a step.
CLOCK = "kerasdist_stage_clock"
# More of them would cost too much.
_MOST_VISITS = 2000
# With so many others a visit's end is compared.
_MOST_NEXT = 3
# They take no time, or only that of what they wait for.
_LIGHT = frozenset(
    {
        "AssignAddVariableOp",
        "AssignVariableOp",
        "Const",
        "ExpandDims",
        "Identity",
        "IdentityN",
        "NoOp",
        "Placeholder",
        "Reshape",
        "ReadVariableOp",
        "Shape",
        "Slice",
        "Split",
        "SplitV",
        "Squeeze",
        "StopGradient",
        "StridedSlice",
        "Timestamp",
    }
)
# Sums of micro-batches' gradients: they are made while their device goes on.
_SUMS = frozenset({"AddN", "AddV2"})
# Elements: what handles no more of them takes no time.
_FEW = 64
# What a step begins with, if it waits for nothing else.
_GIVEN = frozenset({"Const", "Placeholder", "ReadVariableOp"})
_COMPUTE_ANYTHING = ("PyFunc", "Call", "While", "If", "Case")


@dataclass(frozen=True)
class Marked:
    """A visit with its times.

    Attributes:
        visit: The visit.
        begins: For each group the time when it began: float64, scalar, in seconds.
        end: The time when it ended, or later: nothing waits for this clock, so it's
            read when a thread has time for it.
        following: Begins of others that wait for all of it: it was over before.
    """

    visit: Visit
    begins: tuple[Any, ...]
    end: Any
    following: tuple[Any, ...]


def can_be_marked(devices: Iterable[str]) -> bool:
    """Whether operations are over when these devices' clocks say so.

    Those of others are only begun then.
    """
    return all(":CPU:" in device for device in devices)


def mark_visits(
    graph: Any, first: int, marks: Iterable[tuple[Any, Part]], devices: Sequence[str]
) -> list[Marked]:
    """Put clocks into a graph, around what some devices do in it.

    Each is on the device that it's for. What the graph computes, and in which order,
    stays as it is.

    Args:
        graph: The graph of a step, which has been made as a whole.
        first: How many operations it had before.
        marks: Operations at which micro-batches begin their ways; those of other graphs
            are left out.
        devices: Full names of the devices.
    """
    made = graph.get_operations()
    index = {op: i for i, op in enumerate(made)}
    parts = {index[op]: part for op, part in marks if op in index}
    operations: list[Operation] = []
    turns = _Turns()
    for i, op in enumerate(made):
        given = (*(tensor.op for tensor in op.inputs), *op.control_inputs)
        inputs = [index[one] for one in dict.fromkeys((*given, *turns.before(op)))]
        operations.append(
            Operation(
                inputs=inputs,
                device=_place(op),
                before=i < first
                or (
                    op.type in _GIVEN
                    and all(j < i and operations[j].before for j in inputs)
                ),
                orders=ORDER in op.name,
                works=_works(op, bool(parts)),
            )
        )
    visits = [
        visit for visit in find_visits(operations, parts) if visit.device in devices
    ]
    if len(visits) > _MOST_VISITS:
        return []
    clocks, ends = [], []
    for visit in visits:
        begins = []
        for group in visit.groups:
            now = _now(graph, visit.device, [made[i] for i in group.after])
            begins.append(now)
            for i in group.entries:
                made[i]._add_control_input(now.op)
        clocks.append(tuple(begins))
        ends.append(_now(graph, visit.device, [made[i] for i in visit.exits]))
    following = [
        tuple(clocks[number][group] for number, group in after)
        for after in find_next(operations, visits, _MOST_NEXT)
    ]
    return [Marked(*one) for one in zip(visits, clocks, ends, following, strict=True)]


class _Turns:
    """Who comes first of those with effects: on a variable, or on whatever else.

    TensorFlow adds edges that say so, but only when the graph is finished.
    """

    def __init__(self) -> None:
        self._written: dict[Any, Any] = {}
        self._read: dict[Any, list[Any]] = {}

    def before(self, op: Any) -> list[Any]:
        """What an operation will have to wait for; called for each in turn."""
        found = []
        touched = [
            (ops.tensor_id(resource), kind)
            for resource, kind in auto_control_deps._get_resource_inputs(op)
        ]
        if not touched and auto_control_deps.op_is_stateful(op):
            touched = [(None, auto_control_deps.ResourceType.READ_WRITE)]
        for key, kind in touched:
            if key in self._written:
                found.append(self._written[key])
            if kind is auto_control_deps.ResourceType.READ_ONLY:
                self._read.setdefault(key, []).append(op)
            else:
                found += self._read.pop(key, [])
                self._written[key] = op
        return [one for one in found if one is not op]


def _now(graph: Any, device: str, after: Sequence[Any]) -> Any:
    """The time when operations are done."""
    with (
        graph.as_default(),
        ops.name_scope(f"{CLOCK}/"),
        ops.device(device),
        graph.control_dependencies(after),
    ):
        now = tf.timestamp()
    manager = graph.experimental_acd_manager
    if manager is not None:
        # Or it would wait for everything with effects that was made before.
        manager.run_independently(now.op)
    return now


def _place(op: Any) -> str:
    # While workers communicate no device has anything to do.
    communicates = COLLECTIVE in op.name or op.type.startswith("Collective")
    return "communication" if communicates else str(op.device)


def _works(op: Any, divided: bool) -> bool:
    if op.type in _LIGHT or (divided and op.type in _SUMS):
        return False
    if any(word in op.type for word in _COMPUTE_ANYTHING):
        return True
    sizes = [tensor.shape.num_elements() for tensor in (*op.inputs, *op.outputs)]
    return any(size is None or size > _FEW for size in sizes)
