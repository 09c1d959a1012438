"""The mean gradient of a global batch, from each replica's mean over its rows.

A replica's loss is the mean over its own n_r rows, so its gradient is g_r, and the
global batch's gradient is sum(n_r g_r) / sum(n_r): the same for every division of
the rows, and right for the last batch of an epoch. The row counts travel in the
bucket of the gradients: one round trip, not two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist.strategies.reduce.buckets import in_buckets
from kerasdist.strategies.reduce.indexed_slices import add_up, sum_over_workers
from kerasdist.strategies.reduce.sparse_parts import TakenApart

if TYPE_CHECKING:
    from kerasdist.strategies.sync.extended import SynchronousExtended

__all__ = ["narrow", "reduce_gradients", "widen"]

_WIRE = {"bf16": tf.bfloat16, "fp16": tf.float16}


def reduce_gradients(
    extended: SynchronousExtended,
    gradients: Sequence[Any],
    rows: Any,
    total: Any = None,
    linear: bool = False,
    after: Sequence[Any] = (),
) -> list[Any]:
    """Reduce gradients over all replicas of all workers, in replica context.

    Args:
        extended: The strategy's extended object.
        gradients: One tensor or IndexedSlices per variable, or None.
        rows: Number of rows that this replica's gradients are the mean over, a
            scalar integer tensor: the result is the mean over all rows. Or None:
            the result is the sum over the replicas, as `tf.distribute` has it in
            custom loops.
        total: Number of rows of all replicas, if it's known: else it's asked for,
            or travels with the gradients.
        linear: Whether slices of one index may be added up: see `Returns`.
        after: What the last bucket waits for.

    Returns:
        Tensors (or None), the same on all replicas. IndexedSlices are those that one
        process would have: Adam squares each slice by itself, and clipping takes the
        norm of them all. So slices of tokens stay what they are, those of all replicas,
        in replica order; slices that one process has once are added up: see
        `kerasdist.strategies.reduce.index_origin`. If what becomes of the slices is
        `linear` in them they are added up anyway, before they are sent, and sent as a
        whole table where that is less: see
        `kerasdist.strategies.reduce.indexed_slices`.
    """
    if extended.is_alone:
        return list(gradients)
    slices = [g for g in gradients if _is_slices(g)]
    # Without the table's shape they can't become one.
    linear = linear and all(s.dense_shape is not None for s in slices)
    apart = TakenApart(gradients, linear=linear)
    pieces = apart.pieces
    if rows is None:
        replicas = extended.places[2]
        shares = [narrow(extended, piece, 1 / replicas) for piece in pieces]
        sums = extended.sum_gradients(shares)
        wide = [
            widen(extended, total, piece, replicas)
            for total, piece in zip(sums, pieces, strict=True)
        ]
        _look_at(extended, apart, wide, linear)
        return apart.together(wide, replicas)
    slices = [piece for piece in pieces if _is_slices(piece)]
    dense = [piece for piece in pieces if not _is_slices(piece)]
    means: Iterator[Any] = iter(())
    if dense:
        means = iter(_mean_of_dense(extended, dense, rows, total, after))
    gathered: Iterator[Any] = iter(())
    if slices and linear:
        gathered = iter(_mean_of_added_slices(extended, slices, rows))
    elif slices:
        gathered = iter(_mean_of_slices(extended, slices, rows, total))
    reduced = [next(gathered if _is_slices(piece) else means) for piece in pieces]
    _look_at(extended, apart, reduced, linear)
    return apart.together(reduced)


def _look_at(
    extended: SynchronousExtended, apart: TakenApart, reduced: list[Any], linear: bool
) -> None:
    """Say once that slices of eager steps may be added up otherwise."""
    if linear or not _tf.executing_eagerly() or extended.told_of_eager_slices:
        return
    if apart.look_constant(reduced):
        extended.told_of_eager_slices = True
        if extended.job.communicator.rank == 0:
            print(
                "kerasdist: all replicas have looked up the same rows of a table, in a "
                "step that runs eagerly. If they are constants (positions), an "
                "optimizer that isn't linear (Adam, clipping) gets them once for each "
                "replica, and makes other numbers of them than in one process. In a "
                "`tf.function`, and without `run_eagerly=True`, the numbers are the "
                "same.",
                flush=True,
            )


def _is_slices(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _mean_of_dense(
    extended: SynchronousExtended,
    gradients: list[Any],
    rows: Any,
    total: Any,
    after: Sequence[Any],
) -> list[Any]:
    """The mean of dense gradients, bucket by bucket."""
    sizes = [(g.shape.num_elements() or 0) * g.dtype.size for g in gradients]
    share = None
    if extended.compression is not None:
        share = _share(extended, rows, total)
    means: list[Any] = [None] * len(gradients)
    buckets = list(in_buckets(sizes, extended.bucket_size))
    for number, bucket in enumerate(buckets):
        some = [gradients[i] for i in bucket]
        with tf.control_dependencies(after if bucket is buckets[-1] else ()):
            if share is None:
                reduced = _mean_of_bucket(extended, some, rows, total, number == 0)
            else:
                shares = [narrow(extended, g, share) for g in some]
                sums = extended._replica_ctx_all_reduce(_tf.ReduceOp.SUM, shares)
                reduced = [
                    widen(extended, s, g, 1) for s, g in zip(sums, some, strict=True)
                ]
        for i, mean in zip(bucket, reduced, strict=True):
            means[i] = mean
    return means


def _share(extended: SynchronousExtended, rows: Any, total: Any) -> Any:
    """This replica's rows divided by those of all: float32, scalar."""
    count = tf.cast(rows, tf.float32)
    if total is None:
        (total,) = extended._replica_ctx_all_reduce(_tf.ReduceOp.SUM, [count])
    return tf.math.divide_no_nan(count, tf.cast(total, tf.float32))


def narrow(extended: SynchronousExtended, gradient: Any, share: Any) -> Any:
    """A gradient's share of the mean, as it crosses the network.

    The share is taken before the cast: the sum of all shares isn't larger than the
    largest gradient, so 16 bits hold it if they hold the gradients.
    """
    if not _is_narrowed(extended, gradient):
        return gradient
    return tf.cast(_tf.weighted(gradient, share), _WIRE[str(extended.compression)])


def widen(extended: SynchronousExtended, total: Any, gradient: Any, factor: int) -> Any:
    """The sum of shares as what `gradient` was before `narrow`."""
    if not _is_narrowed(extended, gradient):
        return total
    return tf.cast(total, gradient.dtype) * tf.cast(factor, gradient.dtype)


def _is_narrowed(extended: SynchronousExtended, gradient: Any) -> bool:
    return (
        extended.compression is not None
        and not _is_slices(gradient)
        and gradient.dtype.is_floating
    )


def _mean_of_bucket(
    extended: SynchronousExtended,
    gradients: list[Any],
    rows: Any,
    total: Any,
    step: bool,
) -> list[Any]:
    devices = extended.worker_devices
    if len(devices) == 1:
        return extended.ops.weighted_mean(gradients, rows, total, step=step)
    host = _tf.host_of(devices[0])
    weighted = [_tf.weighted(gradient, rows) for gradient in gradients]

    # Several local replicas are added before the workers are. From there on it's what
    # a worker with one replica does: workers may have different numbers of them.
    def merge(_: Any, rows: Any, total: Any, *weighted: Any) -> Any:
        values = [extended.local(value) for value in weighted]
        counts = extended.local(rows)
        known = None if total is None else extended.local(total)[0]
        floats = [tf.cast(count, tf.float32) for count in counts]
        sums = extended.ops.reduce_replicas([*values, floats], step=step)
        if sums is not None:
            *sums, totals = sums
            return [_tf.regroup(divided(parts, totals)) for parts in sums]
        with tf.device(host):
            count = tf.cast(tf.add_n(counts), tf.int64)
            some = tf.maximum(count, 1)
            means = [tf.add_n(v) / tf.cast(some, v[0].dtype) for v in values]
            reduced = means
            if extended.workers > 1:
                reduced = extended.ops.weighted_mean(means, count, known, step=step)
        return [_tf.broadcast_to_devices(mean, devices) for mean in reduced]

    def divided(parts: list[Any], totals: list[Any]) -> list[Any]:
        means = []
        for part, total, device in zip(parts, totals, devices, strict=True):
            with tf.device(device):
                means.append(part / tf.cast(tf.maximum(total, 1.0), part.dtype))
        return means

    replica = tf.distribute.get_replica_context()
    return list(replica.merge_call(merge, args=(rows, total, *weighted)))


def _mean_of_slices(
    extended: SynchronousExtended, gradients: list[Any], rows: Any, total: Any
) -> list[Any]:
    share = _share(extended, rows, total)
    weighted = []
    for gradient in gradients:
        # A replica without rows has none to give, whatever its slices hold.
        kept = tf.where(rows > 0, tf.shape(gradient.indices)[0], 0)
        values = gradient.values[:kept]
        weighted.append(
            tf.IndexedSlices(
                values * tf.cast(share, values.dtype),
                gradient.indices[:kept],
                gradient.dense_shape,
            )
        )
    return extended._replica_ctx_all_reduce(_tf.ReduceOp.SUM, weighted)


def _mean_of_added_slices(
    extended: SynchronousExtended, gradients: list[Any], rows: Any
) -> list[Any]:
    """The same, with slices of one index added up, or as whole tables."""
    dtypes = [gradient.dtype for gradient in gradients]
    host = _tf.host_of(extended.worker_devices[0])

    def mean(counts: list[Any], slices: list[list[Any]]) -> list[Any]:
        with tf.device(host):
            mine = [add_up(_concat(parts, counts)) for parts in slices]
            count = tf.cast(tf.add_n(counts), tf.int64)
            sums, (total,) = sum_over_workers(extended, mine, [count])
            return [
                tf.IndexedSlices(
                    tf.cast(
                        s.values / tf.cast(tf.maximum(total, 1), s.values.dtype), dtype
                    ),
                    s.indices,
                    s.dense_shape,
                )
                for s, dtype in zip(sums, dtypes, strict=True)
            ]

    if len(extended.worker_devices) == 1:
        return mean([rows], [[gradient] for gradient in gradients])

    def merge(_: Any, rows: Any, *gradients: Any) -> Any:
        return [
            _tf.broadcast_to_devices(slices, extended.worker_devices)
            for slices in mean(
                extended.local(rows), [extended.local(g) for g in gradients]
            )
        ]

    replica = tf.distribute.get_replica_context()
    return list(replica.merge_call(merge, args=(rows, *gradients)))


def _concat(parts: list[Any], counts: list[Any]) -> Any:
    """The replicas' slices, each times its replica's rows, in at least 32 bits."""
    values = []
    indices = []
    for part, count in zip(parts, counts, strict=True):
        # A replica without rows has none to give, whatever its slices hold.
        kept = tf.where(count > 0, tf.shape(part.indices)[0], 0)
        wide = part.values[:kept]
        if wide.dtype.size < 4:
            wide = tf.cast(wide, tf.float32)
        values.append(wide * tf.cast(count, wide.dtype))
        indices.append(part.indices[:kept])
    return tf.IndexedSlices(
        tf.concat(values, 0), tf.concat(indices, 0), parts[0].dense_shape
    )
