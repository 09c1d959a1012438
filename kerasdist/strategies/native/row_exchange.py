"""Slices of tables to all workers by TensorFlow's collectives, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdist import _tf

if TYPE_CHECKING:
    from kerasdist.strategies.reduce.graph_ops import CollectiveOps


def exchange_rows(
    ops: CollectiveOps,
    tables: Sequence[Any],
    there: Any,
    once: bool,
    *,
    dense: Sequence[Any],
    beside: Sequence[Any],
    step: bool,
) -> tuple[list[Any], list[Any]]:
    """See `CollectiveOps.exchange_rows`.

    Args:
        ops: Has the other collectives.
        tables: IndexedSlices.
        there: 1; or 0 for a worker that contributes none, whatever its slices hold.
        once: Whether no index of any table occurs twice.
        dense: Small gradients whose sums are wanted, too.
        beside: Small tensors whose sums are wanted.
        step: Whether an optimizer step begins with it.
    """
    if there is not None:
        tables = [_if_any(table, there) for table in tables]
    sums: list[Any] = []
    if once:
        numbers = [tf.size(table.indices, tf.int64) for table in tables]
        (stacked,) = ops.all_reduce([tf.stack(numbers)], step=step)
        sums, step = tf.unstack(stacked, len(numbers)), False
    small = list(dense)
    if small and there is None:
        small = ops.all_reduce(small, step=step)
    elif small:
        small = ops.sum_gradients(small, there, step=step)
    slices = [
        _sum(ops, table, sums[place]) if once else _gathered(ops, table)
        for place, table in enumerate(tables)
    ]
    return slices, [*small, *(ops.all_reduce(beside) if beside else ())]


def _if_any(table: Any, there: Any) -> Any:
    count = tf.where(there > 0, tf.size(table.indices), 0)
    return tf.IndexedSlices(
        table.values[:count], table.indices[:count], table.dense_shape
    )


def _gathered(ops: CollectiveOps, table: Any) -> Any:
    every = ops.all_gather(table.values), ops.all_gather(table.indices)
    return tf.IndexedSlices(*every, table.dense_shape)


def _sum(ops: CollectiveOps, table: Any, total: Any) -> Any:
    """Return all workers' slices of a table, or all its rows if that is less.

    Args:
        ops: Has the other collectives.
        table: This worker's slices, one per index.
        total: The number of slices of all workers.
    """
    values, indices = table.values, table.indices
    rows = tf.cast(table.dense_shape[0], tf.int64)
    row = tf.reduce_prod(tf.shape(values, tf.int64)[1:]) * values.dtype.size

    def gather() -> tuple[Any, Any]:
        every = _gathered(ops, table)
        return every.values, every.indices

    def whole() -> tuple[Any, Any]:
        dense = tf.math.unsorted_segment_sum(values, indices, rows)
        (dense,) = ops.all_reduce([dense])
        return dense, tf.range(tf.cast(rows, indices.dtype), dtype=indices.dtype)

    few = total * (row + indices.dtype.size) < rows * row
    summed, where = tf.cond(few, gather, whole)
    if not _tf.executing_eagerly():
        summed.set_shape([None, *values.shape[1:]])
        where.set_shape([None])
    return tf.IndexedSlices(summed, where, table.dense_shape)
