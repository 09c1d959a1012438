"""Counts and times of steps, summed where the steps run: in a graph, or eagerly."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist.collectives.ops import Array

# Counts of all steps, then counts and sums of times of the measured ones.
STEPS, ROWS, MEASURED, UPDATES = range(4)
BEGIN, READY, END, GRADIENTS, REDUCED = range(4, 9)
SLOTS = 9
# The number of a count's bits that are for samples.
_BITS = 40


class StepCounters:
    """The sums, by the numbers above: one variable in host memory.

    Args:
        host: The name of the host's device.
    """

    def __init__(self, host: str) -> None:
        self._totals = _tf.own_variable(np.zeros(SLOTS), tf.float64, host)
        # For steps that are only counted: steps in the upper bits, samples in the lower
        # ones. As one number they cost one small operation in each step.
        self._counted = _tf.own_variable(0, tf.int64, host)
        self._seen = 0
        # Times are relative to this: sums of small numbers are exact.
        self._base = time.time()
        self._eager = np.zeros(SLOTS)

    def read(self) -> Array:
        """Return all sums, float64 of shape (9,), times in seconds; eagerly.

        After more than 16 million steps or 10^12 samples between two calls the sums are
        wrong; the differences of later ones are right again.
        """
        now = int(self._counted.numpy())
        new = (now - self._seen) % (1 << 64)  # int64 wraps around
        self._seen = now
        self._eager[STEPS] += new >> _BITS
        self._eager[ROWS] += new & ((1 << _BITS) - 1)
        return np.asarray(self._totals.numpy()) + self._eager

    def count(self, rows: Any) -> None:
        """Count one step with its number of samples, in a graph, on the host; int64."""
        self._counted.assign_add(rows + (1 << _BITS), read_value=False)

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
