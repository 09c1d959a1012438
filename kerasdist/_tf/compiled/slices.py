"""Slices of few different lengths, for each of which XLA compiles a part."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def padded(slices: Any) -> Any:
    """Append zeros to slices that are added to a variable, to about a power of two.

    Args:
        slices: IndexedSlices, of which zeros at index 0 change nothing.
    """
    count = tf.shape(slices.indices)[0]
    bits = tf.cast(tf.maximum(count, 1), tf.float64)
    length = 2.0 ** tf.math.ceil(
        tf.math.log(bits) / tf.math.log(tf.cast(2, bits.dtype))
    )
    more = tf.maximum(tf.cast(length, tf.int32) - count, 0)
    rank = slices.values.shape.rank
    return tf.IndexedSlices(
        tf.pad(slices.values, [[0, more], *[[0, 0]] * (rank - 1)]),
        tf.pad(slices.indices, [[0, more]]),
        slices.dense_shape,
    )
