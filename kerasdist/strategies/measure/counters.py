"""Counts and times of steps, summed where the steps run: in a graph, or eagerly."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist.collectives.ops import Array

__all__ = [
    "BEGIN",
    "END",
    "GRADIENTS",
    "READY",
    "REDUCED",
    "ROWS",
    "SLOTS",
    "STEPS",
    "UPDATES",
    "StepCounters",
    "time_after",
    "time_after_all",
]

# Counts, then sums of times.
STEPS, ROWS, UPDATES = range(3)
BEGIN, READY, END, GRADIENTS, REDUCED = range(3, 8)
SLOTS = 8


class StepCounters:
    """The sums, by the numbers above: one variable in host memory.

    Args:
        host: The name of the host's device.
    """

    def __init__(self, host: str) -> None:
        self._totals = _tf.own_variable(np.zeros(SLOTS), tf.float64, host)
        # Times are relative to this: sums of small numbers are exact.
        self._base = time.time()
        self._eager = np.zeros(SLOTS)

    def read(self) -> Array:
        """Return all sums, float64 of shape (8,), times in seconds; eagerly."""
        return np.asarray(self._totals.numpy()) + self._eager

    def add(self, counts: dict[int, Any], times: dict[int, Any] | None = None) -> None:
        """Add to the sums, in a graph, on the host; times are those of `time_after`."""
        values, bases = [tf.constant(0, tf.float64)] * SLOTS, np.zeros(SLOTS)
        for slot, count in counts.items():
            values[slot] = tf.cast(count, tf.float64)
        for slot, read in (times or {}).items():
            values[slot], bases[slot] = read, self._base
        self._totals.assign_add(tf.stack(values) - bases, read_value=False)

    def add_eagerly(
        self, counts: dict[int, Any], times: dict[int, float] | None = None
    ) -> None:
        """Add to the sums; times are those of `time.time`."""
        for slot, count in counts.items():
            self._eager[slot] += float(count)
        for slot, read in (times or {}).items():
            self._eager[slot] += read - self._base


def time_after(values: Any) -> Any:
    """Return the time when all tensors of a nest are ready; float64, scalar, in s."""
    with tf.control_dependencies(_tensors(values)):
        return tf.timestamp()


def time_after_all(values: Any) -> Any:
    """Return the time when all local replicas are ready; in replica context."""

    def meet(strategy: Any, parts: Any) -> Any:
        return time_after([strategy.experimental_local_results(part) for part in parts])

    replica = tf.distribute.get_replica_context()
    return replica.merge_call(meet, args=(_tensors(values),))


def _tensors(values: Any) -> list[Any]:
    flat = tf.nest.flatten(values, expand_composites=True)
    return [value for value in flat if tf.is_tensor(value)]
