"""Layers whose results depend on which replica computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.context import current
from kerasdist._keras.protocols import current_hooks

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
