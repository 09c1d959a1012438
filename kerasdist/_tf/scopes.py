"""Strategies' scopes: leaves them for a while, and keeps them.

`keep_graph` is a hook, see `patches`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

__all__ = ["keep_graph", "outside_of_scopes"]


@contextlib.contextmanager
def outside_of_scopes() -> Iterator[None]:
    """What stands inside runs as if it stood in no strategy's scope.

    Variables that it creates are this process's alone. Outside of any scope it changes
    nothing.
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
        # The very list: the scope that has put it there looks for it when it ends.
        graph._variable_creator_stack = creators


def keep_graph(original: Callable[..., Any], graphs: Any) -> None:
    """In place of `tf.compat.v1.reset_default_graph`, as `clear_session` calls it.

    The scopes that a thread is in are kept by the graph: with the next one, models
    would silently be made outside of them, and the scope's end would be an IndexError.
    While no graph is built, nothing else of interest is in it.
    """
    # All of our strategies measure their steps.
    ours = hasattr(tf.distribute.get_strategy().extended, "timer")
    if not (ours and tf.executing_eagerly()):
        original(graphs)
