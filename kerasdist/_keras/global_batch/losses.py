"""Correction of losses that aren't a mean over a batch's rows.

A replica's gradients are weighted by its share s = n / N of the global batch's
rows. That is right for a mean over rows. Any other loss is corrected, so that the
weighted mean over the replicas is the value on the global batch:

    sum over rows                       x 1/s
    a number per row, which is summed   x 1/s
    sum(w l) / sum(w)                   x (sum of this replica's w / all w) / s
    sum over valid entries / valid      x (this replica's valid / all valid) / s
    a function of means and sums        that function of the global numbers, with its
                                        slopes at them

The factors need sums over all replicas: one small collective per step each, and
only in models with such a loss. What a script has reduced itself is found in the
graph, see `loss_kinds`; in steps that run eagerly it counts as a mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasdist._keras.context import current, setting
from kerasdist._keras.global_batch.loss_kinds import ROWS, Kind, LossKinds, Whole
from kerasdist._keras.protocols import current_hooks
from kerasdist._tf.patching import Original


def keep_loss_unscaled(original: Original, value: Any) -> Any:
    """Replace `scale_loss_for_distribution`: leave the loss unchanged in a step.

    Keras divides by the number of replicas, which is right only for equal parts and for
    Keras's own losses. In a step the gradients are weighted instead.
    """
    return value if _is_whole() or current.rows is not None else original(value)


def reported_loss(original: Original, value: Any) -> Any:
    """Replace `unscale_loss_for_distribution`: record the loss of the global batch."""
    if current.rows is None:
        return value if _is_whole() else original(value)
    return _as_mean(value, "The result of `compute_loss`")


def _is_whole() -> bool:
    """Return whether a loss is of a whole batch, in a loop outside of `strategy.run`.

    See `unscoped_models`.
    """
    return current_hooks() is not None and tf.distribute.in_cross_replica_context()


def reduce_values(
    original: Original,
    values: Any,
    sample_weight: Any = None,
    reduction: str = "sum_over_batch_size",
) -> Any:
    """Replace `reduce_values`: correct losses that are sums or weighted means."""
    loss = original(values, sample_weight, reduction)
    if current.hooks is None:
        return loss
    if _is_reduced(values):
        return loss  # see `reduce_weighted_values` and `gradient`
    if reduction == "sum":
        if not current.in_compile_loss and not tf.executing_eagerly():
            return loss
        loss = loss * tf.cast(tf.math.reciprocal_no_nan(current.share), loss.dtype)
    elif reduction == "mean_with_sample_weight" and sample_weight is not None:
        weight = tf.reduce_sum(tf.cast(sample_weight, tf.float32))
        loss = loss * tf.cast(_portion(weight), loss.dtype)
    if not len(loss.shape):
        _set_mean(loss)
    return loss


def _is_reduced(values: Any) -> bool:
    """Return whether a loss function has reduced the rows itself."""
    if not len(values.shape):
        return True
    known = values.shape[0]
    if known is None or tf.executing_eagerly():
        return False
    return bool(known != tf.get_static_value(current.rows))


def reduce_weighted_values(
    original: Original, values: Any, *args: Any, **more: Any
) -> Any:
    """Replace `reduce_weighted_values`: correct losses that are one number."""
    if not (current.in_compile_loss and _is_reduced(values)):
        return original(values, *args, **more)
    what = "A loss function that returns one number"
    if len(values.shape):
        return _as_mean(original(values, *args, **more), what)
    # That is the loss times the mean of the samples' weights: a product of two numbers.
    weight = original(tf.ones_like(values), *args, **more)
    return _as_mean(values * tf.cast(weight, values.dtype), what)


def mask_weights(
    original: Original, sample_weight: Any, mask: Any, dtype: Any, reduction: str
) -> Any:
    """Replace `apply_mask` of losses: count valid entries over all replicas."""
    weights = original(sample_weight, mask, dtype, reduction)
    if (
        current.hooks is None
        or mask is None
        or reduction not in ("mean", "sum_over_batch_size")
    ):
        return weights
    valid = tf.reduce_sum(tf.cast(mask, tf.float32))
    return weights * tf.cast(_portion(valid), weights.dtype)


def compile_loss(original: Original, self: Any, *args: Any, **kw: Any) -> Any:
    """Replace `CompileLoss.call`: let `mean_metric` record the parts of the loss."""
    with setting(in_compile_loss=current.hooks is not None):
        loss = original(self, *args, **kw)
    _set_mean(loss)
    return loss


def additional_loss(original: Original, trainer: Any, loss: Any) -> Any:
    """Replace `_aggregate_additional_loss`: correct what `add_loss` was given."""
    total = original(trainer, loss)
    kinds = current.kinds
    if kinds is not None and tf.executing_eagerly() and kinds.of(loss) == ROWS:
        return total * tf.cast(_scale(1), total.dtype)
    return _as_mean(total, "A loss of `add_loss`")


def average_loss(
    original: Original,
    loss: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> Any:
    """Replace `tf.nn.compute_average_loss`: in a step of `fit` divide by rows alone.

    Without `global_batch_size` TensorFlow also divides by the number of replicas, since
    it expects their gradients to be summed.
    """
    if current.rows is not None and global_batch_size is None:
        # Not multiplied by their number afterwards: where the batch's shape is known,
        # both are constants, which couldn't be recognized as the batch's size.
        loss = tf.convert_to_tensor(loss)
        global_batch_size = tf.shape(loss)[0]
    return original(loss, sample_weight, global_batch_size)


def regularization_loss(original: Original, loss: Any) -> Any:
    """Replace `tf.nn.scale_regularization_loss`: likewise."""
    part = original(loss)
    if current.rows is None:
        return part
    return part * tf.cast(_replicas(), part.dtype)


def _replicas() -> int:
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def terms_of(kinds: LossKinds, loss: Any) -> Iterator[tuple[Any, Any, int]]:
    """Yield the terms to differentiate in place of a loss, with slope and degree."""
    kind = kinds.of(loss)
    whole = None
    if kind != ROWS and not isinstance(kind, Kind):
        whole = _whole(kinds, loss, "The loss of `train_step`")
    if whole is not None:
        yield from zip(whole.terms, whole.slopes, whole.degrees, strict=True)
        return
    # A tape differentiates the sum of a tensor with one number per row.
    degree = kind.degree if isinstance(kind, Kind) else int(kind == ROWS)
    yield loss, tf.ones_like(loss), degree


def _as_mean(loss: Any, what: str) -> Any:
    """Correct a number, so that its mean weighted by rows is that of all rows.

    Args:
        loss: A scalar tensor.
        what: The name of the loss in a warning, if its kind isn't known.
    """
    kinds = current.kinds
    if kinds is None or tf.executing_eagerly() or not isinstance(loss, tf.Tensor):
        return loss
    kind = kinds.of(loss)
    if isinstance(kind, Kind):
        if kind.degree:
            loss = loss * tf.cast(_scale(kind.degree), loss.dtype)
    else:
        whole = _whole(kinds, loss, what)
        if whole is None:
            kinds.set_mean(loss)  # as the warning says
            return loss
        loss = whole.value
        for term, slope, degree in zip(
            whole.terms, whole.slopes, whole.degrees, strict=True
        ):
            # It adds nothing to the value, only to the gradient.
            change = slope * tf.cast(_scale(degree), term.dtype)
            loss += tf.reduce_sum(change * (term - tf.stop_gradient(term)))
    kinds.set_mean(loss)
    return loss


def _whole(kinds: LossKinds, loss: Any, what: str) -> Whole | None:
    whole = kinds.whole(loss, _sums)
    if whole is None and not tf.executing_eagerly():
        _warn_unknown(what)
    return whole


def _sums(values: list[Any], degrees: list[int]) -> list[Any]:
    """Return the global batch's numbers from the replicas' means or sums."""
    share = current.share
    parts = []
    for value, degree in zip(values, degrees, strict=True):
        part = value * tf.cast(share * _scale(degree), value.dtype)
        parts.append(tf.where(current.rows > 0, part, tf.zeros_like(part)))
    hooks = current.hooks
    if hooks is None or not parts:
        return parts
    return hooks.gradients.sum_over_replicas(parts)


def _scale(degree: int) -> Any:
    """Return N / n to the power of `degree`; 0 for a replica without rows."""
    return tf.math.reciprocal_no_nan(current.share) ** degree


def part_of(degree: int) -> Any:
    """Return what makes a number of this replica its part of the global batch's."""
    if degree == 1:
        return tf.ones([])
    return _scale(degree - 1) if degree else current.share


def _set_mean(loss: Any) -> None:
    if current.kinds is not None:
        current.kinds.set_mean(loss)


def _warn_unknown(what: str) -> None:
    """Inform the user once that the kind of a loss isn't known."""
    if current.hooks is None or current.building:
        return
    current.hooks.log_once(
        what,
        f"kerasdist: {what} isn't known to be made of means and sums over the rows of "
        "a batch. So each replica computes it from its own rows, and it counts as a "
        "mean over them. If it compares rows with each other or selects some of them, "
        "the numbers differ from those of one process. To get the same, compute a "
        "number for each row, and take the mean or the sum of all of them last.",
    )


def mean_metric(
    original: Original, self: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Replace `Mean.update_state`: weight a loss by the replica's share of the rows.

    Keras records each output's loss with the static batch size as its weight (1
    where that isn't known), and a custom step records its loss without one: every
    step of an epoch weighs the same. A replica's value counts by its share of the step.
    """
    if current.hooks is not None and (
        current.in_compile_loss
        or (sample_weight is None and len(getattr(values, "shape", (0,))) == 0)
    ):
        whole = recorded(values, communicate=not current.in_compile_loss)
        # Eagerly Keras knows a batch's size, and weights by it.
        eager = tf.executing_eagerly() and sample_weight is not None
        return original(self, whole, current.rows if eager else current.share)
    return original(self, values, sample_weight)


def recorded(value: Any, *, communicate: bool = False) -> Any:
    """Correct a step's number, so that its mean weighted by rows is that of all rows.

    Args:
        value: The number.
        communicate: Whether it may be computed from the numbers of all replicas.
    """
    kinds = current.kinds
    if kinds is None or not isinstance(value, tf.Tensor) or value.shape.rank != 0:
        return value
    whole = kinds.known_whole(value)
    if whole is not None:
        return whole.value
    kind = kinds.of(value)
    if communicate and kind != ROWS and not isinstance(kind, Kind):
        whole = kinds.whole(value, _sums)
        return value if whole is None else whole.value
    if isinstance(kind, Kind) and kind.degree:
        if value.dtype.is_integer:
            value = tf.cast(value, tf.float64)
        return value * tf.cast(_scale(kind.degree), value.dtype)
    return value


def _portion(mine: Any) -> Any:
    """Return this replica's part of a sum over all, divided by its row share."""
    hooks = current.hooks
    if hooks is None:
        return tf.ones([])
    mine = tf.where(current.rows > 0, mine, tf.zeros_like(mine))
    total = hooks.gradients.sum_over_replicas([mine])[0]
    return tf.math.divide_no_nan(mine, total * current.share)
