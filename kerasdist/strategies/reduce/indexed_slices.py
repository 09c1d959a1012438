"""Sums of IndexedSlices over the workers: sparse or dense, whichever is less to send.

Slices are the gradient of an embedding: rows of a table, by their indices, some of
which occur more than once. They are added up here:

    1. each worker adds up its own slices of one index      nothing is sent
    2. all exchange their numbers of slices                 8 bytes for each table
    3. fewer bytes than the table has:  slices are gathered
       else:                            the whole table is summed

Not every optimizer may be given the result: Adam squares each slice by itself, and
clipping takes the norm of the separate slices. Such an optimizer must get the slices
of a single process, see `kerasdist.strategies.reduce.gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasdist.strategies.reduce.workers import Workers

__all__ = ["add_up", "rows_of", "sum_over_workers"]


def add_up(slices: Any) -> Any:
    """Return IndexedSlices with one slice per index, for those with several."""
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


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


def sum_over_workers(
    workers: Workers, slices: Sequence[Any], numbers: Sequence[Any] = ()
) -> tuple[list[Any], list[Any]]:
    """Sum slices, and some numbers, over the workers.

    Args:
        workers: The workers that reduce together.
        slices: This worker's IndexedSlices, host tensors, one slice per index.
        numbers: Scalar int64 tensors, which are sent with the numbers of slices.

    Returns:
        The sums of the slices, the same on all workers: one slice per index if they
        were sent as a table, otherwise possibly several; and the sums of the numbers.
    """
    if workers.size == 1:
        return list(slices), list(numbers)
    counts = [tf.size(s.indices, tf.int64) for s in slices]
    (totals,) = workers.ops.all_reduce([tf.stack([*numbers, *counts])])
    *sums, number_of_slices = tf.split(totals, [1] * len(numbers) + [len(slices)])
    reduced = [_sum(workers, s, number_of_slices[i]) for i, s in enumerate(slices)]
    return reduced, [tf.reshape(total, []) for total in sums]


def _sum(workers: Workers, slices: Any, total: Any) -> Any:
    """Sum one table's slices, of which there are `total` over all workers."""
    values, indices = slices.values, slices.indices
    rows = tf.cast(slices.dense_shape[0], tf.int64)
    row = tf.reduce_prod(tf.shape(values, tf.int64)[1:]) * values.dtype.size

    def gather() -> tuple[Any, Any]:
        return workers.ops.all_gather(values), workers.ops.all_gather(indices)

    def table() -> tuple[Any, Any]:
        dense = tf.math.unsorted_segment_sum(values, indices, rows)
        (dense,) = workers.ops.all_reduce([dense])
        return dense, tf.range(tf.cast(rows, indices.dtype), dtype=indices.dtype)

    few = total * (row + indices.dtype.size) < rows * row
    summed, where = tf.cond(few, gather, table)
    if not tf.executing_eagerly():
        summed.set_shape([None, *values.shape[1:]])
        where.set_shape([None])
    return tf.IndexedSlices(summed, where, slices.dense_shape)
