"""Parts of IndexedSlices, by the origin of their indices.

How slices of several replicas are combined follows from the slices that one process
would have, which the graph of a step shows, and not from the indices' values:

    FIXED    nothing of the batch (`arange(T)`, a table of distances): one process has
             this vector once, with the sum of all rows' values at each of its places
    KEYED    the same, but as long as a sequence of the batch, which isn't known when
             the step is traced; or each index once, because slices were added up over
             the batch (the kernel of a `Dense` on sparse input): one slice per index
    ROWS     all others, an embedding's tokens: one process has those of all rows

A table that is looked up in several ways has a gradient of several parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist._tf.graph import tensor_origins

FIXED = "fixed"
KEYED = "keyed"
ROWS = "rows"

# Results of operations that have each index once, by operation.
_ONCE = {
    *((f"Unique{kind}", 0) for kind in ("", "V2", "WithCounts", "WithCountsV2")),
    *((f"SparseSegment{kind}GradV2", 1) for kind in ("Mean", "SqrtN", "Sum")),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A part of a gradient's slices.

    Attributes:
        kind: `FIXED`, `KEYED` or `ROWS`.
        values: A tensor of shape `(n, ...)`.
        indices: An integer tensor of shape `(n,)`.
    """

    kind: str
    values: Any
    indices: Any


def parts_of(slices: Any) -> list[Part]:
    """Split slices into their parts, in order.

    Args:
        slices: IndexedSlices of the graph that is traced; eager ones are `ROWS`,
            because their origin isn't known.
    """
    if isinstance(slices.indices, tf.__internal__.EagerTensor):
        return [Part(ROWS, slices.values, slices.indices)]
    pieces = list(_pieces(slices.indices))
    kinds = [_kind(piece) for piece in pieces]
    if len(set(kinds)) == 1 and kinds[0] != KEYED:
        return [Part(kinds[0], slices.values, slices.indices)]
    values = _split(slices.values, pieces)
    indices = _split(slices.indices, pieces)
    return [Part(*part) for part in zip(kinds, values, indices, strict=True)]


def _before(operation: Any) -> Any | None:
    """Return the input that an operation passes on in order; or None."""
    kind = operation.type
    if kind in tensor_origins.SAME_NUMBERS:
        return operation.inputs[0]
    if kind == "SelectV2" and operation.inputs[0].op.type == "Less":
        # Keras replaces indices that count from the end by those from the start.
        return operation.inputs[2]
    return None


def _pieces(indices: Any) -> Iterator[Any]:
    """Yield the vectors that a vector was concatenated from, in order.

    Each is yielded unchanged, because its shape is used in `_is_repeated`.
    """
    tensor = indices
    while not isinstance(tensor, tf.__internal__.EagerTensor):
        before = _before(tensor.op)
        if before is None:
            break
        tensor = before
    else:
        yield tensor
        return
    inputs = tensor.op.inputs
    if tensor.op.type == "ConcatV2" and tensor_origins.constant(inputs[-1]) == 0:
        for piece in inputs[:-1]:
            yield from _pieces(piece)
    else:
        yield tensor


def _split(tensor: Any, pieces: list[Any]) -> list[Any]:
    """Split a tensor along its first dimension as its indices were concatenated."""
    if len(pieces) == 1:
        return [tensor]
    operation = tensor.op
    if operation.type == "ConcatV2" and len(operation.inputs) == len(pieces) + 1:
        return list(operation.inputs[:-1])
    return list(tf.split(tensor, [tf.size(piece) for piece in pieces]))


def _kind(piece: Any) -> str:
    if isinstance(piece, tf.__internal__.EagerTensor):
        return ROWS if _is_repeated(piece) else FIXED
    origin = tensor_origins.origin_of(piece)
    if origin == tensor_origins.FIXED:
        if _is_repeated(piece):
            return ROWS
        return FIXED if piece.shape.is_fully_defined() else KEYED
    if origin == tensor_origins.SHAPES and _is_as_long_as_a_row(piece):
        return KEYED
    return KEYED if _is_unique(piece) else ROWS


def _is_unique(piece: Any) -> bool:
    """Return whether each index occurs once, because slices were added up."""
    tensor = tensor_origins.behind(piece, _before)
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return False
    return (tensor.op.type, tensor.value_index) in _ONCE


def _is_repeated(piece: Any) -> bool:
    """Return whether each row of a batch of known size looks up the same indices."""
    return _repeats(tensor_origins.constant(piece), piece)


def _repeats(value: Any | None, piece: Any) -> bool:
    if value is None or value.ndim < 2 or not len(value):
        return False
    if len(value) == 1:
        # Repeated once: scripts do that only for a batch.
        eager = isinstance(piece, tf.__internal__.EagerTensor)
        return not eager and piece.op.type in ("BroadcastTo", "Tile")
    return bool(np.all(value == value[:1]))


def _is_as_long_as_a_row(piece: Any) -> bool:
    """Return whether a vector made from shapes doesn't depend on the number of rows.

    TensorFlow computes its values for a batch of 5 rows, and for one of 7. Where the
    number of rows is known when the step is traced, they have the same length,
    repeated.
    """
    few, more = (
        tensor_origins.constant(tensor_origins.RebuiltGraph(rows).tensor(piece))
        for rows in (5, 7)
    )
    if few is None or more is None or not np.array_equal(few, more):
        return False
    return not _repeats(few, piece)
