"""The origin of a graph's tensors: the batch, only its shape, or neither.

Tensors are traced back to their first inputs, through function calls, branches and
what functions have captured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import auto_control_deps_utils

# Gradients of matrices as the rows that they are computed from.
#
# The gradient of a `Dense` kernel is one matrix product in a step's graph, of the
# layer's inputs and the gradients of its outputs; a layer that is called several times
# adds up several of them.


def factors_of(gradient: Any) -> tuple[Any, Any] | None:
    """Return two matrices whose product, of the first one transposed, is a gradient.

    Args:
        gradient: A tensor of shape `(m, n)`.

    Returns:
        Tensors of shapes `(rows, m)` and `(rows, n)` and the gradient's dtype. None if
        it isn't computed in that way, which a regularizer of the kernel, a table that
        is tied to it, and eager or compiled steps prevent.
    """
    if isinstance(gradient, tf.__internal__.EagerTensor) or gradient.shape.rank != 2:
        return None
    products = _products(gradient)
    if products is None:
        return None
    pairs = []
    for product in products:
        left, right = product.inputs
        if not product.get_attr("transpose_a"):
            left = tf.transpose(left)
        if product.get_attr("transpose_b"):
            right = tf.transpose(right)
        for factor, columns in zip((left, right), gradient.shape, strict=True):
            factor.set_shape([None, columns])
        pairs.append((tf.cast(left, gradient.dtype), tf.cast(right, gradient.dtype)))
    if len(pairs) == 1:
        return pairs[0]
    lefts, rights = zip(*pairs, strict=True)
    return tf.concat(lefts, 0), tf.concat(rights, 0)


def _products(tensor: Any) -> list[Any] | None:
    """Return the matrix products whose sum a tensor is; None if it's another one."""
    found: list[Any] = []
    waiting = [tensor]
    while waiting:
        operation = waiting.pop().op
        if operation.graph is not tensor.graph:
            return None
        if operation.type == "MatMul":
            found.append(operation)
        elif operation.type in ("Identity", "Cast", "AddN", "AddV2"):
            waiting += operation.inputs
        else:
            return None
    return found


# The uses of variables by the operations of a graph.


def reads_or_writes(
    graph: Any, operations: Sequence[Any], variables: Sequence[Any]
) -> tuple[bool, bool]:
    """Return whether operations read, or write, any of the variables.

    An operation that TensorFlow knows nothing about counts as writing.

    Args:
        graph: The graph of a function that is being traced.
        operations: Operations of it; those that call functions count for them.
        variables: TensorFlow's variables from outside of the function.
    """
    handles = {id(variable.handle) for variable in variables}
    inside = {id(inner) for outer, inner in graph.captures if id(outer) in handles}
    read = written = False
    for operation in operations:
        if not any(id(tensor) in inside for tensor in operation.inputs):
            continue
        found = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        read |= any(id(tensor) in inside for tensor in found[0])
        written |= any(id(tensor) in inside for tensor in found[1])
    return read, written


# Operations that keep a tensor's numbers and their order.
SAME_NUMBERS = (
    "Cast",
    "CheckNumerics",
    "EnsureShape",
    "ExpandDims",
    "Identity",
    "PreventGradient",
    "Reshape",
    "Snapshot",
    "Squeeze",
    "StopGradient",
)

# From neither the batch's values nor its shape: the same on all replicas.
FIXED = "fixed"
# From sizes that aren't known when the step is traced, but from no values.
SHAPES = "shapes"
# Possibly from the batch's values, random numbers, or something unknown.
DATA = "data"

# Operations that call functions.
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
IFS = ("If", "StatelessIf")
CASES = ("Case", "StatelessCase")
WHILES = ("StatelessWhile", "While")

_SIZES = ("Shape", "ShapeN", "Size")
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
# A tensor, and the calls through which it was reached: the calling operation, and the
# index of its input that is the function's first one.
_Place = tuple[Any, tuple[tuple[Any, int], ...]]


def origin_of(tensor: Any) -> str:
    """Return `FIXED`, `SHAPES` or `DATA`, for a tensor of the graph that is traced.

    Args:
        tensor: A tensor that isn't eager.
    """
    found = FIXED
    waiting: list[_Place] = [(tensor, ())]
    seen: set[Any] = set()
    while waiting:
        place = waiting.pop()
        key = (key_of(place[0]), tuple(id(call) for call, _ in place[1]))
        if key in seen:
            continue
        seen.add(key)
        known, more = _step(place, tensor.graph)
        if known == DATA:
            return DATA
        if known == SHAPES:
            found = SHAPES
        waiting += more
    return found


def _step(place: _Place, graph: Any) -> tuple[str, list[_Place]]:
    """Return what an operation adds to its result's origin, and inputs to trace."""
    tensor, calls = place
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return FIXED, []
    operation = tensor.op
    kind = operation.type
    if kind in ("Const", "Rank", "VariableShape"):
        return FIXED, []
    if kind == "Placeholder":
        outside = _outside(place)
        return (DATA, []) if outside is None else (FIXED, [outside])
    if kind in _READS:
        # Integers are counts and the like; some float variables differ between
        # replicas (statistics).
        same = tensor.dtype.is_integer
        return (FIXED if same else DATA), [(t, calls) for t in operation.inputs[1:]]
    if kind in _SIZES:
        of = operation.inputs[tensor.value_index if kind == "ShapeN" else 0]
        if of.shape.is_fully_defined():
            return FIXED, []
        return (DATA if calls or operation.graph is not graph else SHAPES), []
    if kind == "LookupTableFindV2":
        return FIXED, [(t, calls) for t in operation.inputs[1:]]
    inside = _inside(place)
    if inside:
        return FIXED, inside
    if operation.op_def.is_stateful or "Random" in kind:
        return DATA, []
    return FIXED, [(t, calls) for t in operation.inputs]


def _inside(place: _Place) -> list[_Place]:
    """Return what a called function, or each branch, returns as this tensor; or []."""
    tensor, calls = place
    operation = tensor.op
    if operation.type in CALLS:
        names, first = ["f"], 0
    elif operation.type in IFS:
        names, first = ["then_branch", "else_branch"], 1
    else:
        return []
    places: list[_Place] = []
    for name in names:
        function = operation.get_attr(name).name
        graph = function_graph(operation.graph, function)
        if graph is None:
            return []
        places.append((graph.outputs[tensor.value_index], (*calls, (operation, first))))
    return [*places, *((t, calls) for t in operation.inputs[:first])]


def _outside(place: _Place) -> _Place | None:
    """Return what a function was given as this placeholder; None if not known."""
    tensor, calls = place
    graph = tensor.graph
    if calls:
        operation, first = calls[-1]
        for number, given in enumerate(graph.inputs):
            if given.name == tensor.name:
                return operation.inputs[first + number], calls[:-1]
        return None
    outer = captured(tensor)
    return None if outer is None else (outer, ())


def called(tensor: Any) -> tuple[Any, list[tuple[Any, Any]]] | None:
    """Return the inner result of the function call that a tensor is an output of.

    Returns:
        The tensor of the function's graph, and each of its placeholders with the tensor
        that was passed for it; None if no function call returns the tensor.
    """
    if tensor.op.type not in CALLS:
        return None
    places = _inside((tensor, ()))
    if not places:
        return None
    result = places[0][0]
    return result, list(zip(result.graph.inputs, tensor.op.inputs, strict=True))


def behind(tensor: Any, before: Callable[[Any], Any | None]) -> Any:
    """Trace a tensor back, through functions too, as far as `before` goes on.

    Args:
        tensor: A tensor that isn't eager.
        before: Returns the input of an operation to continue with, or None to stop
            there.
    """
    place: _Place = (tensor, ())
    while True:
        tensor = place[0]
        if isinstance(tensor, tf.__internal__.EagerTensor):
            return tensor
        further = before(tensor.op)
        if further is not None:
            place = further, place[1]
            continue
        found = None
        if tensor.op.type == "Placeholder":
            found = _outside(place)
        elif tensor.op.type in CALLS:
            found = next(iter(_inside(place)), None)
        if found is None:
            return tensor
        place = found


def key_of(tensor: Any) -> Any:
    """Return a key of a tensor, which each Python object for it has alike."""
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return id(tensor)
    return id(tensor.graph), tensor.name


def reached(
    tensors: Sequence[Any], before: Callable[[Any], Sequence[Any]]
) -> Iterator[Any]:
    """Yield tensors, and those that `before` returns of each that is reached, once."""
    waiting, seen = list(tensors), set()
    while waiting:
        one = waiting.pop()
        key = key_of(one)
        if key not in seen:
            seen.add(key)
            yield one
            waiting += before(one)


def sources_of(tensor: Any) -> Sequence[Any]:
    """Return what a tensor is computed from, for `reached`: also outside of functions.

    Nothing for an eager tensor.
    """
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return ()
    outside = captured(tensor)
    return list(tensor.op.inputs) if outside is None else [outside]


def constant(tensor: Any) -> Any | None:
    """Return a tensor's value, an array, if it's known while tracing; else None."""
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return tensor.numpy()
    return pywrap_tf_session.TF_TryEvaluateConstant_wrapper(
        tensor.graph._c_graph, tensor._as_tf_output()
    )


def functions_of(operation: Any) -> Iterator[str]:
    """Yield the names of the functions that an operation calls, also of branches."""
    if operation.type in ("Const", "Placeholder"):
        return
    for attribute in operation.node_def.attr.values():
        if attribute.HasField("func"):
            yield attribute.func.name
        for each in attribute.list.func:
            yield each.name


def function_graph(graph: Any, name: str) -> Any:
    """Return the graph of a function that a graph's operations call; or None."""
    return getattr(graph._get_function(name), "graph", None)


def captured(tensor: Any) -> Any | None:
    """Return the outer tensor that a placeholder was captured for; else None."""
    if tensor.op.type != "Placeholder":
        return None
    captures = getattr(tensor.graph, "captures", ())
    found, count = _captured.get(tensor.graph, ({}, 0))
    if count != len(captures):
        found = {inner.name: outer for outer, inner in captures}
        _captured[tensor.graph] = found, len(captures)
    return found.get(tensor.name)


# By graph, since a graph may have many: the outer tensors by name, and their number.
_captured: weakref.WeakKeyDictionary[Any, tuple[dict[str, Any], int]] = (
    weakref.WeakKeyDictionary()
)


def outermost(tensor: Any) -> Any:
    """Return the tensor that a placeholder was captured for, through all functions."""
    return behind(tensor, lambda _: None)


def copied(operation: Any, inputs: Sequence[Any], graph: Any = None) -> Sequence[Any]:
    """Copy an operation, with other inputs.

    Args:
        operation: An operation of a graph.
        inputs: A tensor for each of its inputs.
        graph: The graph of the copy; by default the same one.

    Returns:
        The outputs of the copy.

    Raises:
        ValueError: The operation doesn't accept these inputs.
    """
    copy = (graph or operation.graph)._create_op_internal(
        operation.type,
        list(inputs),
        [output.dtype for output in operation.outputs],
        attrs={
            name: value
            for name, value in operation.node_def.attr.items()
            if not name.startswith("_")
        },
        op_def=operation.op_def,
    )
    return list(copy.outputs)


class RebuiltGraph:
    """A copy of a graph's operations, in a graph of its own, for another batch size.

    It never runs: it serves to find the shapes that TensorFlow infers.

    Args:
        rows: The first dimension of the graph's inputs, where that is `known` or
            unknown.
        length: Their other unknown dimensions.
        known: Number of rows of the batch, if that is known in the graph.
        guess: Whether results of functions and loops count as inputs, too. Otherwise
            only what the graph knows of their shapes is used.
    """

    def __init__(
        self,
        rows: int,
        length: int = 11,
        known: int | None = None,
        *,
        guess: bool = False,
    ) -> None:
        self._sizes = rows, length, known
        self._guess = guess
        self._graph = tf.Graph()
        self._made: dict[str, Any] = {}

    def tensor(self, target: Any) -> Any:
        """Return the copy of `target`, a tensor of the original graph."""
        with self._graph.as_default():
            for operation in in_order(target, lambda each: each.name in self._made):
                for before, after in zip(
                    operation.outputs, self._copy(operation), strict=True
                ):
                    self._made.setdefault(before.name, after)
        return self._made[target.name]

    def give(self, tensor: Any) -> None:
        """Treat a tensor as an input, with the rows first."""
        with self._graph.as_default():
            self._made[tensor.name] = self._given(tensor)

    def inside(self, given: Sequence[tuple[Any, Any]]) -> RebuiltGraph:
        """Return the same for a function's graph, with the inputs of `called`."""
        rows, length, known = self._sizes
        inner = RebuiltGraph(rows, length, known, guess=self._guess)
        for placeholder, outer in given:
            shape = self.tensor(outer).shape
            with inner._graph.as_default():
                made = tf.raw_ops.Placeholder(dtype=outer.dtype, shape=shape)
            inner._made[placeholder.name] = made
        return inner

    def _copy(self, operation: Any) -> Sequence[Any]:
        kind = operation.type
        outputs = operation.outputs
        if kind in ("Placeholder", "IteratorGetNext"):
            return [self._given(output) for output in outputs]
        if kind == "ReadVariableOp":
            (read,) = outputs
            if read.dtype.is_integer and read.shape.is_fully_defined():
                return [tf.ones(read.shape, read.dtype)]
        elif kind in IFS:
            # A branch returns a batch as it is, or, on a replica without one, a
            # made-up batch.
            passed = [_passed_through(output) for output in outputs]
            return [
                self._returned(output) if given is None else self._made[given.name]
                for output, given in zip(outputs, passed, strict=True)
            ]
        elif kind in ("TensorListStack", *WHILES, *CALLS):
            return [self._returned(output) for output in outputs]
        elif not operation.op_def.is_stateful or "Random" in kind:
            given = [self._made[tensor.name] for tensor in operation.inputs]
            try:
                return copied(operation, given, self._graph)
            except (ValueError, TypeError, tf.errors.OpError):
                # The sizes don't fit, because the script has one as a constant.
                return [self._returned(output, fold=True) for output in outputs]
        return [_unknown(output) for output in outputs]

    def _returned(self, tensor: Any, *, fold: bool = False) -> Any:
        return self._given(tensor, fold=fold) if self._guess else _unknown(tensor)

    def _given(self, tensor: Any, *, fold: bool = False) -> Any:
        """Return an input with the rows first, or, if `fold`, a multiple of them."""
        rows, length, known = self._sizes
        shape = tensor.shape
        # A loop's stacked results have the steps first.
        axis = int(tensor.op.type == "TensorListStack")
        if (shape.rank or 0) > axis and not isinstance(
            captured(tensor), tf.__internal__.EagerTensor
        ):
            sizes = [length if size is None else size for size in shape.as_list()]
            size = shape[axis]
            if size is None or size == known:
                sizes[axis] = rows
            elif fold and known and size % known == 0:
                sizes[axis] = size // known * rows
            shape = sizes
        return tf.raw_ops.Placeholder(dtype=tensor.dtype, shape=shape)


def _unknown(tensor: Any) -> Any:
    return tf.raw_ops.Placeholder(dtype=tensor.dtype, shape=tensor.shape)


def _passed_through(output: Any) -> Any | None:
    """Return the input that an operation's first branch returns unchanged; or None."""
    inside = _inside((output, ()))
    place = inside[0] if inside else None
    while place is not None and place[1]:
        operation = place[0].op
        if operation.type == "Identity":
            place = operation.inputs[0], place[1]
        else:
            place = _outside(place) if operation.type == "Placeholder" else None
    return None if place is None else place[0]


def in_order(target: Any, ends: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the operations that a tensor is made by, each after those that it needs.

    Args:
        target: The tensor.
        ends: Whether what a tensor is made by isn't needed. Of an operation one result
            may end there, and another one not.
    """
    waiting = [(target, False)]
    seen: set[str] = set()
    while waiting:
        tensor, ready = waiting.pop()
        operation = tensor.op
        if ready:
            yield operation
        elif not ends(tensor) and operation.name not in seen:
            seen.add(operation.name)
            waiting.append((tensor, True))
            waiting += [(given, False) for given in operation.inputs]
