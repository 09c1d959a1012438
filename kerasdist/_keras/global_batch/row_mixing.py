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
from keras.src import backend, tree

from kerasdist import _tf
from kerasdist._keras.context import current, setting
from kerasdist._keras.global_batch.loss_kinds import Kind, LossKinds
from kerasdist._tf.patching import Original
from kerasdist._tf.tensor_origins import (
    RebuiltGraph,
    called,
    captured,
    constant,
    in_order,
    key_of,
)

# Losses and metrics of `compile` that mix the rows of a batch, on all of its rows.
#
# Each replica gets the targets and the outputs of all replicas, in their order, and
# computes the function of the whole batch: all have the same value. It differentiates
# its own outputs only; the sum over the replicas is the gradient of one process.

# Functions of Keras that aren't a mean over rows which are each computed alone.
_MIXING = ("circle", "dice", "tversky")


def loss(
    original: Original, self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Replace `Loss.__call__`: compute a loss that mixes rows of the whole batch."""
    if (
        current.kinds is None
        or not current.in_compile_loss
        or _is_plain(getattr(self, "fn", None))
        or not _is_mixed(f"loss {self.name!r}", self.call, y_true, y_pred, self.dtype)
    ):
        return original(self, y_true, y_pred, sample_weight)
    _inform("loss", self.name, y_true, y_pred)
    targets, weights = (
        tree.map_structure(_rows_of_all, x) for x in (y_true, sample_weight)
    )
    outputs = tree.map_structure(_with_own, y_pred)
    mask = backend.get_keras_mask(y_pred)
    if mask is not None:
        backend.set_keras_mask(outputs, _rows_of_all(mask))
    with setting(kinds=None, hooks=None, in_compile_loss=False):
        whole = original(self, targets, outputs, weights)
    if len(whole.shape):
        return _own(whole)
    # A tape weights a mean by this replica's rows, see `global_batch.gradients`.
    weight = tf.cast(tf.math.reciprocal_no_nan(current.share), whole.dtype)
    value = tf.stop_gradient(whole)
    whole = value + weight * (whole - value)
    current.kinds.set_mean(whole)
    return whole


def metric(
    original: Original, self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Replace `MeanMetricWrapper.update_state`: likewise for functions as metrics."""
    function = self._fn
    if (
        current.kinds is None
        or _is_plain(function)
        or not _is_mixed(
            f"metric {self.name!r}",
            lambda *given: function(*given, **self._fn_kwargs),
            *(y_true, y_pred, None),
        )
    ):
        return original(self, y_true, y_pred, sample_weight)
    _inform("metric", self.name, y_true, y_pred)
    targets, outputs = (tree.map_structure(_rows_of_all, x) for x in (y_true, y_pred))
    with setting(kinds=None, hooks=None):
        whole = tf.convert_to_tensor(function(targets, outputs, **self._fn_kwargs))
    if len(whole.shape):
        whole = _own(whole)
    current.kinds.set_mean(whole)
    with _tf.replaced(self, _fn=lambda *given, **more: whole):
        return original(self, y_true, y_pred, sample_weight)


def _is_plain(function: Any) -> bool:
    """Return whether Keras's own function computes each row by itself."""
    module, name = (getattr(function, n, "") or "" for n in ("__module__", "__name__"))
    return module.startswith(("keras.src.losses", "keras.src.metrics")) and (
        name not in _MIXING
    )


def _is_mixed(what: str, function: Any, y_true: Any, y_pred: Any, dtype: Any) -> bool:
    given = [_converted(each, dtype) for each in (y_true, y_pred)]
    kind = None
    if all(each is not None for each in tree.flatten(given)):
        kind = kind_of_function(function, *given)
    if tf.executing_eagerly():
        return kind in (None, FUNCTION, MIXED, SUM)
    hooks = current.hooks
    if kind is None and hooks is not None and not current.building:
        hooks.log_once(
            f"unknown {what}",
            f"kerasdist: the {what} can't be looked at by itself: it needs values, the "
            "number of rows, or tensors that aren't dense. So each replica computes it "
            "from its own rows. If it mixes the rows of a batch, its numbers differ "
            "from those of one process.",
        )
    return kind == MIXED


def _converted(structure: Any, dtype: Any) -> Any:
    """Return tensors as a function is given them; None for what isn't dense."""

    def tensor(value: Any) -> Any:
        if value is None or isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            return None
        value = tf.convert_to_tensor(value)
        return value if dtype is None else tf.cast(value, dtype)

    return tree.map_structure(tensor, structure)


def _inform(what: str, name: str, *given: Any) -> None:
    hooks = current.hooks
    if hooks is None or current.building:
        return
    if current.compiled:
        raise ValueError(
            f"The {what} {name!r} mixes the rows of a batch, or isn't known not to. "
            "XLA can't compile a step that computes it from all replicas' rows. "
            "Received: jit_compile=True in `compile`. Give it jit_compile=False."
        )
    size = sum(
        (tensor.shape[1:].num_elements() or 0) * tensor.dtype.size
        for tensor in tree.flatten(_converted(given, None))
    )
    hooks.log_once(
        f"mixed {what} {name}",
        f"kerasdist: the {what} {name!r} mixes the rows of a batch, or isn't known not "
        "to. So each replica computes it from the targets and outputs of all replicas: "
        f"{size} bytes for each row of the global batch are sent in each step.",
    )


def _rows_of_all(tensor: Any) -> Any:
    """Return the rows of all replicas, in their order, in replica context."""
    if tensor is None:
        return None
    tensor = tf.convert_to_tensor(tensor)
    if not tensor.shape.rank:
        return tensor
    # A replica without rows computes with made-up ones.
    mine = tf.stop_gradient(tensor[: tf.maximum(tf.cast(current.rows, tf.int32), 0)])
    wide = tf.cast(mine, tf.int8) if mine.dtype == tf.bool else mine
    found = tf.distribute.get_replica_context().all_gather(wide, 0)
    return tf.cast(found, tensor.dtype)


def _place() -> tuple[Any, Any]:
    """Return where this replica's rows begin among those of all, and how many."""
    hooks = current.hooks
    rows = tf.cast(tf.maximum(current.rows, 0), tf.int32)
    me, replicas = hooks.workers.current_replica(), hooks.workers.replicas  # type: ignore[union-attr]
    mine = tf.stack([rows if i == me else tf.zeros_like(rows) for i in range(replicas)])
    counts = hooks.gradients.sum_over_replicas([mine])[0]  # type: ignore[union-attr]
    return tf.reduce_sum(counts[:me]), rows


def _with_own(tensor: Any) -> Any:
    """Return the rows of all replicas; only this replica's can be differentiated."""
    tensor = tf.convert_to_tensor(tensor)
    begin, rows = _place()
    every = _rows_of_all(tensor)
    return tf.concat([every[:begin], tensor[:rows], every[begin + rows :]], 0)


def _own(tensor: Any) -> Any:
    """Return this replica's rows; made-up ones if it has none."""
    begin, rows = _place()
    some = tensor[begin : begin + rows]
    return tf.cond(rows > 0, lambda: some, lambda: tf.zeros_like(tensor[:1]))


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
        self._found = {key_of(tensor): ROWS for tensor in inputs}
        self._few, self._more = (RebuiltGraph(rows) for rows in (5, 7))
        for tensor in inputs:
            self._few.give(tensor)
            self._more.give(tensor)

    def of(self, target: Any) -> str:
        """Return a tensor's state."""
        for operation in in_order(target, lambda each: key_of(each) in self._found):
            for tensor in operation.outputs:
                self._found.setdefault(key_of(tensor), self._find(tensor))
        return self._found[key_of(target)]

    def _find(self, tensor: Any) -> str:
        operation = tensor.op
        kind, inputs = operation.type, list(operation.inputs)
        states = [self._found[key_of(each)] for each in inputs]
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
        if kind in _REDUCTIONS:
            return WHOLE if axis is None else ROWS
        if kind in _SUMS:
            return WHOLE if axis is None and set(states[:2]) <= {ONE, ROWS} else MIXED
        if axis is None:
            return WHOLE if kind in _PRODUCTS and states == [ROWS, ROWS] else MIXED
        if axis == _SEVERAL or _SEVERAL in axes:
            return MIXED
        return ROWS if self._is_by_row(tensor, axis, inputs, axes, states) else MIXED

    def _is_by_row(
        self,
        tensor: Any,
        axis: int,
        inputs: list[Any],
        axes: list[Any],
        states: list[str],
    ) -> bool:
        """Return whether each row of a result is made of one row of the inputs."""
        kind, first = tensor.op.type, axes[0]
        if kind == "Reshape":
            return first == axis == 0
        if kind == "Tile":
            return self._rows(tensor, axis) == 5
        if kind in _SHAPING:
            return self._rows(tensor, axis) % 5 == 0
        if not set(states) <= {ONE, ROWS}:
            return False
        if kind in _ELEMENTWISE:
            return self._aligned(tensor, axis, inputs, axes)
        if kind in ("IdentityN", "Transpose", "Unpack"):
            return True
        if kind in _ALONG_LAST:
            return first == 0 and inputs[0].shape.rank == 2
        if kind in _ALONG_AXIS:
            return self._is_along_other(inputs, first)
        if kind in ("ConcatV2", "Pack", "OneHot"):
            return self._rows(tensor, axis) == self._rows_of(inputs, axes)
        if kind in _PRODUCTS:
            # Or many products, of which both factors have the rows first.
            many = axes == [0, 0] and (tensor.shape.rank or 0) > 2
            return many or states.count(ROWS) == 1
        if kind == "Einsum":
            return _keeps_rows(tensor, axis, axes)
        if kind == "GatherV2":
            return states[0] == ONE or self._is_along_other(inputs[::2], first)
        if kind in ("Slice", "StridedSlice"):
            same = self._rows(tensor, axis) == self._rows(inputs[0], first)
            return same and (kind == "Slice" or bool(np.all(constant(inputs[3]) == 1)))
        return False

    def _inside(self, result: Any, given: list[tuple[Any, Any]]) -> str:
        inner = _States([])
        inner._few = self._few.inside(given)
        inner._more = self._more.inside(given)
        inner._found = {key_of(one): self._found[key_of(other)] for one, other in given}
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
