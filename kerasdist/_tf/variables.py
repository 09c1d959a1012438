"""What distributed variables do in our strategies: hooks, see `patches`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__ = ["aggregate", "to_float", "to_int"]


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
