"""Gradients split into parts before they are reduced, and combined afterwards.

IndexedSlices consist of parts, see `index_origin`. Of each is reduced:

    FIXED    the values, as a dense gradient among the others: nothing else is sent,
             because all replicas have the indices already
    KEYED    slices; those of one key are added up after all replicas' were gathered:
             the key is an index, and how many equal ones precede it on its replica
    ROWS     slices, which stay unchanged

If the constants of a script differ between workers (random numbers without a seed),
values that don't belong together would be added up: so a checksum is sent with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist.strategies.reduce.index_origin import (
    FIXED,
    KEYED,
    ROWS,
    Part,
    parts_of,
)

_DIFFERENT = (
    "Workers look up different rows of a table, by indices that don't depend on the "
    "data. Received: other indices on this worker than on another one. Make the same "
    "constants on all of them: call `keras.utils.set_random_seed(1)` before they are "
    "drawn."
)


class SplitGradients:
    """A list of gradients, split into the pieces that are reduced.

    Args:
        gradients: Tensors, IndexedSlices or None.
        linear: Whether slices of one index may be added up: then all but `FIXED` parts
            of a gradient stay together.
        share: This replica's part of the sums of `reduced`; None: they are sums of
            whole numbers, one for each replica.

    Attributes:
        pieces: Tensors and IndexedSlices.
    """

    def __init__(
        self, gradients: Sequence[Any], *, linear: bool, share: Any = None
    ) -> None:
        self._gradients = list(gradients)
        self._parts: list[list[Part]] = []
        self.pieces: list[Any] = []
        for gradient in gradients:
            parts: list[Part] = []
            if isinstance(gradient, tf.IndexedSlices):
                parts = parts_of(gradient)
                if linear:
                    parts = _for_linear(parts, gradient.dense_shape)
                self.pieces += [_piece(part, gradient) for part in parts]
            elif gradient is not None:
                self.pieces.append(gradient)
            self._parts.append(parts)
        fixed = [p for parts in self._parts for p in parts if p.kind == FIXED]
        self._checksum = _checksum([part.indices for part in fixed]) if fixed else None
        if self._checksum is not None:
            part = 1 if share is None else share
            self.pieces.append(self._checksum * part)

    def seem_constant(self, reduced: Sequence[Any]) -> bool:
        """Return whether eager slices of all replicas have the same indices.

        Then they may be constants, which only a graph can show: see `parts_of`.
        """
        for piece, whole in zip(self.pieces, reduced, strict=True):
            if isinstance(piece, tf.IndexedSlices) and _is_eager(piece.indices):
                mine, every = np.asarray(piece.indices), np.asarray(whole.indices)
                if mine.size and every.size > mine.size and not every.size % mine.size:
                    return bool(np.all(every.reshape(-1, mine.size) == mine))
        return False

    def combine(self, reduced: Sequence[Any], replicas: int = 1) -> list[Any]:
        """Combine the gradients from their reduced pieces.

        Args:
            reduced: One for each of `pieces`.
            replicas: The divisor of a sum over replicas of equal numbers.
        """
        pieces = list(reduced)
        if self._checksum is not None:
            pieces = _checked(pieces[:-1], pieces[-1] / replicas, self._checksum)
        waiting = iter(pieces)
        whole: list[Any] = []
        for gradient, parts in zip(self._gradients, self._parts, strict=True):
            if parts:
                slices = [_whole(part, next(waiting), gradient) for part in parts]
                whole.append(_concat(slices))
            else:
                whole.append(None if gradient is None else next(waiting))
        return whole


def _is_eager(tensor: Any) -> bool:
    return isinstance(tensor, tf.__internal__.EagerTensor)


def _for_linear(parts: list[Part], dense_shape: Any) -> list[Part]:
    """Return at most one part beside those that are sent unchanged."""
    rows = tf.get_static_value(dense_shape[0]) if dense_shape is not None else None

    def is_small(part: Part) -> bool:
        size = part.indices.shape.num_elements()
        return part.kind == FIXED and (rows is None or (size or 0) <= rows)

    fixed = [part for part in parts if is_small(part)]
    others = [part for part in parts if not is_small(part)]
    if not others:
        return fixed
    values = [part.values for part in others]
    indices = [part.indices for part in others]
    if len(others) > 1:
        return [*fixed, Part(ROWS, tf.concat(values, 0), tf.concat(indices, 0))]
    return [*fixed, Part(ROWS, *values, *indices)]


def _piece(part: Part, gradient: Any) -> Any:
    if part.kind == FIXED:
        return part.values
    indices = _keys(part.indices) if part.kind == KEYED else part.indices
    return tf.IndexedSlices(part.values, indices, gradient.dense_shape)


def _whole(part: Part, reduced: Any, gradient: Any) -> Any:
    if part.kind == FIXED:
        return tf.IndexedSlices(reduced, part.indices, gradient.dense_shape)
    if part.kind == KEYED:
        keys, places = tf.unique(reduced.indices)
        values = tf.math.unsorted_segment_sum(reduced.values, places, tf.size(keys))
        indices = tf.cast(keys // _MOST, part.indices.dtype)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return reduced


def _concat(slices: list[Any]) -> Any:
    if len(slices) == 1:
        return slices[0]
    return tf.IndexedSlices(
        tf.concat([part.values for part in slices], 0),
        tf.concat([part.indices for part in slices], 0),
        slices[0].dense_shape,
    )


# The greatest count of one index in one vector.
_MOST = 2**31


def _keys(indices: Any) -> Any:
    """Return a number for each slice: its index, and how many equal ones precede it."""
    order = tf.argsort(indices, stable=True)
    ordered = tf.gather(indices, order)
    places = tf.range(tf.size(ordered), dtype=tf.int64)
    # Where a run of equal indices begins.
    begins = tf.concat([[True], ordered[1:] != ordered[:-1]], 0)[: tf.size(ordered)]
    number = tf.cumsum(tf.cast(begins, tf.int64)) - 1
    starts = tf.boolean_mask(places, begins)
    before = places - tf.gather(starts, number)
    keys = tf.cast(ordered, tf.int64) * _MOST + before
    return tf.scatter_nd(order[:, None], keys, tf.shape(keys, out_type=order.dtype))


def _checksum(vectors: list[Any]) -> Any:
    """Return a number from 1/4 to 1 that depends on all indices in order: float32."""
    total = tf.constant(0, tf.int64)
    for vector in vectors:
        wide = tf.cast(vector, tf.int64) + 1
        places = tf.range(1, tf.size(wide, tf.int64) + 1, dtype=tf.int64)
        mixed = tf.math.floormod(wide * places * 2654435761 + places, 1_000_003)
        total = tf.math.floormod(total * 31 + tf.reduce_sum(mixed), 1_000_003)
    return 0.25 + 0.75 * tf.cast(total, tf.float32) / 1_000_003


def _checked(pieces: list[Any], mean: Any, mine: Any) -> list[Any]:
    """Make the pieces wait for the check that all workers have the same indices."""
    # With 16 bits it is rounded; and without any rows it is 0.
    same = (tf.abs(mean - mine) < 0.01) | tf.equal(mean, 0)
    check = tf.debugging.Assert(same, [_DIFFERENT])
    if _tf.executing_eagerly():
        return pieces
    with tf.control_dependencies([check]):
        return [
            piece if isinstance(piece, tf.IndexedSlices) else tf.identity(piece)
            for piece in pieces
        ]
