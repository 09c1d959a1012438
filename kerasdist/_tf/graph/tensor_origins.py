"""What tensors of a graph are made from: of the batch, of its shape, or of neither.

Tensors are followed back to where they begin, through what functions call, branches and
what a function has captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session

from kerasdist import _tf

__all__ = [
    "DATA",
    "FIXED",
    "SHAPES",
    "MadeAgain",
    "behind",
    "called",
    "captured",
    "constant",
    "copied",
    "origin_of",
]

# Neither the batch's values nor its shape: the same on all replicas.
FIXED = "fixed"
# Sizes of what isn't known when the step is traced, and no values.
SHAPES = "shapes"
# Perhaps of the batch's values, or of random numbers, or of what isn't known.
DATA = "data"

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_BRANCHES = ("If", "StatelessIf")
_LOOPS = ("StatelessWhile", "TensorListStack", "While")
_SIZES = ("Shape", "ShapeN", "Size")
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
# A tensor, and through which calls it was come by: an operation, and which of its
# inputs is the first one of the function.
_Place = tuple[Any, tuple[tuple[Any, int], ...]]


def origin_of(tensor: Any) -> str:
    """Return `FIXED`, `SHAPES` or `DATA`, for a tensor of the graph that is traced.

    Args:
        tensor: One that isn't eager.
    """
    found = FIXED
    waiting: list[_Place] = [(tensor, ())]
    seen: set[Any] = set()
    while waiting:
        place = waiting.pop()
        key = (_key(place[0]), tuple(id(call) for call, _ in place[1]))
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
    """What one operation adds to the origin of its result, and what is before it."""
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
        # Numbers of rows, say; of floats some differ between replicas (statistics).
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
    """What a called function, or a branch, returns as this tensor; else nothing."""
    tensor, calls = place
    operation = tensor.op
    if operation.type in _CALLS:
        names, first = ["f"], 0
    elif operation.type in _BRANCHES:
        names, first = ["then_branch", "else_branch"], 1
    else:
        return []
    places: list[_Place] = []
    for name in names:
        function = operation.get_attr(name).name
        graph = _tf.function_graph(operation.graph, function)
        if graph is None:
            return []
        places.append((graph.outputs[tensor.value_index], (*calls, (operation, first))))
    return [*places, *((t, calls) for t in operation.inputs[:first])]


def _outside(place: _Place) -> _Place | None:
    """What a function was given as this placeholder; None if nobody knows."""
    tensor, calls = place
    graph = tensor.graph
    if calls:
        operation, first = calls[-1]
        for number, given in enumerate(graph.inputs):
            if given.name == tensor.name:
                return operation.inputs[first + number], calls[:-1]
        return None
    for outer, inner in getattr(graph, "captures", ()):
        if inner.name == tensor.name:
            return outer, ()
    return None


def called(tensor: Any) -> tuple[Any, list[tuple[Any, Any]]] | None:
    """What a called function returns as this tensor, and what it was given.

    Returns:
        A tensor of the function's graph, and each of its placeholders with what it
        stands for; None if the tensor isn't a function's.
    """
    if tensor.op.type not in _CALLS:
        return None
    places = _inside((tensor, ()))
    if not places:
        return None
    result = places[0][0]
    return result, list(zip(result.graph.inputs, tensor.op.inputs, strict=True))


def behind(tensor: Any, before: Callable[[Any], Any | None]) -> Any:
    """Return the first tensor that nothing is before, through functions too.

    Args:
        tensor: One that isn't eager.
        before: Which tensor to go on with before an operation; None: with none.
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
        elif tensor.op.type in _CALLS:
            found = next(iter(_inside(place)), None)
        if found is None:
            return tensor
        place = found


def _key(tensor: Any) -> Any:
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return id(tensor)
    return id(tensor.graph), tensor.name


def constant(tensor: Any) -> Any | None:
    """The value of a tensor if it's known when a graph is made: an array, or None."""
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return tensor.numpy()
    return pywrap_tf_session.TF_TryEvaluateConstant_wrapper(
        tensor.graph._c_graph, tensor._as_tf_output()
    )


def captured(tensor: Any) -> Any | None:
    """What a placeholder of a function stands for that it has captured; else None."""
    found = None
    if tensor.op.type == "Placeholder":
        found = _outside((tensor, ()))
    return None if found is None else found[0]


def copied(operation: Any, inputs: Sequence[Any], graph: Any = None) -> Sequence[Any]:
    """Make an operation once more, of other inputs.

    Args:
        operation: One of a graph.
        inputs: A tensor for each of its inputs.
        graph: Where; by default in the same graph.

    Returns:
        What the copy returns.

    Raises:
        ValueError: It doesn't take these inputs.
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


class MadeAgain:
    """Operations of a graph made again, in a graph of their own, for another batch.

    Nothing runs there: it's for the shapes that TensorFlow finds.

    Args:
        rows: The first dimension of what the graph is given, where it's `known` or
            isn't known.
        length: Its other dimensions that aren't known.
        known: Number of rows of the batch, if that is known in the graph.
        guess: Whether what functions and loops return counts as given, too. Otherwise
            nothing is known of its shape beside what is known in the graph.
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
        """The tensor that is made as `target` is, of the graph that is traced."""
        with self._graph.as_default():
            for operation in _in_order(target, self._made):
                for before, after in zip(
                    operation.outputs, self._copy(operation), strict=True
                ):
                    self._made[before.name] = after
        return self._made[target.name]

    def give(self, tensor: Any) -> None:
        """Count a tensor as given, with the rows first."""
        with self._graph.as_default():
            self._made[tensor.name] = self._given(tensor)

    def inside(self, given: Sequence[tuple[Any, Any]]) -> MadeAgain:
        """The same for a function's graph, by what `called` says that it's given."""
        rows, length, known = self._sizes
        again = MadeAgain(rows, length, known, guess=self._guess)
        for placeholder, outer in given:
            shape = self.tensor(outer).shape
            with again._graph.as_default():
                made = tf.raw_ops.Placeholder(dtype=outer.dtype, shape=shape)
            again._made[placeholder.name] = made
        return again

    def _copy(self, operation: Any) -> Sequence[Any]:
        kind = operation.type
        outputs = operation.outputs
        if kind in ("Placeholder", "IteratorGetNext"):
            return [self._given(output) for output in outputs]
        if kind == "ReadVariableOp":
            (read,) = outputs
            if read.dtype.is_integer and read.shape.is_fully_defined():
                return [tf.ones(read.shape, read.dtype)]
        elif kind in _BRANCHES:
            # A batch is what it was, or, where a replica has none, one made up.
            passed = [_passed_through(output) for output in outputs]
            return [
                self._returned(output) if given is None else self._made[given.name]
                for output, given in zip(outputs, passed, strict=True)
            ]
        elif kind in _LOOPS or kind in _CALLS:
            return [self._returned(output) for output in outputs]
        elif not operation.op_def.is_stateful or "Random" in kind:
            given = [self._made[tensor.name] for tensor in operation.inputs]
            try:
                return copied(operation, given, self._graph)
            except (ValueError, TypeError, tf.errors.OpError):
                # Sizes that don't fit, for the script has one as a number.
                return [self._returned(output, fold=True) for output in outputs]
        return [_unknown(output) for output in outputs]

    def _returned(self, tensor: Any, *, fold: bool = False) -> Any:
        return self._given(tensor, fold=fold) if self._guess else _unknown(tensor)

    def _given(self, tensor: Any, *, fold: bool = False) -> Any:
        """A tensor with the rows first, or, if `fold`, with so many for each row."""
        rows, length, known = self._sizes
        shape = tensor.shape
        # Of what a loop has stacked the steps are first.
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
    """Which input of an operation its first branch returns as it is; None: none."""
    inside = _inside((output, ()))
    place = inside[0] if inside else None
    while place is not None and place[1]:
        operation = place[0].op
        if operation.type == "Identity":
            place = operation.inputs[0], place[1]
        else:
            place = _outside(place) if operation.type == "Placeholder" else None
    return None if place is None else place[0]


def _in_order(target: Any, made: Mapping[str, Any]) -> Iterator[Any]:
    """All operations that a tensor needs, each after those that it needs."""
    waiting = [(target.op, False)]
    seen: set[str] = set()
    while waiting:
        operation, ready = waiting.pop()
        if ready:
            yield operation
        elif operation.name not in seen and any(
            output.name not in made for output in operation.outputs
        ):
            seen.add(operation.name)
            waiting.append((operation, True))
            waiting += [(tensor.op, False) for tensor in operation.inputs]
