"""Updates of the weights that wait for the commit of their step.

A step that ends before its commit then hasn't changed what an optimizer updates: none
of it is kept (`shadow`), which would cost a copy, because values that are kept aren't
overwritten in place.

    forward, gradients ── metrics ── reduce both: the commit ── updates
                       └ `apply` returns here, and does its work there

That a step mustn't notice: while it is traced, operations are looked for that read or
write these variables after `apply`, or write them before. A step with one is traced
again with all updates where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasdist._tf.graph.resources import reads_or_writes


class LateUpdates:
    """The updates of one replica's step, which is being traced.

    Args:
        variables: TensorFlow's variables that optimizers update, as they are on this
            replica.
        parts: Returns what the last reduction is to sum beside gradients.
        commit: Is given the sums; returns what the updates wait for.

    Attributes:
        noticed: Whether the step would notice that updates are late.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        parts: Callable[[], Sequence[Any]],
        commit: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> None:
        self._variables = variables
        self._parts = parts
        self._commit = commit
        self._graph = tf.compat.v1.get_default_graph()
        self._before = len(self._graph.get_operations())
        self._first: int | None = None
        self._updates: list[tuple[Callable[..., Any], Callable[[Any], Any]]] = []
        self.noticed = False

    def add(
        self, reduce: Callable[..., list[Any]], update: Callable[[list[Any]], Any]
    ) -> bool:
        """Let an update run at the end of the step; return whether that's possible.

        Args:
            reduce: Reduces gradients; is given what it sums beside them, whose sums it
                returns after its results.
            update: Is given the reduced gradients.
        """
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._graph:
            self.noticed = True  # in a branch, or a function of its own
            return False
        if self._first is None:
            self._first = len(graph.get_operations())
        self._updates.append((reduce, update))
        return True

    def finish(self) -> None:
        """Commit the step, and run its updates."""
        operations = self._graph.get_operations()[self._before :]
        first = len(operations) if self._first is None else self._first - self._before
        _, written = reads_or_writes(self._graph, operations[:first], self._variables)
        after = reads_or_writes(self._graph, operations[first:], self._variables)
        self.noticed |= written or any(after)
        parts: Sequence[Any] = self._parts() if self._updates else ()
        sums: Sequence[Any] = ()
        reduced = []
        for number, (reduce, _) in enumerate(self._updates, 1):
            beside = parts if number == len(self._updates) else ()
            results = reduce(beside=beside)
            end = len(results) - len(beside)
            sums = results[end:]
            reduced.append(results[:end])
        with tf.control_dependencies(self._commit(sums)):
            for (_, update), gradients in zip(self._updates, reduced, strict=True):
                update(gradients)
