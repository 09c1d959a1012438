"""Losses that a script reduces itself, as functions of means and sums over rows.

Replicas' gradients are weighted by their shares s = n / N of the rows, which is right
for a mean over rows. The kind of a step's number is read from the graph that computes
it. The tensors with one number per row are found by rebuilding the graph for batches
of 5 and of 7 rows; a reduction of such a tensor is n ** d times a mean:

    Kind(0)         a mean over rows; also a sum divided by their number
    Kind(1)         a sum over rows, perhaps times a constant
    Kind(d, True)   n ** d times a constant: `CONSTANT` is Kind(0, True), and the number
                    of rows Kind(1, True)
    ROWS            not reduced yet
    OTHER           a function of several, such as the root of a mean or a masked mean
                    sum(l * m) / sum(m); or not recognized: the largest of the rows, a
                    mean of some of them, a number of pairs of rows

    Extreme("max")  the largest of the rows, or the smallest

A function of reduced numbers is computed from those of all replicas: of a loss with its
slopes (`whole`), of any other tensor without rows as it is (`of_all`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from kerasdist._tf import tensor_origins
from kerasdist._tf.tensor_origins import key_of, reached


class Kind(NamedTuple):
    """A number: n ** degree times a mean over the n rows, or times a constant.

    Attributes:
        degree: 0 for a mean, 1 for a sum.
        counted: Whether it is n ** degree times a constant.
    """

    degree: int
    counted: bool = False


class Extreme(NamedTuple):
    """The largest or the smallest of the rows: `op` is "max" or "min"."""

    op: str


ROWS = "rows"
OTHER = "other"
CONSTANT = Kind(0, counted=True)

_SAME = (*tensor_origins.SAME_NUMBERS, "IdentityN", "Neg", "Transpose")
_SUMS = ("Add", "AddN", "AddV2", "ConcatV2", "Pack", "Sub")
_PRODUCTS = ("Mul", "MulNoNan")
_QUOTIENTS = ("Div", "DivNoNan", "RealDiv")
# Sums over rows, if the result has none: of products, and by an index or of squares.
_CONTRACTIONS = ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul")
_COUNTS = ("Bincount", "DenseBincount", "L2Loss", "ScatterNd", "UnsortedSegmentSum")
_EXTREMES = {"Max": Extreme("max"), "Min": Extreme("min")}
_SIZES = ("GatherV2", "Prod", "Size", "StridedSlice")


class Whole(NamedTuple):
    """A number of the global batch, and its dependence on a replica's numbers.

    Attributes:
        value: The number: a scalar tensor, the same on all replicas.
        terms: The reduced numbers of this replica's step that it's computed from.
        slopes: Its derivative with respect to each of them.
        degrees: The degrees of their kinds.
    """

    value: Any
    terms: list[Any]
    slopes: list[Any]
    degrees: list[int]


class LossKinds:
    """The kinds of the tensors of a step that is being traced.

    Args:
        rows: The replica's number of rows, a scalar integer tensor.
        summed: TensorFlow's variables whose values are summed over the replicas.
        counting: Whether a constant that is the number of rows stands for it: where a
            batch's shape is known, the graph has it as a constant.
    """

    def __init__(
        self, rows: Any, summed: Sequence[Any] = (), *, counting: bool = False
    ) -> None:
        self._rows = rows
        self._summed = {id(variable.handle) for variable in summed}
        known = tf.get_static_value(rows) if counting else None
        self._known = int(known) if known is not None and known > 1 else None
        self._kinds: dict[Any, Any] = {}
        self._wholes: dict[Any, Whole | None] = {}
        self._graph: Any = None
        self._rebuilt: list[tensor_origins.RebuiltGraph] = []

    def set_mean(self, tensor: Any) -> None:
        """Declare a number as a mean over rows: it was corrected already."""
        if tf.is_tensor(tensor) and not _is_eager(tensor):
            self._kinds[key_of(tensor)] = Kind(0)

    def set_constant(self, tensor: Any) -> None:
        """Declare a tensor as the same on all replicas."""
        if isinstance(tensor, tf.Tensor) and not _is_eager(tensor):
            self._kinds[key_of(tensor)] = CONSTANT

    def set_rows(self, tensor: Any) -> None:
        """Declare a tensor as one with the batch's rows, whatever its origin."""
        if isinstance(tensor, tf.Tensor) and not _is_eager(tensor):
            self._kinds[key_of(tensor)] = ROWS
            for rebuilt in self._for(tensor.graph):
                rebuilt.give(tensor)

    def of(self, tensor: Any) -> Any:
        """Return a `Kind`, `ROWS` or `OTHER`; of an eager tensor no `Kind`."""
        if _is_eager(tensor):
            rank = tensor.shape.rank
            return ROWS if rank and tensor.shape[0] == int(self._rows) else OTHER
        # Not by recursion alone: a loop may add up hundreds of numbers.
        for one in reversed([*reached([tensor], self._unknown_numbers)]):
            key = key_of(one)
            if key not in self._kinds:
                self._kinds[key] = OTHER  # in case it depends on itself, in a loop
                self._kinds[key] = self._find(one)
        return self._kinds[key_of(tensor)]

    def _unknown_numbers(self, tensor: Any) -> list[Any]:
        if key_of(tensor) in self._kinds:
            return []
        return [given for given in tensor.op.inputs if given.shape.rank == 0]

    def whole(
        self, tensor: Any, sums: Callable[[list[Any], list[int]], list[Any]]
    ) -> Whole | None:
        """Compute a function of several reduced numbers from those of all replicas.

        Args:
            tensor: A scalar of the kind `OTHER`.
            sums: Computes the numbers of the global batch from those of this replica
                and their degrees. It may communicate.

        Returns:
            None if it isn't such a function. A second call returns the same.
        """
        if _is_eager(tensor) or tensor.shape.rank != 0:
            return None
        key = key_of(tensor)
        if key not in self._wholes:
            self._wholes[key] = self._compute(tensor, sums)
        return self._wholes[key]

    def known_whole(self, tensor: Any) -> Whole | None:
        """Return the result of an earlier call of `whole`; None if there was none."""
        return None if _is_eager(tensor) else self._wholes.get(key_of(tensor))

    def is_function(self, tensor: Any) -> bool:
        """Return whether a scalar is a function of reduced numbers, see `whole`."""
        return self._function(tensor) is not None

    def of_all(
        self, tensor: Any, reduce: Callable[[list[Any], list[Any]], list[Any]]
    ) -> Any | None:
        """Compute a function of reduced numbers or extremes from those of all replicas.

        Args:
            tensor: A tensor of any shape.
            reduce: Reduces numbers, given with their kinds. It may communicate.

        Returns:
            The function's value for the global batch; None if the tensor isn't such a
            function.
        """
        if _is_eager(tensor):
            return None
        found = self._function(tensor, of_all=True)
        if found is None:
            return None
        operations, terms = found
        given = self._reduced(terms, reduce)
        return _with(operations, given)[key_of(tensor)]

    def _compute(self, tensor: Any, sums: Any) -> Whole | None:
        found = self._function(tensor)
        if found is None:
            return None
        operations, terms = found
        given = self._reduced(
            terms, lambda some, kinds: sums(some, [kind.degree for kind in kinds])
        )
        floats = [term for term in terms if term.dtype.is_floating]
        # Copies, because one term may be computed from another one.
        copies = [tf.stop_gradient(tf.identity(given[key_of(t)])) for t in floats]
        given |= zip(map(key_of, floats), copies, strict=True)
        value = _with(operations, given)[key_of(tensor)]
        slopes = tf.gradients(value, copies, unconnected_gradients="zero")
        return Whole(
            tf.stop_gradient(value),
            floats,
            [tf.stop_gradient(slope) for slope in slopes],
            [self.of(term).degree for term in floats],
        )

    def _reduced(self, terms: list[Any], reduce: Any) -> dict[Any, Any]:
        """Return the terms by their keys, reduced unless they are constants."""
        some = [term for term in terms if self.of(term) != CONSTANT]
        given = {key_of(term): term for term in terms}
        if some:
            kinds = [self.of(term) for term in some]
            given |= zip(map(key_of, some), reduce(some, kinds), strict=True)
        return given

    def _function(
        self, tensor: Any, *, of_all: bool = False
    ) -> tuple[list[Any], list[Any]] | None:
        """Return the operations from reduced numbers to a tensor, and those numbers.

        None if the tensor also depends on something else.

        Args:
            tensor: The tensor.
            of_all: Whether extremes, and sums of integers, are such numbers, too.
        """
        terms: dict[Any, Any] = {}
        others = []

        def ends(one: Any) -> bool:
            kind = self.of(one)
            if isinstance(kind, (Kind, Extreme) if of_all else Kind):
                terms[key_of(one)] = one
                return True
            if kind == ROWS or not one.op.inputs or one.op.op_def.is_stateful:
                others.append(one)
            return bool(others)

        operations = list(tensor_origins.in_order(tensor, ends))
        if others:
            return None
        found = list(terms.values())
        known = (CONSTANT, Kind(1), Kind(1, True), *_EXTREMES.values())
        for term in found:
            if not term.dtype.is_floating and self.of(term) not in (
                known if of_all else (CONSTANT,)
            ):
                return None
        return operations, found

    def _find(self, tensor: Any) -> Any:
        operation = tensor.op
        kind = operation.type
        scalar = tensor.shape.rank == 0
        if scalar and kind in _SIZES:
            counted = self._count(tensor)
            if counted is not None:
                return counted
        if not scalar:
            few, more = (
                rebuilt.tensor(tensor).shape for rebuilt in self._for(tensor.graph)
            )
            if not (few.is_fully_defined() and more.is_fully_defined()):
                return OTHER
            if few != more:
                # Excludes a tensor with a number for each pair of rows.
                sizes = few.num_elements(), more.num_elements()
                return ROWS if 7 * sizes[0] == 5 * sizes[1] else OTHER
        if kind == "Placeholder":
            return CONSTANT if _is_eager(tensor_origins.captured(tensor)) else OTHER
        inner = tensor_origins.called(tensor)
        if inner is not None:
            return self._inside(inner[1], tensor.graph).of(inner[0])
        if kind == "ReadVariableOp" and self._summed:
            handle = tensor_origins.outermost(operation.inputs[0])
            return Kind(1) if id(handle) in self._summed else CONSTANT
        if kind == "Const" and scalar and self._known is not None:
            is_number = tensor_origins.constant(tensor) == self._known
            return Kind(1, counted=True) if is_number else CONSTANT
        if kind in ("Const", "ReadVariableOp") or "Random" in kind:
            return CONSTANT
        kinds = [self.of(given) for given in operation.inputs]
        if kinds and all(one == CONSTANT for one in kinds):
            return CONSTANT
        if kind in _SAME:
            return kinds[tensor.value_index if kind == "IdentityN" else 0]
        if kind in ("Sum", "Mean"):
            reduced = Kind(1 if kind == "Sum" else 0)
            return reduced if kinds[0] == ROWS else kinds[0]
        if kind in _CONTRACTIONS:
            return Kind(1) if kinds == [ROWS, ROWS] else OTHER
        if kind in _COUNTS:
            known = [one for one in kinds if one != CONSTANT]
            return Kind(1) if known and set(known) == {ROWS} else OTHER
        if kind in _EXTREMES:
            return _EXTREMES[kind] if kinds[0] == ROWS else OTHER
        if kind == "ConcatV2":
            kinds = kinds[:-1]  # the last one is the axis
        known = [one for one in kinds if isinstance(one, Kind)]
        if len(known) < len(kinds):
            return OTHER
        if kind in _SUMS:
            return _of_sum(known)
        if kind in _PRODUCTS:
            return _of_product(*known)
        if kind in _QUOTIENTS:
            one, other = known
            if one == Kind(1) and other == CONSTANT and self._is_number(operation):
                return Kind(0)
            return _of_product(one, other._replace(degree=-other.degree))
        return OTHER

    def _is_number(self, quotient: Any) -> bool:
        """Return whether a sum is divided by the number of its summands.

        Where a batch's shape is known, the graph has the number of rows as a constant.
        """
        known = tf.get_static_value(self._rows)
        divisor = tensor_origins.constant(quotient.inputs[1])
        if known is None or divisor is None:
            return False
        summed = quotient.inputs[0].op
        while summed.type in _SAME:
            summed = summed.inputs[0].op
        size = summed.inputs[0].shape.num_elements() if summed.inputs else None
        return bool(divisor in (known, size))

    def _inside(self, given: list[tuple[Any, Any]], graph: Any) -> LossKinds:
        """Return the kinds of a function's tensors, in one of its calls."""
        kinds = LossKinds(self._rows)
        kinds._summed, kinds._known = self._summed, self._known
        kinds._graph = given[0][0].graph if given else None
        kinds._rebuilt = [rebuilt.inside(given) for rebuilt in self._for(graph)]
        kinds._kinds = {key_of(inner): self.of(outer) for inner, outer in given}
        return kinds

    def _for(self, graph: Any) -> list[tensor_origins.RebuiltGraph]:
        if self._graph is not graph:
            self._graph = graph
            known = tf.get_static_value(self._rows)
            self._rebuilt = [
                tensor_origins.RebuiltGraph(
                    rows, known=None if known is None else int(known), guess=True
                )
                for rows in (5, 7)
            ]
        return self._rebuilt

    def _count(self, tensor: Any) -> Kind | None:
        """Return the kind of a number computed from sizes alone; None for any other."""
        some, others = (
            tensor_origins.constant(rebuilt.tensor(tensor))
            for rebuilt in self._for(tensor.graph)
        )
        if some is None or others is None:
            return None
        if np.array_equal(some, others):
            return Kind(1, counted=True) if some == self._known else CONSTANT
        return Kind(1, counted=True) if 7 * some == 5 * others else None


def _with(operations: Sequence[Any], given: dict[Any, Any]) -> dict[Any, Any]:
    """Copy operations with other inputs; return all tensors by their keys."""
    for operation in operations:
        inputs = [given[key_of(tensor)] for tensor in operation.inputs]
        outputs = tensor_origins.copied(operation, inputs)
        given |= zip((key_of(t) for t in operation.outputs), outputs, strict=True)
    return given


def _of_sum(kinds: list[Kind]) -> Any:
    if len({kind.degree for kind in kinds}) > 1:
        return OTHER
    return Kind(kinds[0].degree, all(kind.counted for kind in kinds))


def _of_product(one: Kind, other: Kind) -> Any:
    if not (one.counted or other.counted):
        return OTHER
    return Kind(one.degree + other.degree, one.counted and other.counted)


def _is_eager(tensor: Any) -> bool:
    return isinstance(tensor, tf.__internal__.EagerTensor)
