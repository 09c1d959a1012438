"""Distributed variables of kerasdist's strategies: their behavior and their creation.

`aggregate`, `to_float` and `to_int` are hooks, see `patches`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, distribute_utils

from kerasdist._tf.marks import current_facets, is_ours

# Strategies' scopes: a way out of them for a while, and what keeps them alive.
#
# `keep_graph` is a hook, see `patches`.


@contextlib.contextmanager
def outside_of_scopes() -> Iterator[None]:
    """Run the block as if it were in no strategy's scope.

    Variables that it creates are this process's alone. Outside of any scope nothing
    changes.
    """
    if not tf.distribute.has_strategy():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    creators = graph._variable_creator_stack
    graph._variable_creator_stack = [
        (priority, creator)
        for priority, creator in creators
        if "StrategyExtendedV2._scope." not in getattr(creator, "__qualname__", "")
    ]
    try:
        distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
        try:
            yield
        finally:
            distribute_lib._pop_per_thread_mode()
    finally:
        # The same list object: the scope that has set it compares it when it exits.
        graph._variable_creator_stack = creators


def keep_graph(original: Callable[..., Any], graphs: Any) -> None:
    """Replace `tf.compat.v1.reset_default_graph`, which `clear_session` calls.

    The default graph holds the stack of scopes that a thread is in. With a new graph
    models would silently be created outside of them, and leaving the scope would raise
    an IndexError. While no graph is built the old one holds nothing else that matters.
    """
    # All of kerasdist's strategies have a timer, and no others.
    ours = is_ours(tf.distribute.get_strategy())
    if not (ours and tf.executing_eagerly()):
        original(graphs)


# Calls of a loaded SavedModel's functions in a scope. A hook, see `patches`.


def call(
    original: Callable[..., Any], function: Any, args: Any, captured: Sequence[Any]
) -> Any:
    """Replace the call of a loaded function.

    Outside of a replica, such as at the top level of a script, TensorFlow doesn't know
    which replica's variables are meant, passes placeholders, and the call fails. All
    copies hold the same value, so this reads and writes the first one and copies it to
    the others. Within a replica TensorFlow traces the function once more.
    """
    ours = is_ours(tf.distribute.get_strategy())
    if not ours or not tf.distribute.in_cross_replica_context():
        return original(function, args, captured)
    variables = [c for c in captured if is_distributed(c)]
    handles = [c.values[0].handle if is_distributed(c) else c for c in captured]
    result = original(function, args, handles)
    for variable in variables:
        for copy in variable.values[1:]:
            copy.assign(variable.values[0])
    return result


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
