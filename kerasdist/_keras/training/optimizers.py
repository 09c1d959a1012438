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

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers import base_optimizer

from kerasdist import _tf
from kerasdist._keras.context import current, setting
from kerasdist._keras.global_batch.gradients import (
    RAW,
    WHOLE,
    exchange,
    summed_differentiably,
    weighted,
)
from kerasdist._keras.learning_rate import (
    leaves,
    optimizers_of,
    own_steps,
    scaled,
    shared_steps,
)
from kerasdist._keras.placement.layers import placer_of
from kerasdist._keras.protocols import KerasHooks, current_hooks, hooks_of, timer_of
from kerasdist._keras.training.weight_updates import share_tables, touched_rows
from kerasdist._keras.unscoped_models import (
    apply_on_all,
    build_only,
    check_not_local,
    in_use,
    strategy_outside,
)
from kerasdist._tf.compiled_step import padded
from kerasdist._tf.patching import Original
from kerasdist._tf.variables import current_facets, is_distributed

# Layers whose results depend on which replica computes them.

# Knuth's multiplicative constant: neighbouring replicas get distant seeds.
_SPREAD = 2654435761


def next_seed(original: Original, self: Any, *args: Any, **kw: Any) -> Any:
    """Replace `SeedGenerator.next`: each replica draws from its own stream.

    All replicas hold the same generator state, so that it can be saved and
    restored; the replica's number is added to the seed as it's drawn. Replica 0
    draws the same numbers as a single process.
    """
    seed = original(self, *args, **kw)
    hooks = current_hooks()
    if hooks is None or tf.distribute.in_cross_replica_context():
        return seed
    replica = hooks.workers.current_replica()
    if replica == 0:
        return seed
    bits = 31 if seed.dtype in ("int32", tf.int32) else 32
    offset = tf.constant([(replica * _SPREAD) % 2**bits, 0], tf.int64)
    return tf.cast(tf.cast(seed, tf.int64) + offset, seed.dtype)


def synchronized_moments(original: Original, x: Any, axes: Any, keepdims: bool) -> Any:
    """Replace `_compute_moments_sync`: moments of the global batch's rows.

    For `BatchNormalization(synchronized=True)`. There is one collective instead of
    three, and a replica without rows adds nothing.
    """
    hooks = current.hooks
    if hooks is None or hooks.workers.replicas == 1:
        return original(x, axes, keepdims)
    there = tf.cast(current.rows > 0, x.dtype)
    mine = tf.stack(
        [
            tf.reduce_sum(x, axis=axes, keepdims=True),
            tf.reduce_sum(tf.square(x), axis=axes, keepdims=True),
            tf.reduce_sum(tf.ones_like(x), axis=axes, keepdims=True),
        ]
    )
    total = hooks.gradients.sum_over_replicas
    (sums,) = summed_differentiably(total, [mine * there], there)
    mean = tf.math.divide_no_nan(sums[0], sums[2])
    square = tf.math.divide_no_nan(sums[1], sums[2])
    variance = tf.maximum(square - tf.square(mean), 0.0)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


# Adoption by the strategy of variables that were created outside of its scope.
#
# Keras makes the variables of an optimizer or a metric where it is created: outside of
# the scope they are this worker's alone. The strategy of the model that uses them is
# known, and adopts them: each is wrapped in a distributed variable with the chief's
# value, as variables are that are created inside.
#
#     compile         runs inside of the scope of the model's strategy; its arguments
#                     are adopted
#     the first step  adopts the rest: metrics and optimizers in attributes, layers
#                     that were built outside
#     custom loops    adopt the optimizer and the weights at the first `apply`, a metric
#                     at its first `update_state`, inside of `strategy.run`
#
# A model that was itself created outside belongs to no strategy, unless it is used
# inside of the scope: see `unscoped_models`.


def compile_model(original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `compile`: it runs in the scope of the model's strategy, called anywhere.

    Variables that a user's own `compile` creates elsewhere are adopted later.
    """
    strategy = trainer._distribute_strategy
    hooks = hooks_of(strategy)
    if timer_of(strategy) is None or (hooks is not None and hooks not in in_use):
        return original(trainer, *args, **kwargs)
    inside = tf.distribute.has_strategy()
    with contextlib.nullcontext() if inside else strategy.scope():
        result = original(trainer, *args, **kwargs)
    for optimizer in optimizers_of(trainer):
        _adopt_optimizer(strategy, optimizer)
    return result


def make_function(original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `make_train_function` and the like: adopt before a step is traced."""
    kind = original.__name__.removeprefix("make_")
    if getattr(trainer, kind) is None:
        adopt_model(trainer)
    return original(trainer, *args, **kwargs)


def adopt_model(trainer: Any) -> None:
    """Let a model's strategy adopt all variables of the model that aren't its own yet.

    All workers call it alike. A model that was created outside of any scope and is used
    inside of one belongs to that strategy from then on.

    Raises:
        ValueError: It is used inside of a scope and was trained by this worker alone.
    """
    strategy = trainer.distribute_strategy
    hooks = hooks_of(strategy)
    if timer_of(strategy) is None:
        return
    if hooks is not None and trainer._distribute_strategy is None:
        check_not_local(trainer)
        trainer._distribute_strategy = strategy
    for optimizer in optimizers_of(trainer):
        _adopt_optimizer(strategy, optimizer)
    if hooks is not None:
        _adopt(hooks, [*trainer.variables, *trainer.metrics_variables])


def adopt_in_step(hooks: KerasHooks, optimizer: Any, weights: Iterable[Any]) -> None:
    """Adopt an optimizer and the weights that it will update, in replica context.

    Raises:
        ValueError: See `assign`; for the weights.
    """
    strategy = tf.distribute.get_strategy()
    if getattr(optimizer, "_distribution_strategy", strategy) is not strategy:
        if hooks.workers.local_replicas == 1:
            _adopt_optimizer(strategy, optimizer)
        else:
            tf.distribute.get_replica_context().merge_call(
                lambda strategy: _adopt_optimizer(strategy, optimizer)
            )
    _adopt_in_replica(hooks, weights)


def assign(original: Original, variable: Any, value: Any) -> Any:
    """Replace `Variable.assign`: adopt a custom loop's metric at its first update.

    Raises:
        ValueError: This worker has several replicas, and one of them may have read the
            first one's variable.
    """
    if (
        variable.synchronization == "on_read"
        and variable._value is not None
        and not is_distributed(variable._value)
        and not tf.distribute.in_cross_replica_context()
    ):
        hooks = current_hooks()
        if hooks is not None:
            _adopt_in_replica(hooks, [variable])
    return original(variable, value)


def _adopt_optimizer(strategy: Any, optimizer: Any) -> None:
    """Let a strategy adopt an optimizer, and those that it wraps."""
    hooks = hooks_of(strategy)
    for each in {id(part): part for part in (optimizer, *leaves(optimizer))}.values():
        if getattr(each, "_distribution_strategy", strategy) is not strategy:
            _check_place(strategy, each)
            each._distribution_strategy = strategy
        if hooks is not None:
            _adopt(hooks, getattr(each, "variables", ()))


def _check_place(strategy: Any, optimizer: Any) -> None:
    """Check that an optimizer's variables can be beside those that they belong to.

    Raises:
        ValueError: They exist already, so they can't.
    """
    if placer_of(strategy) is not None and getattr(optimizer, "built", False):
        raise ValueError(
            "With a placement an optimizer's variables are on the devices of the "
            "weights that they belong to. Received: an optimizer that was built "
            f"outside of the scope of {type(strategy).__name__}: {optimizer!r}. Leave "
            "out its `build`, or create it inside `with strategy.scope():`."
        )


def _adopt_in_replica(hooks: KerasHooks, variables: Iterable[Any]) -> None:
    outside = [
        each
        for each in variables
        if getattr(each, "_value", None) is not None and not is_distributed(each._value)
    ]
    if outside and hooks.workers.local_replicas > 1:
        names = [variable.path for variable in outside]
        raise ValueError(
            "Variables were created outside of the strategy's scope, and a replica has "
            f"read them already. Received: {names[:5]} in `strategy.run` with "
            f"{hooks.workers.local_replicas} replicas in this worker. Create the "
            "metric or the model inside `with strategy.scope():`."
        )
    _adopt(hooks, outside)


def _adopt(hooks: KerasHooks, variables: Iterable[Any]) -> None:
    for variable in variables:
        value = getattr(variable, "_value", None)
        if value is not None and not is_distributed(value):
            variable._value = hooks.state.adopt(variable, value)


def apply(
    original: Original, optimizer: Any, grads: Any, trainable_variables: Any = None
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
    hooks.gradients.check(inner)
    replicas, share = hooks.workers.replicas, None
    rows, total = current.rows, None
    if replicas > 1 and rows is not None:
        share, total = current.share, current.total_rows
    elif replicas > 1 and inner.gradient_accumulation_steps:
        # In custom loops gradients are summed. Keras accumulates each replica's own
        # and sums last: its accumulators hold values of the size of one replica's,
        # so here they hold the mean of the replicas.
        scale, share = replicas, tf.constant(1 / replicas)
    elif hooks.local is not None and current.rows is not None:
        # A worker without rows moves by its momentum alone.
        share = tf.cast(current.rows > 0, tf.float32)
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
        own = [None if k == WHOLE else g for g, k in zip(parts(), kinds, strict=True)]
        # Perhaps the step is over, and so is its context.
        with setting(rows=rows, total=total):
            reduced = exchange(
                *(facets, hooks.gradients.reduce, own, share),
                linear=_is_linear(inner),
                beside=beside,
                step=WHOLE not in kinds,
                owners=trainable_variables or _variables_of(optimizer),
            )
        if _tf.in_parts() and _is_linear(inner):
            # How many different rows there are changes with each batch.
            with _tf.outside_of_xla():
                reduced = [
                    padded(each) if isinstance(each, tf.IndexedSlices) else each
                    for each in reduced
                ]
        for i, kind in enumerate(kinds):
            if kind == WHOLE:
                reduced[i] = grads[i]
        return reduced

    def update(reduced: list[Any]) -> Any:
        with setting(reduced=True, window=window, scale=scale):
            result = original(optimizer, reduced, trainable_variables)
        if hooks.workers.local_replicas == 1:
            share_tables(reduced, trainable_variables or _variables_of(optimizer))
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
    original: Original, optimizer: Any, grads: Any, trainable_variables: Any
) -> Any:
    """Replace `_backend_apply_gradients`: accumulate; reduce in steps that update."""
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


def clip_gradients(original: Original, optimizer: Any, grads: Sequence[Any]) -> Any:
    """Replace `_clip_gradients`: clip the sum of the replicas in a custom loop."""
    if current.scale != 1:
        grads = [None if g is None else g * current.scale for g in grads]
    return original(optimizer, grads)


def skip_all_reduce(original: Original, optimizer: Any, grads_and_vars: Any) -> Any:
    """Replace `TFOptimizer._all_reduce_sum_gradients`: do nothing after `apply`.

    Neither in a job of one worker with a placement: TensorFlow would pass all gradients
    through one operation, on one device.
    """
    facets = current_facets()
    nothing = facets.placer is not None and facets.hooks is None
    if current.reduced or nothing:
        return grads_and_vars
    return original(optimizer, grads_and_vars)


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


def finalize(original: Original, optimizer: Any, var_list: Any) -> Any:
    """Replace `finalize_variable_values`: take the mean of the workers' averages.

    At the end of `fit` it overwrites the weights with their averages (EMA), and each
    asynchronous worker has its own.
    """
    hooks = hooks_of(getattr(optimizer, "_distribution_strategy", None))
    if hooks is not None and hooks.dynamic is not None and optimizer.use_ema:
        hooks.consensus.average(
            [v.value for v in optimizer._model_variables_moving_average]
        )
    return original(optimizer, var_list)


def learning_rate(original: Original, optimizer: Any) -> Any:
    """Replace `_get_current_learning_rate`: evaluate at the steps of all workers.

    The factor of `ScaleLearningRate` is applied, too: see `learning_rate`.
    """
    schedule, steps = optimizer._learning_rate, None
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        steps = shared_steps(optimizer)
    rate = original(optimizer) if steps is None else schedule(steps)
    return scaled(optimizer, rate)


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
    return type(optimizer) is keras.optimizers.SGD and not (
        optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
    )
