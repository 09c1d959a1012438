"""Losses and metrics of `compile` that mix the rows of a batch, on all of its rows.

Each replica gets the targets and the outputs of all replicas, in their order, and
computes the function of the whole batch: all have the same value. It differentiates its
own outputs only; the sum over the replicas is the gradient of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src import backend, tree

from kerasdist import _tf
from kerasdist._keras.context import current, setting
from kerasdist._keras.global_batch.row_mixing import (
    FUNCTION,
    MIXED,
    SUM,
    kind_of_function,
)

# Functions of Keras that aren't a mean over rows which are each computed alone.
_MIXING = ("circle", "dice", "tversky")


def loss(
    original: Callable[..., Any],
    self: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any = None,
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
    original: Callable[..., Any],
    self: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any = None,
) -> Any:
    """Replace `MeanMetricWrapper.update_state`, likewise."""
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
    self._fn = lambda *given, **more: whole
    try:
        return original(self, y_true, y_pred, sample_weight)
    finally:
        self._fn = function


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
    if _tf.executing_eagerly():
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
