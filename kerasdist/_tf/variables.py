"""Distributed variables of kerasdist's strategies: their behavior and their creation.

`aggregate`, `to_float` and `to_int` are hooks, see `patches`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils

from kerasdist._tf.marks import current_facets


def aggregate(
    original: Callable[..., Any], value: Any, aggregation: Any, destinations: Any
) -> Any:
    """Replace `apply_aggregation_replica_context`.

    For a variable of `ONLY_FIRST_REPLICA` TensorFlow merges the replicas to take the
    first one's value, which it can't do inside `tf.cond`. While
    `StrategyExtensions.in_lockstep` holds, all replicas have the same value by
    construction, and each writes its own copy.
    """
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    if aggregation == first and current_facets().in_lockstep():
        return value
    return original(value, aggregation, destinations)


def to_float(variable: Any) -> float:
    """Return a distributed variable's value as a float.

    Callbacks write `float(model.optimizer.learning_rate)`. TensorFlow's plain variables
    can be converted, but not its distributed ones.
    """
    return float(variable.numpy())


def to_int(variable: Any) -> int:
    """Return a distributed variable's value as an int, see `to_float`."""
    return int(variable.numpy())


def of_tensorflow(variable: Any) -> Any:
    """Return TensorFlow's variable: of Keras's, whose `value` it is, or itself."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value


def is_distributed(variable: Any) -> bool:
    """Return whether a variable has a copy on each of a strategy's devices."""
    return isinstance(variable, tf.distribute.DistributedValues)


def distribute_copies(strategy: Any, copies: Sequence[Any], like: Any) -> Any:
    """Return one distributed variable whose copies are the given variables.

    Functions that were traced with one of them read and write the same memory.

    Args:
        strategy: A strategy that derives from `MirroredStrategy`.
        copies: One variable per local replica, each on its device.
        like: The Keras variable that it is for, which determines how replicas' writes
            are combined.
    """
    return distribute_utils.create_mirrored_variable(
        strategy,
        lambda **_: list(copies),
        distribute_utils.VARIABLE_CLASS_MAPPING,
        distribute_utils.VARIABLE_POLICY_MAPPING,
        synchronization=like._map_synchronization(like.synchronization),
        aggregation=like._map_aggregation(like.aggregation),
        trainable=like.trainable,
    )
