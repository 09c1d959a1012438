"""Distributed variables: what they do in our strategies, and how they are made.

The first are hooks, see `patches`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils

__all__ = ["aggregate", "distribute_copies", "is_distributed", "to_float", "to_int"]


def aggregate(
    original: Callable[..., Any], value: Any, aggregation: Any, destinations: Any
) -> Any:
    """In place of `apply_aggregation_replica_context`.

    TensorFlow brings the replicas together to take the first one's value of a variable
    of `ONLY_FIRST_REPLICA`, which it can't do inside `tf.cond`. While an extended
    object says `in_lockstep`, all replicas have the same value by construction, and
    each writes its own copy.
    """
    if aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA and getattr(
        tf.distribute.get_strategy().extended, "in_lockstep", False
    ):
        return value
    return original(value, aggregation, destinations)


def to_float(variable: Any) -> float:
    """Return the value: callbacks write `float(model.optimizer.learning_rate)`.

    TensorFlow's plain variables can be converted; its distributed ones can't.
    """
    return float(variable.numpy())


def to_int(variable: Any) -> int:
    """Return the value; see `to_float`."""
    return int(variable.numpy())


def is_distributed(variable: Any) -> bool:
    """Whether a variable belongs to a strategy: has a copy on each of its devices."""
    return isinstance(variable, tf.distribute.DistributedValues)


def distribute_copies(strategy: Any, copies: Sequence[Any], like: Any) -> Any:
    """One distributed variable whose copies are the given variables.

    What has been traced with one of them reads and writes the same memory.

    Args:
        strategy: A strategy that derives from `MirroredStrategy`.
        copies: One variable per local replica, each on its device.
        like: The Keras variable that it is for: says how replicas' writes are
            combined.
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
