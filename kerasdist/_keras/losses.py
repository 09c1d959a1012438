"""Losses that aren't a mean over a batch's rows.

A replica's gradients are weighted by its share s = n / N of the global batch's
rows. That is right for a mean over rows. A loss that is something else is
corrected, so that the weighted mean over the replicas is the value on the global
batch:

    sum over rows                       x 1/s
    a number per row, which is summed   x 1/s
    sum(w l) / sum(w)                   x (sum of this replica's w / all w) / s
    sum over valid entries / valid      x (this replica's valid / all valid) / s

The factors need sums over all replicas: one small collective per step each, and
only in models that have such a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdist._keras.step import current, setting
from kerasdist._tf import origins

__all__ = [
    "additional_loss",
    "compile_loss",
    "gradient",
    "leave_loss",
    "mask_weights",
    "mean_metric",
    "reduce_values",
]


def leave_loss(original: Callable[..., Any], value: Any) -> Any:
    """In place of `scale_loss_for_distribution` and its inverse.

    Keras divides by the number of replicas: right for equal parts and for Keras's
    own losses only. Inside a step weights come with the gradients.
    """
    return value if current.rows is not None else original(value)


def reduce_values(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    reduction: str = "sum_over_batch_size",
) -> Any:
    """In place of `keras.src.losses.loss.reduce_values`."""
    loss = original(values, sample_weight, reduction)
    if current.hooks is None or len(values.shape) == 0:
        return loss
    if reduction == "sum":
        return loss * tf.cast(tf.math.reciprocal_no_nan(current.share), loss.dtype)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        weight = tf.reduce_sum(tf.cast(sample_weight, tf.float32))
        return loss * tf.cast(_portion(weight), loss.dtype)
    return loss


def mask_weights(
    original: Callable[..., Any],
    sample_weight: Any,
    mask: Any,
    dtype: Any,
    reduction: str,
) -> Any:
    """In place of `keras.src.losses.loss.apply_mask`."""
    weights = original(sample_weight, mask, dtype, reduction)
    if (
        current.hooks is None
        or mask is None
        or reduction not in ("mean", "sum_over_batch_size")
    ):
        return weights
    valid = tf.reduce_sum(tf.cast(mask, tf.float32))
    return weights * tf.cast(_portion(valid), weights.dtype)


def compile_loss(original: Callable[..., Any], self: Any, *args: Any, **kw: Any) -> Any:
    """In place of `CompileLoss.call`: its parts are recorded by `mean_metric`."""
    with setting(in_compile_loss=current.hooks is not None):
        return original(self, *args, **kw)


def additional_loss(original: Callable[..., Any], trainer: Any, loss: Any) -> Any:
    """In place of `_aggregate_additional_loss`: what `add_loss` was given is summed."""
    total = original(trainer, loss)
    if not _has_rows(loss):
        return total
    return total * tf.cast(tf.math.reciprocal_no_nan(current.share), total.dtype)


def gradient(
    original: Callable[..., Any],
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    **more: Any,
) -> Any:
    """In place of `tf.GradientTape.gradient`: of a number per row it's their sum's."""
    if (
        output_gradients is None
        and tf.is_tensor(target)
        and not current.reduced
        and all(hasattr(source, "assign") for source in tf.nest.flatten(sources))
        and _has_rows(target)
    ):
        weight = tf.math.reciprocal_no_nan(current.share)
        output_gradients = tf.ones_like(target) * tf.cast(weight, target.dtype)
    return original(tape, target, sources, output_gradients, **more)


def _has_rows(tensor: Any) -> bool:
    """Whether a tensor has a number for each row of the replica's part, or several.

    In a graph its shape is found for batches of 5 and of 7 rows.
    """
    if current.hooks is None or current.hooks.replicas == 1 or not tensor.shape.rank:
        return False
    rows = tf.get_static_value(current.rows)
    known = None if rows is None else int(rows)
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return bool(tensor.shape[0] == known)
    shapes = [
        origins.MadeAgain(number, known=known).tensor(tensor).shape for number in (5, 7)
    ]
    return [shape[0] if shape.rank else None for shape in shapes] == [5, 7]


def mean_metric(
    original: Callable[..., Any], self: Any, values: Any, sample_weight: Any = None
) -> Any:
    """In place of `Mean.update_state`.

    Keras records each output's loss with the static batch size as its weight (1
    where that isn't known), and a custom step records its loss without one: every
    step of an epoch weighs the same. A replica's value counts by its share of it.
    """
    if current.hooks is not None and (
        current.in_compile_loss
        or (sample_weight is None and len(getattr(values, "shape", (0,))) == 0)
    ):
        return original(self, values, current.share)
    return original(self, values, sample_weight)


def _portion(mine: Any) -> Any:
    """This replica's part of a sum over all, relative to its share of the rows."""
    hooks = current.hooks
    if hooks is None:
        return tf.ones([])
    mine = tf.where(current.rows > 0, mine, tf.zeros_like(mine))
    total = hooks.sum_over_replicas([mine])[0]
    return tf.math.divide_no_nan(mine, total * current.share)
