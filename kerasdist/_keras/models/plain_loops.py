"""Loops for one process, which differentiate and update outside of `strategy.run`.

    for x, y in dataset:
        with tf.GradientTape() as tape:
            loss = ...
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

Without intervention each worker would change its own copy of the weights. So the
workers' gradients are averaged there: if all read the same batches the numbers are
those of one process, and different batches count as one large batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasdist._keras.protocols import KerasHooks, hooks_of
from kerasdist._tf.variables import is_distributed

_REMEDY = (
    "To divide the batches among the workers, iterate over "
    "`strategy.experimental_distribute_dataset(dataset)`, and call the step by "
    "`strategy.run(step, args=(x, y))`, in which the loss is divided by the rows of "
    "the global batch; or train by `fit`."
)


def strategy_outside(variables: Sequence[Any]) -> Any | None:
    """Return the kerasdist strategy of variables; None in one of its replicas."""
    for variable in variables:
        value = getattr(variable, "_value", variable)
        strategy = getattr(value, "distribute_strategy", None)
        if is_distributed(value) and hooks_of(strategy) is not None:
            inside = tf.distribute.get_strategy() is strategy
            replica = inside and not tf.distribute.in_cross_replica_context()
            return None if replica else strategy
    return None


def copies_of(sources: Any) -> Any:
    """Return the tensors that a tape records for variables outside of replicas."""

    def copy(source: Any) -> Any:
        value = getattr(source, "_value", source)
        if not is_distributed(value):
            return source
        copies = value.distribute_strategy.experimental_local_results(value)
        return copies[0] if len(copies) == 1 else source

    return tf.nest.map_structure(copy, sources)


def apply_on_all(
    strategy: Any, optimizer: Any, gradients: Sequence[Any], variables: Any
) -> None:
    """Update with the mean of all workers' gradients; all workers call it alike.

    Raises:
        RuntimeError: The workers are asynchronous (`mode="async"`), or this worker has
            several replicas, of which a tape sees one.
    """
    hooks = hooks_of(strategy)
    if hooks is None:
        return
    if hooks.dynamic:
        raise RuntimeError(
            "With mode='async' each step takes a batch that no other worker has, and "
            "an optimizer updates inside of `strategy.run`. Received: "
            f"{type(optimizer).__name__}.apply outside of it. {_REMEDY}"
        )
    if hooks.workers.local_replicas > 1:
        raise RuntimeError(
            "With several replicas in a worker an optimizer updates inside of "
            f"`strategy.run`. Received: {type(optimizer).__name__}.apply outside of "
            f"it, with {hooks.workers.local_replicas} replicas in this worker. "
            f"{_REMEDY}"
        )
    if hooks.workers.communicator.size > 1:
        _inform(hooks)
    parts = [_part(gradient, hooks.workers.replicas) for gradient in gradients]

    def update(*parts: Any) -> None:
        optimizer.apply(list(parts), variables)

    with strategy.scope():
        strategy.run(update, args=tuple(parts))


def _inform(hooks: KerasHooks) -> None:
    hooks.log_once(
        "plain loop",
        "kerasdist: an optimizer updates outside of `strategy.run`. Each worker "
        "computes whole batches, and the workers' gradients are averaged: the same "
        "batches give the numbers of one process, and no speedup; different batches "
        "count as one large batch. " + _REMEDY,
    )


def _part(gradient: Any, replicas: int) -> Any:
    """Return a replica's part: gradients of replicas are summed in custom loops."""
    if gradient is None or replicas == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / replicas
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / replicas
