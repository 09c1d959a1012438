"""Costs of TensorFlow's operations: arithmetic operations, and bytes of results.

They are computed from the shapes in a graph, for any layer made of these operations:

    products          MatMul, BatchMatMul, Einsum: 2 per multiplication and addition
    convolutions      1, 2 and 3 dimensions, depthwise, transposed
    loops             the loop's body times the number of iterations (RNNs)
    functions         the operations of the called function
    everything else   one per element of the result (activations, sums, look-ups, ...)
    renaming          none: Reshape, Identity and the like don't touch the elements
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf

# Their output is their first input's memory.
ALIASES = frozenset(
    ["ExpandDims", "Identity", "PreventGradient", "Reshape", "Squeeze", "StopGradient"]
)
_FREE = ALIASES | {
    "Const",
    "IdentityN",
    "NoOp",
    "Pack",
    "Placeholder",
    "ReadVariableOp",
    "Shape",
    "StridedSlice",
    "VarHandleOp",
}
_PRODUCTS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "_FusedMatMul"}
_CONVOLUTIONS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative", "Conv"}
_TRANSPOSED = {
    "Conv2DBackpropInput",
    "Conv3DBackpropInputV2",
    "DepthwiseConv2dNativeBackpropInput",
}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_LOOPS = {"StatelessWhile", "While"}
_BRANCHES = {"Case", "If", "StatelessCase", "StatelessIf"}


def is_loop(operation: Any) -> bool:
    """Return whether an operation is a `tf.while_loop`."""
    return operation.type in _LOOPS


def tensor_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor; 0 without a static shape, or if it isn't data."""
    elements = _elements(tensor)
    return elements * tensor.dtype.size if elements and tensor.dtype.size else 0


def iterations(loop: Any) -> int:
    """Return how often a loop runs, at most; 1 if that isn't known."""
    # The first inputs of a loop are its counter and its bound.
    tensor = loop.inputs[1]
    while tensor.op.type in ("Identity", "Max"):
        tensor = tensor.op.inputs[0]
    bound = tf.get_static_value(tensor)
    if bound is not None and np.ndim(bound) == 0 and bound > 0:
        return int(bound)
    # Else the length of the inputs that it reads step by step.
    return max(
        (
            tensor.op.inputs[0].shape[0] or 1
            for tensor in loop.inputs
            if tensor.op.type == "TensorListFromTensor"
        ),
        default=1,
    )


def loop_lists(loop: Any) -> dict[int, tuple[str, int]]:
    """Return the contents of the lists that a loop fills, its non-tensor outputs.

    Returns:
        From the index of an output to the name of the tensor in the loop's body that
        each iteration puts into the list, and the bytes of the full list. Lists of one
        tensor share its memory. Lists of anything but data are left out.
    """
    body = _body(loop)
    if body is None:
        return {}
    count = iterations(loop)
    carried = {
        given.name: made for given, made in zip(body.inputs, body.outputs, strict=True)
    }
    found = {}
    for index, output in enumerate(body.outputs):
        item = _item(output)
        if item is None:
            continue
        item = _source(item, carried)
        if item is not None and not _is_weight(item, body):
            found[index] = item.name, count * tensor_bytes(item)
    return found


def flops(operation: Any) -> float:
    """Return the number of arithmetic operations of one operation of a graph."""
    kind = operation.type
    if kind in _FREE:
        return 0.0
    if kind in _PRODUCTS:
        return _product(operation)
    if kind == "Einsum":
        return _einsum(operation)
    if kind in _CONVOLUTIONS or kind in _TRANSPOSED:
        return _convolution(operation)
    if kind in _LOOPS:
        body = _body(operation)
        return iterations(operation) * _graph_flops(body)
    if kind in _CALLS:
        return _graph_flops(_called(operation, operation.get_attr("f")))
    if kind in _BRANCHES:
        return max((_graph_flops(graph) for graph in _branches(operation)), default=0.0)
    return float(sum(_elements(output) for output in operation.outputs))


def _graph_flops(graph: Any) -> float:
    if graph is None:
        return 0.0
    return sum(flops(operation) for operation in graph.get_operations())


def _elements(tensor: Any) -> int:
    return tensor.shape.num_elements() or 0 if tensor.shape.rank is not None else 0


def _product(operation: Any) -> float:
    first, output = operation.inputs[0], operation.outputs[0]
    if operation.type in ("MatMul", "_FusedMatMul"):
        turned = operation.get_attr("transpose_a")
    else:
        turned = operation.get_attr("adj_x")
    inner = first.shape[-2 if turned else -1]
    return 2.0 * _elements(output) * (inner or 1)


def _einsum(operation: Any) -> float:
    equation = operation.get_attr("equation").decode()
    sizes: dict[str, int] = {}
    for term, tensor in zip(
        equation.partition("->")[0].split(","), operation.inputs, strict=True
    ):
        term = term.strip()
        # An ellipsis is counted as one dimension.
        before, dots, after = term.partition("...")
        shape = [size or 1 for size in tensor.shape]
        for letter, size in zip(before, shape, strict=False):
            sizes[letter] = size
        if after:
            for letter, size in zip(after, shape[-len(after) :], strict=True):
                sizes[letter] = size
        if dots:
            middle = shape[len(before) : len(shape) - len(after)]
            sizes["..."] = max(sizes.get("...", 1), math.prod(middle))
    return 2.0 * math.prod(sizes.values())


def _convolution(operation: Any) -> float:
    """Return the count: each element of the larger side times a channel's weights."""
    kernel = operation.inputs[1]
    sides = [operation.outputs[0]]
    if operation.type in _TRANSPOSED:
        sides = [operation.inputs[2]]
    shape = kernel.shape.as_list()
    if any(size is None for size in shape):
        return 0.0
    channels = shape[-1]
    if operation.type.startswith("Depthwise"):
        channels = shape[-1] * shape[-2]
    return 2.0 * _elements(sides[0]) * math.prod(shape) / max(channels, 1)


def _body(loop: Any) -> Any:
    return _called(loop, loop.get_attr("body"))


def _called(operation: Any, function: Any) -> Any:
    return _tf.function_graph(operation.graph, function.name)


def _branches(operation: Any) -> list[Any]:
    if operation.type.endswith("Case"):
        functions = list(operation.get_attr("branches"))
    else:
        functions = [
            operation.get_attr("then_branch"),
            operation.get_attr("else_branch"),
        ]
    return [_called(operation, function) for function in functions]


def _item(output: Any) -> Any:
    """Return the tensor that a loop's body puts into a list; None if it's no list."""
    if output.dtype != tf.variant:
        return None
    operation = output.op
    while operation.type in ALIASES:
        operation = operation.inputs[0].op
    if operation.type == "TensorListPushBack":
        return operation.inputs[1]
    if operation.type == "TensorListSetItem":
        return operation.inputs[2]
    return None


def _source(tensor: Any, carried: dict[str, Any]) -> Any:
    """Return the tensor whose memory this is, also that of the previous iteration."""
    seen = set()
    while tensor.name not in seen:
        seen.add(tensor.name)
        if tensor.name in carried:
            tensor = carried[tensor.name]
        elif tensor.op.type in ALIASES:
            tensor = tensor.op.inputs[0]
    return tensor if tensor.dtype.size else None


def _is_weight(tensor: Any, body: Any) -> bool:
    """Return whether a tensor is a variable's memory, or an input of the loop."""
    return tensor.op.type in ("Const", "Placeholder", "ReadVariableOp")
