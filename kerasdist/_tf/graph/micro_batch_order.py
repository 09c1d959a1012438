"""Edges in a graph that fix the order in which devices process micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_ops

from kerasdist.placement.micro_batch_order import Node, Part, find_edges

# The name of the operations that only impose an order.
ORDER = "micro_batch_done"

# Operations that are registered as stateful, but may run in any order.
_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd"})


def order_parts(graph: Any, marks: Iterable[tuple[Any, Part]]) -> int:
    """Let each device of a graph finish one micro-batch before it begins the next.

    Args:
        graph: The graph of a step, complete.
        marks: Operations at which parts begin; those of other graphs are ignored.

    Returns:
        The number of visits that wait for another one, see
        `placement.micro_batch_order`.
    """
    operations = graph.get_operations()
    index = {operation: i for i, operation in enumerate(operations)}
    known = {index[op]: part for op, part in marks if op in index}
    if not known:
        return 0
    nodes = [
        Node(
            inputs=[
                index[one]
                for one in (*(t.op for t in op.inputs), *op.control_inputs)
                # A loop gets further inputs, constants, when it's differentiated.
                if index.get(one, i) < i
            ],
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
