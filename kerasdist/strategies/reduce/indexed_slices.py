"""Sums of IndexedSlices over the workers: one exchange for all tables.

Slices are the gradient of an embedding: rows of a table, by their indices, some of
which occur more than once. In one collective all workers get the slices of all tables,
and small dense gradients are reduced beside them: see
`kerasdist.collectives.row_exchange`.

An optimizer that is linear in the slices may be given the sum of those of one index.
Each worker adds up its own first, where that pays:

    between hosts     always: fewer bytes are sent
    inside a host     if that leaves at most `_FEW` of them: sending costs little, but
                      every worker updates its table with each slice

and if all workers have done so, and their slices are more bytes than the table has, the
table is summed as a whole.

Not every optimizer may be given that: Adam squares each slice by itself, and
clipping takes the norm of the separate slices. Such an optimizer must get the slices
of a single process, see `kerasdist.strategies.reduce.gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist.strategies.reduce.workers import Workers

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
    if not _tf.executing_eagerly():
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
        if linear and workers.ops.shares_memory:
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

    def merge(_: Any, there: Any, *slices: Any) -> Any:
        with tf.device(host):
            present = workers.local(there)
            joined = [_joined(workers.local(s), present) for s in slices]
            reduced, _ = exchange(joined, tf.constant(1))
        return [_tf.broadcast_to_devices(each, workers.devices) for each in reduced]

    replica = tf.distribute.get_replica_context()
    return list(replica.merge_call(merge, args=(there, *slices))), []


def _joined(parts: list[Any], present: list[Any]) -> Any:
    """Concatenate the replicas' slices; those without rows contribute none."""
    values = []
    indices = []
    for part, there in zip(parts, present, strict=True):
        kept = tf.where(there > 0, tf.shape(part.indices)[0], 0)
        values.append(part.values[:kept])
        indices.append(part.indices[:kept])
    return tf.IndexedSlices(
        tf.concat(values, 0), tf.concat(indices, 0), parts[0].dense_shape
    )
