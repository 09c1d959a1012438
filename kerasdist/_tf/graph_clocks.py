"""Clocks in the graph of a step, which read when each device begins and ends work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import auto_control_deps, ops
from tensorflow.python.ops import control_flow_ops

from kerasdist.placement.micro_batch_order import (
    MicroBatch,
    Operation,
    Visit,
    find_edges,
    find_next,
    find_parts,
    find_visits,
)

# Edges in a graph that fix the order in which devices process micro-batches.

# The name of the operations that only impose an order.
ORDER = "micro_batch_done"

# Operations that are registered as stateful, but may run in any order.
_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd"})


def order_parts(graph: Any, marks: Iterable[tuple[Any, MicroBatch]]) -> int:
    """Let each device of a graph finish one micro-batch before it begins the next.

    Args:
        graph: The graph of a step, complete.
        marks: Operations at which parts begin; those of other graphs are ignored.

    Returns:
        The number of visits that wait for another one, see
        `placement.micro_batch_order`.
    """
    operations = graph.get_operations()
    known, inputs = _known_and_inputs(operations, marks)
    if not known:
        return 0
    described = [
        Operation(
            inputs=inputs[i],
            device=op.device,
            has_effects=op.op_def.is_stateful and op.type not in _READS,
        )
        for i, op in enumerate(operations)
    ]
    found = find_edges(described, known)
    for edges in found:
        before = [operations[i] for i in edges.before]
        with (
            graph.as_default(),
            ops.device(edges.device),
            graph.control_dependencies(before),
        ):
            done = control_flow_ops.no_op(name=ORDER)
        for i in edges.after:
            operations[i]._add_control_input(done)
    return len(found)


def parts_of_operations(
    graph: Any, marks: Iterable[tuple[Any, MicroBatch]]
) -> dict[Any, MicroBatch]:
    """Return the micro-batches of the operations of a graph that belong to one.

    Args:
        graph: The graph of a step, as far as it's traced.
        marks: As in `order_parts`.
    """
    operations = graph.get_operations()
    known, inputs = _known_and_inputs(operations, marks)
    parts = zip(operations, find_parts(inputs, known), strict=True)
    return {op: part for op, part in parts if part is not None}


def _known_and_inputs(
    operations: list[Any], marks: Iterable[tuple[Any, MicroBatch]]
) -> tuple[dict[int, MicroBatch], list[list[int]]]:
    """Return the marked operations' parts, and the inputs of each, by index."""
    index = {operation: i for i, operation in enumerate(operations)}
    known = {index[op]: part for op, part in marks if op in index}
    inputs = [
        [
            index[one]
            for one in (*(t.op for t in op.inputs), *op.control_inputs)
            # A loop gets further inputs, constants, when it's differentiated.
            if index.get(one, i) < i
        ]
        for i, op in enumerate(operations)
    ]
    return known, inputs


# The graphs of functions as the runtime has divided them among devices.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunNode:
    """One operation of a function, after the runtime has optimized and divided it.

    Attributes:
        name: Its name in the function.
        op: Its kind.
        device: Where it runs: a full name.
        inputs: Names of the operations that produce its inputs.
        target: The device that a `_Send` to another device sends to; else None.
        item_size: Bytes of one element of what a `_Send` sends; else 0.
        output: The index of the output of its first input that it takes.
        shapes: For a `_Send`, the shapes of the outputs of its input's operation, if
            known, with None for an unknown dimension; else empty.
    """

    name: str
    op: str
    device: str
    inputs: tuple[str, ...]
    target: str | None
    item_size: int
    output: int
    shapes: tuple[tuple[int | None, ...] | None, ...]


@contextmanager
def ran_graphs() -> Iterator[list[list[RunNode]]]:
    """Collect the functions that first run inside the block, one list each."""
    found: list[list[RunNode]] = []
    # Not `enable_run_metadata`: not all that it turns on can be turned off.
    context.enable_graph_collection()
    context.export_run_metadata()  # drops what ran before
    try:
        yield found
    finally:
        metadata = context.export_run_metadata()
        context.disable_graph_collection()
        for function in metadata.function_graphs:
            nodes = [node for graph in function.partition_graphs for node in graph.node]
            made = {node.name: node for node in nodes}
            found.append([_node(node, made) for node in nodes])


def _node(node: Any, made: dict[str, Any]) -> RunNode:
    sends = node.op == "_Send" and "recv_device" in node.attr
    source = node.input[0] if node.input else ""
    _, _, output = source.partition(":")
    target = node.attr["recv_device"].s.decode() if sends else None
    maker = made.get(source.partition(":")[0]) if sends else None
    shapes = [] if maker is None else list(maker.attr["output_shapes"].list.shape)
    if maker is not None and maker.op == "Const":
        # Also what is sent so that an operation there waits: nothing, of shape (0,).
        shapes = [maker.attr["value"].tensor.tensor_shape]
    return RunNode(
        name=node.name,
        op=node.op,
        device=node.device,
        inputs=tuple(name.partition(":")[0] for name in node.input if name[:1] != "^"),
        target=None if target == node.device else target,
        item_size=tf.dtypes.as_dtype(node.attr["T"].type).size if sends else 0,
        output=int(output) if output.isdigit() else 0,
        shapes=tuple(
            None
            if shape.unknown_rank
            else tuple(None if dim.size < 0 else dim.size for dim in shape.dim)
            for shape in shapes
        ),
    )


# The name of an operation in which workers communicate.
COLLECTIVE = "kerasdist_collective"
# The name scope of the clocks, which are no part of a step.
CLOCK = "kerasdist_stage_clock"
# Measuring more visits than this would cost too much.
_MOST_VISITS = 2000
# The number of other visits that a visit's end is compared with.
_MOST_NEXT = 3
# Operations that take no time of their own.
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
# Sums of micro-batches' gradients, which are computed beside their device's work.
_SUMS = frozenset({"AddN", "AddV2"})
# Operations on at most this many elements count as taking no time.
_FEW = 64
# Operations that are available when a step begins, unless they wait for others.
_GIVEN = frozenset({"Const", "Placeholder", "ReadVariableOp"})
_COMPUTE_ANYTHING = ("PyFunc", "Call", "While", "If", "Case")


@dataclass(frozen=True)
class Marked:
    """A visit with the tensors of its times.

    Attributes:
        visit: The visit.
        begins: For each group the time when it began: float64, scalar, in seconds.
        end: The time when it ended, or later: nothing waits for this clock, so it's
            read when a thread is free.
        following: Begins of other visits that wait for all of this one, which are thus
            not before its end.
    """

    visit: Visit
    begins: tuple[Any, ...]
    end: Any
    following: tuple[Any, ...]


def can_be_marked(devices: Iterable[str]) -> bool:
    """Return whether clocks on these devices show when operations have finished.

    That holds for CPUs. On other devices operations have only been started by then.
    """
    return all(":CPU:" in device for device in devices)


def mark_visits(
    graph: Any,
    first: int,
    marks: Iterable[tuple[Any, MicroBatch]],
    devices: Sequence[str],
) -> list[Marked]:
    """Put clocks into a graph, around the work of some devices.

    Each clock is on the device that it measures. The graph's results and its order of
    operations don't change.

    Args:
        graph: The graph of a step, complete.
        first: How many operations it had before the step.
        marks: Operations at which micro-batches begin; those of other graphs are
            ignored.
        devices: Full names of the devices.
    """
    # 1. Describe the graph's operations for the pure search for visits.
    made = graph.get_operations()
    index = {op: i for i, op in enumerate(made)}
    parts = {index[op]: part for op, part in marks if op in index}
    operations: list[Operation] = []
    effects = _EffectOrder()
    for i, op in enumerate(made):
        given = (*(tensor.op for tensor in op.inputs), *op.control_inputs)
        inputs = [index[one] for one in dict.fromkeys((*given, *effects.before(op)))]
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
    # 2. Find each device's visits.
    visits = [
        visit for visit in find_visits(operations, parts) if visit.device in devices
    ]
    if len(visits) > _MOST_VISITS:
        return []
    # 3. Put a clock before each group of a visit, and one at the visit's end.
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


class _EffectOrder:
    """The order of operations with effects, on a variable or on anything else.

    TensorFlow adds the edges for it only when the graph is finished.
    """

    def __init__(self) -> None:
        self._written: dict[Any, Any] = {}
        self._read: dict[Any, list[Any]] = {}

    def before(self, op: Any) -> list[Any]:
        """Return what an operation will wait for; to be called in graph order."""
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
    """Return the time when operations are done, as a tensor."""
    with (
        graph.as_default(),
        ops.name_scope(f"{CLOCK}/"),
        ops.device(device),
        graph.control_dependencies(after),
    ):
        now = tf.timestamp()
    manager = graph.experimental_acd_manager
    if manager is not None:
        # Else it would wait for all earlier operations with effects.
        manager.run_independently(now.op)
    return now


def _place(op: Any) -> str:
    # While workers communicate no device is at work.
    communicates = COLLECTIVE in op.name or op.type.startswith("Collective")
    return "communication" if communicates else str(op.device)


def _works(op: Any, divided: bool) -> bool:
    if op.type in _LIGHT or (divided and op.type in _SUMS):
        return False
    if any(word in op.type for word in _COMPUTE_ANYTHING):
        return True
    sizes = [tensor.shape.num_elements() for tensor in (*op.inputs, *op.outputs)]
    return any(size is None or size > _FEW for size in sizes)
