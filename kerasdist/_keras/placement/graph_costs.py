"""Costs of a training step's graph: memory of its tensors, arithmetic operations.

TensorFlow runs each operation as soon as its inputs are available. So a step's graph is
processed in two parts, each in the order of creation: *early*, the operations that
don't need the gradient of the loss (the forward pass, and operations created for the
backward pass that don't depend on it, such as `x - mean` of a normalization), and
*late*, the rest. A tensor is alive from the operation that produces it to the last one
that reads it. A tensor produced early and read late is *saved*; all others are
*transient*. Tensors that share memory count once. Weights and their gradients don't
count at all: they are counted as such elsewhere.

Arithmetic operations, and bytes of results, are computed from the shapes in the graph,
for any layer made of these operations:

    products          MatMul, BatchMatMul, Einsum: 2 per multiplication and addition
    convolutions      1, 2 and 3 dimensions, depthwise, transposed
    loops             the loop's body times the number of iterations (RNNs)
    functions         the operations of the called function
    everything else   one per element of the result (activations, sums, look-ups, ...)
    renaming          none: Reshape, Identity and the like don't touch the elements
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._tf import tensor_origins
from kerasdist._tf.tensor_origins import WHILES, function_graph, reached
from kerasdist.placement.partition import LayerCost, TensorCost

# Kinds of operations.

# Their output is their first input's memory.
_ALIASES = frozenset(
    ["ExpandDims", "Identity", "PreventGradient", "Reshape", "Squeeze", "StopGradient"]
)
_FREE = re.compile(
    "Const|IdentityN|NoOp|Pack|Placeholder|ReadVariableOp|Shape|StridedSlice|"
    "VarHandleOp"
)
_PRODUCTS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "_FusedMatMul"}
_CONVOLUTIONS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative", "Conv"}
_TRANSPOSED = {
    "Conv2DBackpropInput",
    "Conv3DBackpropInputV2",
    "DepthwiseConv2dNativeBackpropInput",
}
_CALLS = {*tensor_origins.CALLS, *tensor_origins.CASES, *tensor_origins.IFS}
# They add an item to a list; from each to the number of the input that is the item.
_LIST_ITEM = {"TensorListPushBack": 1, "TensorListSetItem": 2}
# They read a shape, not the elements: TensorFlow replaces them by constants.
_SHAPES_ONLY = {"BroadcastGradientArgs", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"}
# They may write into the memory of an input that no other operation needs.
_IN_PLACE = re.compile(
    "Abs|Add(N|V2)?|BiasAdd|Cast|Erf|Exp|Log|Maximum|Minimum|Mul|Neg|Pow|RealDiv|"
    "SelectV2|Softmax|Square|SquaredDifference|Sub|"
    "(Elu|Gelu|LeakyRelu|Relu|Relu6|Rsqrt|Selu|Sigmoid|Softplus|Sqrt|Tanh)(Grad)?"
)
# Weights in a graph, and what it is given.
_WEIGHTS = {"Const", "Placeholder", "ReadVariableOp"}
_RANDOM = ("Random", "Stateless")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A step's graph.

    Attributes:
        made: Its operations in the order of creation.
        forward: How many of them belong to the forward pass.
        data: The tensors of a batch.
        outputs: The results of the forward pass.
        seeds: Their gradients, from which the backward pass begins.
        gradients: The results of the backward pass.
        unit_of: From an operation's name to the number of its layer.
        rows: Rows of the batch.
    """

    made: Sequence[Any]
    forward: int
    data: Sequence[Any]
    outputs: Sequence[Any]
    seeds: Sequence[Any]
    gradients: Sequence[Any]
    unit_of: Callable[[str], int | None]
    rows: int


@dataclasses.dataclass(eq=False)
class _Memory:
    """The memory of a tensor, and of those that share it.

    Attributes:
        size: Bytes; 0 if it isn't data, or is a weight.
        made: The position of the operation that makes it.
        read: The position of the last one that reads it; -1: none does.
        unit: The number of the layer that makes it.
        is_batch: Whether it's a part of the batch.
        by_rows: Whether its size depends on the number of rows.
        is_gradient: Whether it's a weight's gradient, or a part of the sum that is.
    """

    size: int
    made: int
    read: int = -1
    unit: int = 0
    is_batch: bool = False
    by_rows: bool = False
    is_gradient: bool = False


@dataclasses.dataclass(frozen=True)
class _Node:
    """An operation of a step.

    Attributes:
        index: Its place in the order of creation.
        op: The operation.
        inputs: The memory that it reads.
        outputs: The memory of its results.
    """

    index: int
    op: Any
    inputs: list[_Memory]
    outputs: list[_Memory]


def measure(
    step: Traced, units: Sequence[LayerCost]
) -> tuple[list[TensorCost], dict[str, int]]:
    """Add the memory and work of a step to its layers.

    Args:
        step: The step.
        units: The layers by number; one may have several numbers.

    Returns:
        The tensors of the forward pass that pass from one layer to others, by number;
        and the index of the first operation of each layer that has some, by its path.
    """
    order, border = _order(step)
    tensors = _memory(step, [step.made[i] for i in order])
    nodes = [
        _Node(
            index=i,
            op=step.made[i],
            inputs=[tensors[tensor.name] for tensor in step.made[i].inputs],
            outputs=[tensors[tensor.name] for tensor in step.made[i].outputs],
        )
        for i in order
    ]
    _find_lifetimes(nodes)
    for tensor in step.outputs:
        # The loss reads them.
        tensors[tensor.name].read = max(tensors[tensor.name].read, border)
    _mark_gradients([tensors[tensor.name] for tensor in step.gradients], nodes, border)
    every = [one for one in dict.fromkeys(tensors.values()) if not one.is_batch]
    saved = {one for one in every if one.made < border <= one.read}
    transient = {one for one in every if one not in saved and not one.is_gradient}
    ending = [0] * len(nodes)
    for one in transient:
        if one.read >= 0:
            ending[one.read] += one.size

    live = number = 0
    readers: dict[_Memory, set[int]] = {}
    first: dict[str, int] = {}
    for place, node in enumerate(nodes):
        given = step.unit_of(node.op.name)
        if given is None:
            # Between layers: that of its largest input.
            sources = [
                (one.size, one.unit)
                for one in node.inputs
                if one.by_rows and not one.is_batch
            ]
            given = max(sources)[1] if sources else number
        number = given
        unit = units[number]
        first.setdefault(unit.path, node.index)
        if node.index < step.forward:
            unit.row_flops += _flops(node.op)
            for one in node.inputs:
                if one.by_rows and one.size:
                    readers.setdefault(one, set()).add(number)
        mine = {one for one in node.outputs if one.made == place}
        for one in mine:
            one.unit = number
        new = sum(one.size for one in mine & transient)
        unread = sum(one.size for one in mine & transient if one.read < 0)
        taken = min(new, ending[place]) if _IN_PLACE.fullmatch(node.op.type) else 0
        unit.transient_row_bytes = max(unit.transient_row_bytes, live + new - taken)
        live += new - ending[place] - unread
    for one in saved:
        if one.by_rows:
            units[one.unit].saved_row_bytes += one.size
        else:
            units[one.unit].saved_bytes += one.size
    passing = []
    for one, numbers in readers.items():
        source = -1 if one.is_batch else one.unit
        if others := tuple(sorted(numbers - {source})):
            size = one.size / step.rows
            passing.append(TensorCost(source=source, consumers=others, row_bytes=size))
            if source >= 0:
                units[source].output_row_bytes += one.size
    for unit in {unit.path: unit for unit in units}.values():
        # They were added up for the whole batch.
        unit.saved_row_bytes /= step.rows
        unit.transient_row_bytes /= step.rows
        unit.output_row_bytes /= step.rows
        unit.row_flops /= step.rows
    return passing, first


def _order(step: Traced) -> tuple[list[int], int]:
    """Return what a step runs, in order, and the position at which *late* begins."""
    ends = (*step.outputs, *step.gradients)
    needed = {each.op.name for each in reached(ends, lambda each: each.op.inputs)}
    late = {tensor.op.name for tensor in step.seeds}
    parts: tuple[list[int], list[int]] = [], []
    for i, op in enumerate(step.made):
        if op.name in needed:
            if any(tensor.op.name in late for tensor in op.inputs):
                late.add(op.name)
            parts[op.name in late].append(i)
    return parts[0] + parts[1], len(parts[0])


def _memory(step: Traced, made: Sequence[Any]) -> dict[str, _Memory]:
    """Return the memory of each tensor, by name."""
    batch = {tensor.name for tensor in step.data}
    seeds = {tensor.name for tensor in step.seeds}
    found: dict[str, _Memory] = {}
    for place, op in enumerate(made):
        lists = _loop_lists(op) if op.type in WHILES else {}
        for index, output in enumerate(op.outputs):
            name = key = output.name
            if op.type in _ALIASES:
                found[name] = found[op.inputs[0].name]
                continue
            size = _tf.bytes_of(output)
            if index in lists:
                # Lists of one tensor share its memory.
                inner, size = lists[index]
                key = f"{op.name}/{inner}"
            elif op.type == "TensorListFromTensor":
                size = _tf.bytes_of(op.inputs[0])
            elif op.type in _WEIGHTS and name not in batch and name not in seeds:
                size = 0
            new = _Memory(size, place, is_batch=name in batch, by_rows=name in batch)
            found[name] = found.setdefault(key, new)
    return found


def _find_lifetimes(nodes: Sequence[_Node]) -> None:
    """Find what depends on the number of rows, and the last operation that reads it."""
    for place, node in enumerate(nodes):
        kind = node.op.type
        if kind.startswith(_RANDOM) or any(one.by_rows for one in node.inputs):
            for one in node.outputs:
                one.by_rows = True
        if kind not in _SHAPES_ONLY:
            for one in node.inputs:
                one.read = place


def _mark_gradients(
    gradients: list[_Memory], nodes: Sequence[_Node], border: int
) -> None:
    """Mark the gradients of weights, and the parts of those that are sums."""
    while gradients:
        one = gradients.pop()
        if not one.is_gradient and one.made >= border:
            one.is_gradient = True
            if nodes[one.made].op.type in ("AddN", "AddV2"):
                gradients += nodes[one.made].inputs


def _elements(tensor: Any) -> int:
    return tensor.shape.num_elements() or 0


def _flops(op: Any) -> float:
    """Return the number of arithmetic operations of one operation of a graph."""
    kind = op.type
    if kind in _ALIASES or _FREE.fullmatch(kind):
        return 0.0
    if kind in _PRODUCTS:
        turned = op.get_attr("adj_x" if kind.startswith("Batch") else "transpose_a")
        inner = op.inputs[0].shape[-2 if turned else -1]
        return 2.0 * _elements(op.outputs[0]) * (inner or 1)
    if kind == "Einsum":
        return _einsum_flops(op)
    if kind in _CONVOLUTIONS or kind in _TRANSPOSED:
        # Each element of the larger side times a channel's weights.
        side = op.inputs[2] if kind in _TRANSPOSED else op.outputs[0]
        kernel = op.inputs[1].shape.as_list()
        if None in kernel:
            return 0.0
        channels = kernel[-1] * (kernel[-2] if kind.startswith("Depthwise") else 1)
        return 2.0 * _elements(side) * math.prod(kernel) / max(channels, 1)
    if kind in WHILES:
        return _loop_steps(op) * _function_flops(op, op.get_attr("body").name)
    if kind in _CALLS:
        # Of branches the one with the most.
        flops = (_function_flops(op, name) for name in tensor_origins.functions_of(op))
        return max(flops, default=0.0)
    return float(sum(map(_elements, op.outputs)))


def _function_flops(op: Any, name: str) -> float:
    graph = function_graph(op.graph, name)
    return 0.0 if graph is None else sum(map(_flops, graph.get_operations()))


def _einsum_flops(op: Any) -> float:
    terms = op.get_attr("equation").decode().partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, op.inputs, strict=True):
        # An ellipsis is counted as one dimension.
        before, dots, after = term.strip().partition("...")
        shape = [size or 1 for size in tensor.shape]
        sizes.update(zip(before, shape, strict=False))
        end = len(shape) - len(after)
        sizes.update(zip(after, shape[end:], strict=True))
        if dots:
            middle = math.prod(shape[len(before) : end])
            sizes["..."] = max(sizes.get("...", 1), middle)
    return 2.0 * math.prod(sizes.values())


def _loop_steps(loop: Any) -> int:
    """Return how often a loop runs, at most; 1 if that isn't known."""
    # The first inputs of a loop are its counter and its bound.
    tensor = loop.inputs[1]
    while tensor.op.type in ("Identity", "Max"):
        tensor = tensor.op.inputs[0]
    bound = tf.get_static_value(tensor)
    if bound is not None and np.ndim(bound) == 0 and bound > 0:
        return int(bound)
    # Else the length of the inputs that it reads step by step.
    lists = [t.op for t in loop.inputs if t.op.type == "TensorListFromTensor"]
    return max((one.inputs[0].shape[0] or 1 for one in lists), default=1)


def _loop_lists(loop: Any) -> dict[int, tuple[str, int]]:
    """Return the contents of the lists that a loop fills, its non-tensor outputs.

    Returns:
        From the index of an output to the name of the tensor in the loop's body that
        each iteration puts into the list, and the bytes of the full list. Lists of one
        tensor share its memory. Lists of anything but data are left out.
    """
    body = function_graph(loop.graph, loop.get_attr("body").name)
    if body is None:
        return {}
    count = _loop_steps(loop)
    carried = {
        given.name: made for given, made in zip(body.inputs, body.outputs, strict=True)
    }
    found = {}
    for index, output in enumerate(body.outputs):
        op = output.op
        while op.type in _ALIASES:
            op = op.inputs[0].op
        if output.dtype != tf.variant or op.type not in _LIST_ITEM:
            continue
        # The item's memory may be that of another tensor, or of the iteration before.
        item, seen = op.inputs[_LIST_ITEM[op.type]], set()
        while item.name not in seen:
            seen.add(item.name)
            if item.name in carried:
                item = carried[item.name]
            elif item.op.type in _ALIASES:
                item = item.op.inputs[0]
        if item.dtype.size and item.op.type not in _WEIGHTS:
            found[index] = item.name, count * _tf.bytes_of(item)
    return found
