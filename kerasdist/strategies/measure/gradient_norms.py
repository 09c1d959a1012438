"""Norms of each replica's gradients, and of their sum, measured where they are reduced.

    gradients ──┬── reduce ──┬── update
                │            │
              |own|^2     |mean|^2  ──>  sums in a variable, read now and then

Nothing more is sent: workers exchange their sums when a callback does. Only steps that
a clock measures have these operations, or all while a callback needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.context import current
from kerasdist._keras.protocols import StepTimer, WorkerHooks
from kerasdist.prediction.noise import GradientNorms


class GradientNormMeter:
    """Sums norms over the steps of one worker.

    Args:
        workers: The workers that reduce together.
        timer: Measures their steps.
        host: The CPU device of this process.
        reduce: Reduces gradients, see `reduce.gradients.reduce_gradients`.

    Attributes:
        always: Whether each step is measured that is traced from here on.
    """

    def __init__(
        self,
        workers: WorkerHooks,
        timer: StepTimer,
        host: str,
        reduce: Callable[..., list[Any]],
    ) -> None:
        self.always = False
        self._workers = workers
        self._timer = timer
        self._host = host
        self._reduce = reduce
        self._sums: Any = None

    def read(self) -> GradientNorms:
        """Return the sums of all steps so far; eagerly."""
        if self._sums is None:
            return GradientNorms()
        return GradientNorms(*map(float, self._sums.numpy()))

    def reduce(self, gradients: Sequence[Any], share: Any, **options: Any) -> list[Any]:
        """Reduce gradients, and note their norms if this step is measured."""
        reduced = self._reduce(gradients, share, **options)
        measured = self.always or self._timer.marks
        # In custom loops nobody knows the rows.
        known = share is not None and current.rows is not None
        if measured and known and self._workers.replicas > 1:
            self._note(gradients, share, reduced[: len(gradients)])
        return reduced

    def _note(self, gradients: Sequence[Any], share: Any, sums: Sequence[Any]) -> None:
        replicas, first = self._workers.replicas, _tf.local_replica_id() == 0
        if self._sums is None:
            with tf.init_scope():
                self._sums = _tf.own_variable(
                    np.zeros(len(GradientNorms._fields)), tf.float64, self._host
                )
        with _tf.outside_of_xla():
            rows = tf.cast(current.total_rows, tf.float64)
            share = tf.cast(share, tf.float64)
            # Weighted by the share when the loss was: once is right.
            own = tf.math.divide_no_nan(_square(gradients), share)
            mean = _square(sums) if first else tf.zeros_like(own)
            with tf.device(self._host):
                one = tf.ones_like(own) if first else tf.zeros_like(own)
                per_row = tf.math.divide_no_nan(one, rows)
                found = tf.stack([one, own, own * rows, mean, mean * rows, per_row])
                # An overflow of 16 bits, and a batch without rows for all, say nothing.
                counts = (rows >= replicas) & tf.reduce_all(tf.math.is_finite(found))
                found = tf.where(counts, found, tf.zeros_like(found))
                self._sums.assign_add(found, read_value=False)


def _square(gradients: Sequence[Any]) -> Any:
    """Return the squared norm of all gradients; float64, scalar."""
    norms = []
    for gradient in gradients:
        if gradient is None:
            continue
        values = gradient
        if isinstance(gradient, tf.IndexedSlices):
            # Slices of one row are a sum.
            rows, where = tf.unique(gradient.indices)
            values = tf.math.unsorted_segment_sum(gradient.values, where, tf.size(rows))
        wide = tf.cast(values, tf.float32) if values.dtype.size < 4 else values
        norms.append(2 * tf.cast(tf.nn.l2_loss(wide), tf.float64))
    return tf.add_n(norms) if norms else tf.constant(0.0, tf.float64)
