"""Adoption by the strategy of variables that were created outside of its scope.

Keras makes the variables of an optimizer or a metric where it is created: outside of
the scope they are this worker's alone. The strategy of the model that uses them is
known, and adopts them: each is wrapped in a distributed variable with the chief's
value, as variables are that are created inside.

    compile         runs inside of the scope of the model's strategy; its arguments
                    are adopted
    the first step  adopts the rest: metrics and optimizers in attributes, layers
                    that were built outside
    custom loops    adopt the optimizer and the weights at the first `apply`, a metric
                    at its first `update_state`, inside of `strategy.run`

A model that was itself created outside belongs to no strategy, unless it is used inside
of the scope: see `unscoped_models`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.context import current
from kerasdist._keras.optimizer.learning_rate import leaves, optimizers_of
from kerasdist._keras.placement.layers import placer_of
from kerasdist._keras.protocols import KerasHooks, current_hooks, hooks_of, timer_of
from kerasdist._keras.unscoped_models import check_not_local, is_in_use
from kerasdist._tf.variables import is_distributed

# Layers whose results depend on which replica computes them.

# Knuth's multiplicative constant: neighbouring replicas get distant seeds.
_SPREAD = 2654435761


def next_seed(original: Callable[..., Any], self: Any, *args: Any, **kw: Any) -> Any:
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


def synchronized_moments(
    original: Callable[..., Any], x: Any, axes: Any, keepdims: bool
) -> Any:
    """Replace the moments of `BatchNormalization(synchronized=True)`.

    They are the mean and variance over the rows of the global batch. There is one
    collective instead of three, and a replica without rows adds nothing.
    """
    hooks = current.hooks
    if hooks is None or hooks.workers.replicas == 1:
        return original(x, axes, keepdims)
    there = tf.cast(current.rows > 0, x.dtype)
    sums = _sum(
        tf.stack(
            [
                tf.reduce_sum(x, axis=axes, keepdims=True),
                tf.reduce_sum(tf.square(x), axis=axes, keepdims=True),
                tf.reduce_sum(tf.ones_like(x), axis=axes, keepdims=True),
            ]
        )
        * there,
        there,
    )
    mean = tf.math.divide_no_nan(sums[0], sums[2])
    square = tf.math.divide_no_nan(sums[1], sums[2])
    variance = tf.maximum(square - tf.square(mean), 0.0)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


def _sum(tensor: Any, there: Any) -> Any:
    """Sum over the replicas, whose gradients are parts of the global batch's."""
    hooks = current.hooks

    @tf.custom_gradient
    def summed(x: Any) -> Any:
        def backward(dy: Any) -> Any:
            mine = _tf.weighted(dy, there)
            return hooks.gradients.sum_over_replicas([mine])[0]  # type: ignore[union-attr]

        return hooks.gradients.sum_over_replicas([x])[0], backward  # type: ignore[union-attr]

    return summed(tensor)


def compile_model(
    original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace `compile`: it runs in the scope of the model's strategy, called anywhere.

    Variables that a user's own `compile` creates elsewhere are adopted later.
    """
    strategy = trainer._distribute_strategy
    hooks = hooks_of(strategy)
    if timer_of(strategy) is None or (hooks is not None and not is_in_use(hooks)):
        return original(trainer, *args, **kwargs)
    inside = tf.distribute.has_strategy()
    with contextlib.nullcontext() if inside else strategy.scope():
        result = original(trainer, *args, **kwargs)
    for optimizer in optimizers_of(trainer):
        _adopt_optimizer(strategy, optimizer)
    return result


def make_function(
    original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
) -> Any:
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
    if hooks is None:
        if timer_of(strategy) is not None:
            for optimizer in optimizers_of(trainer):
                _adopt_optimizer(strategy, optimizer)
        return
    if trainer._distribute_strategy is None:
        check_not_local(trainer)
        trainer._distribute_strategy = strategy
    for optimizer in optimizers_of(trainer):
        _adopt_optimizer(strategy, optimizer)
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


def assign(original: Callable[..., Any], variable: Any, value: Any) -> Any:
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
