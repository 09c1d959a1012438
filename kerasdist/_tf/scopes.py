"""Strategies' scopes: a way out of them for a while, and what keeps them alive.

`keep_graph` is a hook, see `patches`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from kerasdist._tf.marks import is_ours


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
