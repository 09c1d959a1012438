"""Slices of tables to all workers by TensorFlow's collectives, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdist import _tf

if TYPE_CHECKING:
    from kerasdist.strategies.reduce.graph_ops import CollectiveOps

__all__ = ["exchange_rows"]


def exchange_rows(
    ops: CollectiveOps,
    tables: Sequence[Any],
    rows: Any,
    total: Any,
    once: bool,
    *,
    means: Sequence[Any],
    beside: Sequence[Any],
    step: bool,
) -> tuple[list[Any], list[Any]]:
    """See `CollectiveOps.exchange_rows`.

    Args:
        ops: Has the other collectives.
        tables: IndexedSlices.
        rows: Number of rows of this worker, or None.
        total: Number of rows of all, if it's known.
        once: Whether no index of any table occurs twice.
        means: Small tensors whose weighted means are wanted.
        beside: Small tensors whose sums are wanted.
        step: Whether an optimizer step begins with it.
    """
    numbers = []
    if rows is not None:
        # A worker without rows contributes none, whatever its slices hold.
        tables = [_if_any(table, rows) for table in tables]
        if total is None:
            numbers.append(tf.cast(rows, tf.int64))
    if once:
        numbers += [tf.size(table.indices, tf.int64) for table in tables]
    sums: list[Any] = []
    if numbers:
        (stacked,) = ops.all_reduce([tf.stack(numbers)], step=step)
        sums, step = tf.unstack(stacked, len(numbers)), False
    if rows is not None:
        if total is None:
            total, *sums = sums
        tables = [_times(table, rows, total) for table in tables]
    small = list(means)
    if small and rows is None:
        small = ops.all_reduce(small, step=step)
    elif small:
        small = ops.weighted_mean(small, rows, total, step=step)
    slices = [
        _sum(ops, table, sums[place]) if once else _gathered(ops, table)
        for place, table in enumerate(tables)
    ]
    return slices, [*small, *(ops.all_reduce(beside) if beside else ())]


def _if_any(table: Any, rows: Any) -> Any:
    count = tf.where(rows > 0, tf.size(table.indices), 0)
    return tf.IndexedSlices(
        table.values[:count], table.indices[:count], table.dense_shape
    )


def _times(table: Any, rows: Any, total: Any) -> Any:
    """Multiply slices by rows / total; those of 16 bits in 32."""
    values = table.values
    wide = tf.float32 if values.dtype.size < 4 else values.dtype
    share = tf.math.divide_no_nan(tf.cast(rows, wide), tf.cast(total, wide))
    values = tf.cast(tf.cast(values, wide) * share, values.dtype)
    return tf.IndexedSlices(values, table.indices, table.dense_shape)


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
