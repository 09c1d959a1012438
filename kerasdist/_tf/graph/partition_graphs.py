"""The graphs of functions as the runtime has divided them among devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_ops

from kerasdist.placement.micro_batch_order import MicroBatch, Node, find_edges, part_of

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
    nodes = [
        Node(
            inputs=inputs[i],
            device=op.device,
            has_effects=op.op_def.is_stateful and op.type not in _READS,
        )
        for i, op in enumerate(operations)
    ]
    found = find_edges(nodes, known)
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
    parts: list[MicroBatch | None] = []
    joined: list[bool] = []
    for i in range(len(operations)):
        found = (known[i], False) if i in known else part_of(inputs[i], parts, joined)
        parts.append(found[0])
        joined.append(found[1])
    return {
        op: part for op, part in zip(operations, parts, strict=True) if part is not None
    }


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
