"""Gradients split into parts before they are reduced, and combined afterwards.

IndexedSlices consist of parts, told by the graph, see below. Of each is reduced:

    FIXED    the values, as a dense gradient among the others: nothing else is sent,
             because all replicas have the indices already
    KEYED    slices; those of one key are added up after all replicas' were gathered:
             the key is an index, and how many equal ones precede it on its replica
    ROWS     slices, which stay unchanged

If the constants of a script differ between workers (random numbers without a seed),
values that don't belong together would be added up: so a checksum is sent with them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._tf import tensor_origins
from kerasdist.strategies.reduce.workers import (
    Workers,
    concat_slices,
    in_all_replicas,
)

# Sums of IndexedSlices over the workers: one exchange for all tables.
#
# Slices are the gradient of an embedding: rows of a table, by their indices, some of
# which occur more than once. In one collective all workers get the slices of all
# tables, and small dense gradients are reduced beside them: see
# `kerasdist.collectives.row_exchange`.
#
# An optimizer that is linear in the slices may be given the sum of those of one index.
# Each worker adds up its own first, where that pays:
#
#     between hosts     always: fewer bytes are sent
#     inside a host     if that leaves at most `_FEW` of them: sending costs little, but
#                       every worker updates its table with each slice
#
# and if all workers have done so, and their slices are more bytes than the table has,
# the table is summed as a whole.
#
# Not every optimizer may be given that: Adam squares each slice by itself, and
# clipping takes the norm of the separate slices. Such an optimizer must get the slices
# of a single process, see `kerasdist.strategies.reduce.gradients`.

# The part of the slices that may be left for the sum to be cheaper: TensorFlow takes
# several times longer to update a row than to add one up, see benchmarks/fit.
_FEW = 0.85


def add_up(slices: Any) -> Any:
    """Return IndexedSlices with one slice per index, for those with several."""
    indices, places = tf.unique(slices.indices)
    return _added(slices, indices, places)


def _added(slices: Any, indices: Any, places: Any) -> Any:
    values = slices.values
    # Sums of 16 bits are computed in 32.
    wide = tf.cast(values, tf.float32) if values.dtype.size < 4 else values
    sums = tf.math.unsorted_segment_sum(wide, places, tf.size(indices))
    return tf.IndexedSlices(tf.cast(sums, values.dtype), indices, slices.dense_shape)


def _added_if_few(slices: Any) -> tuple[Any, Any]:
    """Return slices, added up if that leaves few of them, and whether they are."""
    indices, places = tf.unique(slices.indices)
    number = tf.cast(tf.size(slices.indices), tf.float32)
    few = tf.cast(tf.size(indices), tf.float32) <= _FEW * number

    def added() -> tuple[Any, Any]:
        sums = _added(slices, indices, places)
        return sums.values, sums.indices

    values, indices = tf.cond(few, added, lambda: (slices.values, slices.indices))
    if not tf.executing_eagerly():
        values.set_shape([None, *slices.values.shape[1:]])
        indices.set_shape([None])
    return tf.IndexedSlices(values, indices, slices.dense_shape), few


def rows_of(table: Any, dtype: Any = tf.int64) -> Any:
    """Return the rows of a tensor that aren't 0, as IndexedSlices.

    Args:
        table: A tensor of at least one dimension.
        dtype: The dtype of the indices.
    """
    there = tf.not_equal(table, 0)
    if table.shape.rank > 1:
        there = tf.reduce_any(there, axis=list(range(1, table.shape.rank)))
    indices = tf.where(there)[:, 0]
    return tf.IndexedSlices(
        tf.gather(table, indices), tf.cast(indices, dtype), tf.shape(table, tf.int64)
    )


def sum_over_workers(workers: Workers, slices: Sequence[Any]) -> list[Any]:
    """Sum slices over the workers.

    Args:
        workers: The workers that reduce together.
        slices: This worker's IndexedSlices, host tensors, one slice per index.

    Returns:
        The sums, the same on all workers: one slice per index if they were sent as a
        table, otherwise possibly several.
    """
    if workers.size == 1 or not slices:
        return list(slices)
    once = [tf.constant(True)] * len(slices)
    return workers.ops.exchange_rows(slices, once=once)[0]


def sum_of_slices(
    workers: Workers,
    slices: Sequence[Any],
    there: Any,
    *,
    linear: bool = False,
    dense: Sequence[Any] = (),
    beside: Sequence[Any] = (),
    step: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Sum slices over all replicas, in replica context.

    Args:
        workers: The workers that reduce together.
        slices: This replica's IndexedSlices.
        there: 1; or 0 for a replica without rows, which adds nothing.
        linear: Whether slices of one index may be added up.
        dense: Small dense gradients whose sums are wanted, too, for workers of one
            replica.
        beside: Small host tensors whose sums are wanted, likewise.
        step: Whether an optimizer step begins with it.

    Returns:
        IndexedSlices; then sums.
    """
    host = workers.host

    def exchange(slices: list[Any], there: Any) -> tuple[list[Any], Any]:
        once: list[Any] = []
        if linear and workers.ops.communicator.shares_memory:
            pairs = [_added_if_few(each) for each in slices]
            slices, once = [list(each) for each in zip(*pairs, strict=True)]
        elif linear:
            slices = [add_up(each) for each in slices]
            once = [tf.constant(True)] * len(slices)
        if workers.size == 1:
            return slices, []
        return workers.ops.exchange_rows(
            *(slices, there), once=once, dense=dense, beside=beside, step=step
        )

    if len(workers.devices) == 1:
        with tf.device(host):
            return exchange(list(slices), there)

    def merge(there: Any, *slices: Any) -> Any:
        with tf.device(host):
            present = workers.local(there)
            joined = [_joined(workers.local(s), present) for s in slices]
            reduced, _ = exchange(joined, tf.constant(1))
        return [_tf.broadcast_to_devices(each, workers.devices) for each in reduced]

    return list(in_all_replicas(workers, merge, there, *slices)), []


def _joined(parts: list[Any], present: list[Any]) -> Any:
    """Concatenate the replicas' slices; those without rows contribute none."""
    some = []
    for part, there in zip(parts, present, strict=True):
        kept = tf.where(there > 0, tf.shape(part.indices)[0], 0)
        values, indices = part.values[:kept], part.indices[:kept]
        some.append(tf.IndexedSlices(values, indices, part.dense_shape))
    return concat_slices(some)


# Parts of IndexedSlices, by the origin of their indices.
#
# How slices of several replicas are combined follows from the slices that one process
# would have, which the graph of a step shows, and not from the indices' values:
#
#     FIXED    nothing of the batch (`arange(T)`, a table of distances): one process has
#              this vector once, with the sum of all rows' values at each of its places
#     KEYED    the same, but as long as a sequence of the batch, which isn't known when
#              the step is traced; or each index once, because slices were added up over
#              the batch (the kernel of a `Dense` on sparse input): one slice per index
#     ROWS     all others, an embedding's tokens: one process has those of all rows
#
# A table that is looked up in several ways has a gradient of several parts.

FIXED = "fixed"
KEYED = "keyed"
ROWS = "rows"

# Results of operations that have each index once, by operation.
_ONCE = {
    *((f"Unique{kind}", 0) for kind in ("", "V2", "WithCounts", "WithCountsV2")),
    *((f"SparseSegment{kind}GradV2", 1) for kind in ("Mean", "SqrtN", "Sum")),
}


@dataclasses.dataclass(frozen=True, eq=False)
class SlicesPart:
    """A part of a gradient's slices.

    Attributes:
        kind: `FIXED`, `KEYED` or `ROWS`.
        slices: IndexedSlices.
    """

    kind: str
    slices: Any


def parts_of(slices: Any, *, apart: bool = False) -> list[SlicesPart]:
    """Split slices into their parts, in order.

    Args:
        slices: IndexedSlices of the graph that is traced; eager ones are `ROWS`,
            because their origin isn't known.
        apart: Whether parts of one kind are wanted apart, too.
    """
    if isinstance(slices.indices, tf.__internal__.EagerTensor):
        return [SlicesPart(ROWS, slices)]
    pieces = list(_pieces(slices.indices))
    kinds = [_kind(piece) for piece in pieces]
    if not apart and len(set(kinds)) == 1 and kinds[0] != KEYED:
        return [SlicesPart(kinds[0], slices)]
    values = _split(slices.values, pieces)
    indices = _split(slices.indices, pieces)
    return [
        SlicesPart(kind, tf.IndexedSlices(*part, slices.dense_shape))
        for kind, *part in zip(kinds, values, indices, strict=True)
    ]


def merge_micro_batches(slices: Any, micro_batch_of: Callable[[Any], Any]) -> Any:
    """Add up the slices that each micro-batch has, but one process has once.

    Each micro-batch looks up the constants of a model again. Of each lookup of one
    micro-batch the others have the same, in the same order.

    Args:
        slices: IndexedSlices of the graph that is traced.
        micro_batch_of: From a tensor to its micro-batch, as a call's number and its
            own; None if it belongs to none.

    Returns:
        IndexedSlices; the same ones if there's nothing to add up.
    """
    parts = parts_of(slices, apart=True)
    by_call: dict[Any, dict[Any, list[SlicesPart]]] = {}
    others: list[SlicesPart] = []
    for part in parts:
        found = None if part.kind == ROWS else micro_batch_of(part.slices.values)
        if found is None:
            others.append(part)
        else:
            call, number = found
            by_call.setdefault(call, {}).setdefault(number, []).append(part)
    merged: list[SlicesPart] = []
    for lookups in by_call.values():
        for same in itertools.zip_longest(*lookups.values()):
            merged += _merged(same)
    if len(merged) + len(others) == len(parts):
        return slices
    return concat_slices([part.slices for part in (*others, *merged)])


def _merged(parts: Sequence[SlicesPart | None]) -> list[SlicesPart]:
    """Return the parts of one lookup by all micro-batches as one; or unchanged."""
    found = [part for part in parts if part is not None]
    slices = [part.slices for part in found]
    if len({part.kind for part in found}) > 1:
        return found
    if all(_is_unique(each.indices) for each in slices):
        return [SlicesPart(KEYED, add_up(concat_slices(slices)))]
    indices: list[Any] = [tensor_origins.constant(each.indices) for each in slices]
    if not all(np.array_equal(one, indices[0]) for one in indices):
        return found
    total = tf.add_n([each.values for each in slices])
    return [SlicesPart(found[0].kind, _with_values(slices[0], total))]


def _with_values(slices: Any, values: Any) -> Any:
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)


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
        self._parts: list[list[SlicesPart]] = []
        self.pieces: list[Any] = []
        for gradient in gradients:
            parts: list[SlicesPart] = []
            if isinstance(gradient, tf.IndexedSlices):
                parts = parts_of(gradient)
                if linear:
                    parts = _for_linear(parts, gradient.dense_shape)
                self.pieces += map(_piece, parts)
            elif gradient is not None:
                self.pieces.append(gradient)
            self._parts.append(parts)
        fixed = [p for parts in self._parts for p in parts if p.kind == FIXED]
        self._checksum = None
        if fixed:
            self._checksum = _checksum([part.slices.indices for part in fixed])
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
                slices = [_whole(part, next(waiting)) for part in parts]
                whole.append(concat_slices(slices))
            else:
                whole.append(None if gradient is None else next(waiting))
        return whole


def _is_eager(tensor: Any) -> bool:
    return isinstance(tensor, tf.__internal__.EagerTensor)


def _for_linear(parts: list[SlicesPart], dense_shape: Any) -> list[SlicesPart]:
    """Return at most one part beside those that are sent unchanged."""
    rows = tf.get_static_value(dense_shape[0]) if dense_shape is not None else None

    def is_small(part: SlicesPart) -> bool:
        size = part.slices.indices.shape.num_elements()
        return part.kind == FIXED and (rows is None or (size or 0) <= rows)

    fixed = [part for part in parts if is_small(part)]
    others = [part for part in parts if not is_small(part)]
    if not others:
        return fixed
    return [*fixed, SlicesPart(ROWS, concat_slices([part.slices for part in others]))]


def _piece(part: SlicesPart) -> Any:
    slices = part.slices
    if part.kind == FIXED:
        return slices.values
    if part.kind == KEYED:
        keys = _keys(slices.indices)
        return tf.IndexedSlices(slices.values, keys, slices.dense_shape)
    return slices


def _whole(part: SlicesPart, reduced: Any) -> Any:
    slices = part.slices
    if part.kind == FIXED:
        return _with_values(slices, reduced)
    if part.kind == KEYED:
        keys, places = tf.unique(reduced.indices)
        values = tf.math.unsorted_segment_sum(reduced.values, places, tf.size(keys))
        indices = tf.cast(keys // _MOST, slices.indices.dtype)
        return tf.IndexedSlices(values, indices, slices.dense_shape)
    return reduced


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
    if tf.executing_eagerly():
        return pieces
    with tf.control_dependencies([check]):
        return [
            piece if isinstance(piece, tf.IndexedSlices) else tf.identity(piece)
            for piece in pieces
        ]
