"""Reduction of gradients before anything else reads them.

Keras clips, checks, accumulates and averages each replica's own gradients and sums
the results: with several replicas that gives other numbers. Here the outermost `apply`
reduces (a LossScaleOptimizer calls its inner optimizer's); inside it the gradients are
the same on all replicas.

With gradient accumulation each replica adds up its own gradients, and they are reduced
in the step that updates (`kerasdist.strategies.reduce.gradients`), before they are
clipped. Every step reduces if the gradients of every step are needed:

    LossScaleOptimizer              all replicas must know whether they are finite
    variables that are overwritten  (float8) take the largest of the steps'
    an optimizer that has its own `_backend_apply_gradients`
    workers that may be lost        with their part of a window
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras.src.optimizers import base_optimizer, sgd
from keras.src.optimizers.schedules import learning_rate_schedule

from kerasdist import _tf
from kerasdist._keras.context import current, setting
from kerasdist._keras.global_batch.gradients import RAW, WHOLE, exchange, weighted
from kerasdist._keras.optimizer.learning_rate import own_steps, scaled, shared_steps
from kerasdist._keras.optimizer.sparse_updates import share_reads, touched_rows
from kerasdist._keras.protocols import KerasHooks, hooks_of
from kerasdist._keras.training.adoption import adopt_in_step
from kerasdist._keras.unscoped_models import (
    apply_on_all,
    build_only,
    strategy_outside,
)
from kerasdist._tf.compiled_step import padded
from kerasdist._tf.marks import current_facets


def apply(
    original: Callable[..., Any],
    optimizer: Any,
    grads: Any,
    trainable_variables: Any = None,
) -> Any:
    """Replace `BaseOptimizer.apply` and `LossScaleOptimizer.apply`: reduce first."""
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    if current.building:
        build_only(optimizer, trainable_variables)
        return None
    outside = None
    if not current.reduced:
        outside = strategy_outside(trainable_variables or _variables_of(optimizer))
    if outside is not None:
        return apply_on_all(outside, optimizer, list(grads), trainable_variables)
    facets = current_facets()
    hooks: KerasHooks | None = facets.hooks
    if hooks is None and current.timed and not current.reduced:
        timer = facets.timer
        if timer is not None:
            # There is nothing to send, but the backward pass ends here.
            given = list(grads)
            with setting(reduced=True):
                given = timer.exchange(given, lambda after: given)
                return original(optimizer, given, trainable_variables)
    if hooks is None or current.reduced or tf.distribute.in_cross_replica_context():
        return original(optimizer, grads, trainable_variables)
    adopt_in_step(hooks, optimizer, trainable_variables or ())
    grads, scale = list(grads), 1
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    replicas, share = hooks.workers.replicas, None
    if replicas > 1 and current.rows is not None:
        share = current.share
    elif replicas > 1 and inner.gradient_accumulation_steps:
        # In custom loops gradients are summed. Keras accumulates each replica's own
        # and sums last: its accumulators hold values of the size of one replica's,
        # so here they hold the mean of the replicas.
        scale, share = replicas, tf.constant(1 / replicas)
    taken = current.taken
    kinds = [RAW if g is None or taken is None else taken.kind_of(g) for g in grads]
    window = (
        replicas > 1
        and hooks.elastic is None
        and WHOLE not in kinds
        and _has_windows(optimizer, trainable_variables)
    )

    def parts() -> list[Any]:
        """Return this replica's parts of those that aren't summed yet."""
        return [
            weighted(each, share) if kind == RAW and share is not None else each
            for each, kind in zip(grads, kinds, strict=True)
        ]

    def reduce(beside: Sequence[Any] = ()) -> list[Any]:
        reduced = exchange(
            *(facets, hooks.gradients.reduce),
            [None if k == WHOLE else g for g, k in zip(parts(), kinds, strict=True)],
            share,
            linear=_is_linear(inner),
            beside=beside,
            step=WHOLE not in kinds,
        )
        if _tf.in_parts() and _is_linear(inner):
            # How many different rows there are changes with each batch.
            with _tf.outside_of_xla():
                is_sparse = [isinstance(each, tf.IndexedSlices) for each in reduced]
                reduced = [
                    padded(each) if sparse else each
                    for each, sparse in zip(reduced, is_sparse, strict=True)
                ]
        for i, kind in enumerate(kinds):
            if kind == WHOLE:
                reduced[i] = grads[i]
        return reduced

    def update(reduced: list[Any]) -> Any:
        with setting(reduced=True, window=window, scale=scale):
            result = original(optimizer, reduced, trainable_variables)
        if hooks.workers.local_replicas == 1:
            share_reads(reduced, trainable_variables or _variables_of(optimizer))
        return result

    if current.late is not None and current.late(reduce, update):
        return None
    if not (window or all(kind == WHOLE for kind in kinds)):
        grads = reduce()
    elif window and current.rows is not None:
        # As large as those of one process, see `reduce.gradients`.
        weight = tf.cast(current.rows > 0, tf.float32) * replicas
        grads = [weighted(each, weight) for each in parts()]
    updated: list[Any] = []
    dynamic = hooks.dynamic
    if dynamic is not None and grads:
        updated = trainable_variables or inner._trainable_variables
    if dynamic is None or not updated:
        return update(grads)
    touched = touched_rows(inner, grads, updated)
    with dynamic.weights.sharing(inner, updated, touched):
        return update(grads)


def accumulate(
    original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any
) -> Any:
    """Replace `_backend_apply_gradients`: reduce in the step that updates."""
    facets = current_facets()
    hooks: KerasHooks | None = facets.hooks
    if hooks is not None and current.window:
        steps = optimizer.gradient_accumulation_steps
        own = optimizer._accumulated_gradients
        accumulators = [
            own[optimizer._get_variable_index(variable)].value
            for variable in trainable_variables
        ]
        last = tf.equal((own_steps(optimizer) + 1) % steps, 0)
        end_window = hooks.gradients.end_window
        grads = exchange(facets, end_window, grads, accumulators, last, steps)
    return original(optimizer, grads, trainable_variables)


def clip_gradients(
    original: Callable[..., Any], optimizer: Any, grads: Sequence[Any]
) -> Any:
    """Replace `BaseOptimizer._clip_gradients`: see `apply`."""
    if current.scale != 1:
        grads = [None if g is None else g * current.scale for g in grads]
    return original(optimizer, grads)


def skip_all_reduce(
    original: Callable[..., Any], optimizer: Any, grads_and_vars: Any
) -> Any:
    """Replace `TFOptimizer._all_reduce_sum_gradients`: do nothing after `apply`."""
    return grads_and_vars if current.reduced else original(optimizer, grads_and_vars)


def own_accumulators(optimizer: Any) -> list[Any]:
    """Return the Keras variables in which each replica adds up its own gradients."""
    if not getattr(optimizer, "built", False) or not _has_windows(optimizer, None):
        return []
    hooks = hooks_of(getattr(optimizer, "_distribution_strategy", None))
    if hooks is not None and hooks.elastic is not None:
        return []
    return list(optimizer._accumulated_gradients)


def open_window(optimizer: Any) -> list[Any]:
    """Return the variables with the sums since the last update; empty if none.

    They may be set to their mean over the replicas, which changes no number.
    """
    variables = own_accumulators(optimizer)
    if not variables:
        return []
    steps = int(own_steps(optimizer).numpy()) % optimizer.gradient_accumulation_steps
    return [variable.value for variable in variables] if steps else []


def finalize(original: Callable[..., Any], optimizer: Any, var_list: Any) -> Any:
    """Replace `BaseOptimizer.finalize_variable_values`, at the end of `fit`.

    It overwrites the weights with their averages. Each asynchronous worker has its own
    averages, so their mean is taken.
    """
    hooks = hooks_of(getattr(optimizer, "_distribution_strategy", None))
    if hooks is not None and hooks.dynamic is not None and optimizer.use_ema:
        hooks.consensus.average(
            [v.value for v in optimizer._model_variables_moving_average]
        )
    return original(optimizer, var_list)


def learning_rate(original: Callable[..., Any], optimizer: Any) -> Any:
    """Replace `BaseOptimizer._get_current_learning_rate`.

    A schedule is evaluated at the step count of all workers, and the factor of
    `ScaleLearningRate` is applied: see `learning_rate`.
    """
    return scaled(optimizer, _unscaled(original, optimizer))


def _unscaled(original: Callable[..., Any], optimizer: Any) -> Any:
    schedule = optimizer._learning_rate
    if isinstance(schedule, learning_rate_schedule.LearningRateSchedule):
        steps = shared_steps(optimizer)
        if steps is not None:
            return schedule(steps)
    return original(optimizer)


def _variables_of(optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "_trainable_variables", None) or ())


def _has_windows(optimizer: Any, variables: Any) -> bool:
    """Return whether the gradients of several steps are reduced at once."""
    if hasattr(optimizer, "inner_optimizer") or not getattr(
        optimizer, "gradient_accumulation_steps", None
    ):
        return False
    if variables is None:
        variables = optimizer._trainable_variables
    if any(getattr(v, "overwrite_with_gradient", False) for v in variables):
        return False
    theirs = base_optimizer.BaseOptimizer._backend_apply_gradients
    return type(optimizer)._backend_apply_gradients is theirs


def _is_linear(optimizer: Any) -> bool:
    """Return whether slices of one index may be summed before the optimizer gets them.

    Keras sums them itself where it accumulates gradients. Plain SGD adds or subtracts
    them, also with momentum, for which it makes them dense.
    """
    if optimizer.gradient_accumulation_steps:
        return True
    return type(optimizer) is sgd.SGD and not (
        optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
    )
