"""Whether a function of a batch computes each row by itself.

A loss that centres its rows, sorts them or compares them with each other has another
value on a part of the batch, though its shapes are those of any loss. The function is
traced by itself, for a batch of unknown size, and each operation is looked at:

    ONE      doesn't depend on the batch
    COUNT    depends on its shape alone
    ROWS     a number, or several, for each row, made of this row alone
    WHOLE    reduced over the rows
    MIXED    made of several rows, but not reduced; or of an operation that isn't known
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src import tree

from kerasdist._keras.global_batch.loss_kinds import Kind, LossKinds
from kerasdist._tf.graph.tensor_origins import RebuiltGraph, called, captured, constant

ONE, COUNT, ROWS, WHOLE, MIXED = "one", "count", "rows", "whole", "mixed"
# What a function that reduces the rows returns: their mean, their sum, or a function of
# such numbers.
MEAN, SUM, FUNCTION = "mean", "sum", "function"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Compute each number by itself, of those at the same place of the inputs.
_ELEMENTWISE = _names(
    """
    Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh Betainc Bitcast Cast Ceil
    CheckNumerics ClipByValue Cos Cosh Digamma Div DivNoNan Elu EnsureShape Equal Erf
    Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity Inv
    IsFinite IsInf IsNan LeakyRelu Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot
    LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg NextAfter NotEqual OnesLike Pow
    PreventGradient RealDiv Reciprocal Relu Relu6 Rint Round Rsqrt Select SelectV2 Selu
    Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Sqrt Square SquaredDifference
    StopGradient Sub Tan Tanh TruncateDiv TruncateMod Xdivy Xlog1py Xlogy ZerosLike
    """
)
# The first input decides; others say which shape or place.
_SHAPING = _names(
    "BroadcastTo ExpandDims Fill MirrorPad Pad PadV2 Reshape Squeeze Tile"
)
_REDUCTIONS = _names("All Any ArgMax ArgMin EuclideanNorm Max Mean Min Prod Sum")
_ALONG_LAST = _names(
    """
    InTopKV2 L2Normalize LogSoftmax Softmax SoftmaxCrossEntropyWithLogits
    SparseSoftmaxCrossEntropyWithLogits TopK TopKV2
    """
)
_ALONG_AXIS = _names("Cumprod Cumsum CumulativeLogsumexp ReverseV2 Roll")
_PRODUCTS = _names("BatchMatMul BatchMatMulV2 BatchMatMulV3 MatMul")
_SUMS = _names("Bincount DenseBincount L2Loss ScatterNd UnsortedSegmentSum")
_SIZES = _names("Rank Shape ShapeN Size")


def kind_of_function(function: Callable[..., Any], *inputs: Any) -> str | None:
    """Return what a function makes of a batch.

    Args:
        function: Takes `inputs`.
        inputs: Tensors, or structures of them, with the rows first.

    Returns:
        `ROWS`, `MEAN`, `SUM`, `FUNCTION` or `MIXED`; None if it can't be traced by
        itself, or returns something else than a tensor.
    """
    graph = tf.__internal__.FuncGraph("kerasdist_rows")
    with graph.as_default():
        given = tree.map_structure(_placeholder, inputs)
        try:
            result = tf.convert_to_tensor(function(*given))
        except Exception:  # it needs the values, or the size of the batch
            return None
        flat = [leaf for leaf in tree.flatten(given) if leaf is not None]
        state = _States(flat).of(result)
        if state in (ROWS, MIXED):
            return state
        if result.shape.rank != 0:
            return MIXED
        kinds = LossKinds(tf.shape(flat[-1])[0])
        kind = kinds.of(result)
        if isinstance(kind, Kind) and kind.degree in (0, 1):
            return (MEAN, SUM)[kind.degree]
        return FUNCTION if kinds.is_function(result) else MIXED


def _placeholder(value: Any) -> Any:
    if value is None:
        return None
    shape = (
        tf.TensorShape([None, *value.shape[1:]]) if value.shape.rank else value.shape
    )
    return tf.compat.v1.placeholder(value.dtype, shape)


class _States:
    """The states of a graph's tensors.

    Args:
        inputs: The placeholders with the rows.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._found = {_key(tensor): ROWS for tensor in inputs}
        self._few, self._more = (RebuiltGraph(rows) for rows in (5, 7))
        for tensor in inputs:
            self._few.give(tensor)
            self._more.give(tensor)

    def of(self, target: Any) -> str:
        """Return a tensor's state."""
        waiting = [target]
        while waiting:
            tensor = waiting[-1]
            if _key(tensor) in self._found:
                waiting.pop()
                continue
            missing = [t for t in tensor.op.inputs if _key(t) not in self._found]
            if missing:
                waiting += missing
                continue
            self._found[_key(tensor)] = self._find(tensor)
        return self._found[_key(target)]

    def _find(self, tensor: Any) -> str:
        operation = tensor.op
        kind, inputs = operation.type, list(operation.inputs)
        states = [self._found[_key(each)] for each in inputs]
        if kind == "Placeholder":
            return ONE if captured(tensor) is not None else MIXED
        if MIXED in states:
            return MIXED
        if set(states) <= {ONE}:
            return ONE
        if kind in _SIZES:
            return COUNT
        inner = called(tensor)
        if inner is not None:
            return self._inside(*inner)
        if kind in ("Fill", "RandomUniform", "RandomStandardNormal", "TruncatedNormal"):
            return states[1] if kind == "Fill" else ONE
        if kind in _SHAPING or kind in ("TopK", "TopKV2"):
            states, inputs = states[:1], inputs[:1]
        if set(states) <= {ONE, COUNT}:
            # The number of a row depends on where the others are.
            return MIXED if kind == "Range" else COUNT
        if ROWS not in states:
            return WHOLE
        return self._of_rows(tensor, kind, inputs, states)

    def _of_rows(
        self, tensor: Any, kind: str, inputs: list[Any], states: list[str]
    ) -> str:
        axis = self._axis(tensor)
        axes = [
            self._axis(each) if state == ROWS else None
            for each, state in zip(inputs, states, strict=True)
        ]
        first = axes[0]
        alone = set(states) <= {ONE, ROWS}
        if kind in _REDUCTIONS:
            return WHOLE if axis is None else ROWS
        if kind in _SUMS:
            return WHOLE if axis is None and set(states[:2]) <= {ONE, ROWS} else MIXED
        if axis is None:
            return WHOLE if kind in _PRODUCTS and states == [ROWS, ROWS] else MIXED
        if axis == _SEVERAL or _SEVERAL in axes:
            return MIXED
        if kind in _ELEMENTWISE:
            return (
                ROWS if alone and self._aligned(tensor, axis, inputs, axes) else MIXED
            )
        if kind == "Reshape":
            return ROWS if first == axis == 0 else MIXED
        if kind == "Tile":
            return ROWS if self._rows(tensor, axis) == 5 else MIXED
        if kind in _SHAPING:
            return ROWS if self._rows(tensor, axis) % 5 == 0 else MIXED
        if not alone:
            return MIXED
        if kind in ("IdentityN", "Transpose", "Unpack"):
            return ROWS
        if kind in _ALONG_LAST:
            return ROWS if first == 0 and inputs[0].shape.rank == 2 else MIXED
        if kind in _ALONG_AXIS:
            return ROWS if self._is_along_other(inputs, first) else MIXED
        if kind in ("ConcatV2", "Pack", "OneHot"):
            return (
                ROWS
                if self._rows(tensor, axis) == self._rows_of(inputs, axes)
                else MIXED
            )
        if kind in _PRODUCTS:
            return (
                ROWS
                if states.count(ROWS) == 1 or self._is_batch(tensor, axes)
                else MIXED
            )
        if kind == "Einsum":
            return ROWS if _keeps_rows(tensor, axis, axes) else MIXED
        if kind == "GatherV2":
            by_row = states[0] == ONE
            return ROWS if by_row or self._is_along_other(inputs[::2], first) else MIXED
        if kind in ("Slice", "StridedSlice"):
            same = self._rows(tensor, axis) == self._rows(inputs[0], first)
            ahead = kind == "Slice" or bool(np.all(constant(inputs[3]) == 1))
            return ROWS if same and ahead else MIXED
        return MIXED

    def _inside(self, result: Any, given: list[tuple[Any, Any]]) -> str:
        inner = _States([])
        inner._few = self._few.inside(given)
        inner._more = self._more.inside(given)
        inner._found = {_key(one): self._found[_key(other)] for one, other in given}
        return inner.of(result)

    def _shapes(self, tensor: Any) -> tuple[list[Any], list[Any]]:
        few, more = self._few.tensor(tensor).shape, self._more.tensor(tensor).shape
        if few.rank is None or more.rank is None:
            return [None], [None]
        return few.as_list(), more.as_list()

    def _axis(self, tensor: Any) -> int | None:
        """Return the axis of the rows; None if there is none; `_SEVERAL`: not one."""
        few, more = self._shapes(tensor)
        if None in few or None in more:
            return _SEVERAL
        found = [
            i for i, pair in enumerate(zip(few, more, strict=True)) if len({*pair}) > 1
        ]
        if not found:
            return None
        place = found[0]
        if len(found) > 1 or 7 * few[place] != 5 * more[place]:
            return _SEVERAL
        return place

    def _rows(self, tensor: Any, axis: Any) -> int:
        return int(self._shapes(tensor)[0][axis])

    def _rows_of(self, inputs: list[Any], axes: list[Any]) -> int:
        sizes = {
            self._rows(each, axis)
            for each, axis in zip(inputs, axes, strict=True)
            if axis is not None
        }
        return sizes.pop() if len(sizes) == 1 else -1

    def _aligned(
        self, tensor: Any, axis: int, inputs: list[Any], axes: list[Any]
    ) -> bool:
        """Return whether the rows of all inputs are along one axis of the result."""
        rank = tensor.shape.rank or 0
        return all(
            at is None or rank - (each.shape.rank or 0) + at == axis
            for each, at in zip(inputs, axes, strict=True)
        )

    def _is_along_other(self, inputs: list[Any], axis: int | None) -> bool:
        """Return whether the axis that the last input names isn't that of the rows."""
        known = constant(inputs[-1])
        if known is None or axis is None:
            return False
        rank = inputs[0].shape.rank or 1
        return all(int(each) % rank != axis for each in known.reshape(-1))

    def _is_batch(self, tensor: Any, axes: list[Any]) -> bool:
        """Return whether both factors have the rows as the first of many products."""
        return axes == [0, 0] and (tensor.shape.rank or 0) > 2


_SEVERAL = -1


def _keeps_rows(tensor: Any, axis: int, axes: list[Any]) -> bool:
    equation = tensor.op.get_attr("equation").decode()
    if "." in equation:
        return False
    left, _, right = equation.partition("->")
    letters = {
        part[at]
        for part, at in zip(left.split(","), axes, strict=True)
        if at is not None
    }
    return letters == {right[axis]}


def _key(tensor: Any) -> Any:
    return id(tensor.graph), tensor.name
