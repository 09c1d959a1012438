"""Parts of IndexedSlices, by where their indices come from.

What becomes of slices that several replicas have follows from what one process would
have had, which the graph of a step shows, and not from what the indices hold:

    FIXED    nothing of the batch (`arange(T)`, a table of distances): one process has
             this vector once, with the sum of all rows' values at each of its places
    KEYED    the same, but as long as a sequence of the batch, which isn't known when
             the step is traced; or each index once, for slices were added up over the
             batch (the kernel of a `Dense` on sparse input): one slice for each index
    ROWS     all else, an embedding's tokens: one process has those of all rows

A table that is looked up in several ways has a gradient of several parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist._tf.graph import tensor_origins

__all__ = ["FIXED", "KEYED", "ROWS", "Part", "parts_of"]

FIXED = "fixed"
KEYED = "keyed"
ROWS = "rows"

# What leaves a vector's numbers and their order as they are.
_SAME = (
    "Cast",
    "CheckNumerics",
    "EnsureShape",
    "ExpandDims",
    "Identity",
    "PreventGradient",
    "Reshape",
    "Snapshot",
    "Squeeze",
    "StopGradient",
)
# Which result of which operation has each index once.
_ONCE = {
    *((f"Unique{kind}", 0) for kind in ("", "V2", "WithCounts", "WithCountsV2")),
    *((f"SparseSegment{kind}GradV2", 1) for kind in ("Mean", "SqrtN", "Sum")),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some of a gradient's slices.

    Attributes:
        kind: `FIXED`, `KEYED` or `ROWS`.
        values: A tensor of shape `(n, ...)`.
        indices: An integer tensor of shape `(n,)`.
    """

    kind: str
    values: Any
    indices: Any


def parts_of(slices: Any) -> list[Part]:
    """Take slices apart, in their order.

    Args:
        slices: IndexedSlices of the graph that is traced; eager ones are `ROWS`, for
            nothing tells what they were made from.
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
    """What an operation passes on, with its numbers in their order; else None."""
    kind = operation.type
    if kind in _SAME:
        return operation.inputs[0]
    if kind == "SelectV2" and operation.inputs[0].op.type == "Less":
        # Indices that count from the end, as Keras makes them count from the start.
        return operation.inputs[2]
    return None


def _pieces(indices: Any) -> Iterator[Any]:
    """What a vector was put together from, in its order.

    Each as it was: its shape tells something, see `_is_repeated`.
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
    """Divide a tensor along its first dimension as its indices were put together."""
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
    """Whether each index is in it once, for slices were added up."""
    tensor = tensor_origins.behind(piece, _before)
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return False
    return (tensor.op.type, tensor.value_index) in _ONCE


def _is_repeated(piece: Any) -> bool:
    """Whether each row of a batch of known size looks up the same: `tile(.., rows)`."""
    return _repeats(tensor_origins.constant(piece), piece)


def _repeats(value: Any | None, piece: Any) -> bool:
    if value is None or value.ndim < 2 or not len(value):
        return False
    if len(value) == 1:
        # Repeated once: nobody writes that but for a batch.
        eager = isinstance(piece, tf.__internal__.EagerTensor)
        return not eager and piece.op.type in ("BroadcastTo", "Tile")
    return bool(np.all(value == value[:1]))


def _is_as_long_as_a_row(piece: Any) -> bool:
    """Whether a vector made from shapes doesn't depend on the number of rows.

    TensorFlow finds its values for a batch of 5 rows, and for one of 7. Where the
    number of rows is known when the step is traced, they are as long, and repeated.
    """
    few, more = (
        tensor_origins.constant(tensor_origins.RebuiltGraph(rows).tensor(piece))
        for rows in (5, 7)
    )
    if few is None or more is None or not np.array_equal(few, more):
        return False
    return not _repeats(few, piece)
