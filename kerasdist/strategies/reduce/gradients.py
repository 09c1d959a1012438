"""The mean gradient of a global batch, from each replica's mean over its rows.

A replica's loss is the mean over its own n_r rows, so its gradient is g_r, and the
global batch's gradient is sum(n_r g_r) / sum(n_r): the same for every division of
the rows, and right for the last batch of an epoch. The row counts are sent in the
bucket of the gradients: one round trip, not two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist.strategies.reduce.buckets import in_buckets
from kerasdist.strategies.reduce.indexed_slices import mean_of_slices
from kerasdist.strategies.reduce.replicas import sum_once_per_worker, sum_over_replicas
from kerasdist.strategies.reduce.sparse_parts import SplitGradients
from kerasdist.strategies.reduce.workers import Workers

__all__ = ["narrow", "reduce_gradients", "widen"]

# Up to this size the last bucket is sent with the slices, by one collective.
_MOST_BESIDE_BYTES = 64 << 10
_WIRE = {"bf16": tf.bfloat16, "fp16": tf.float16}


def reduce_gradients(
    workers: Workers,
    log_once: Callable[[str, str], None],
    gradients: Sequence[Any],
    rows: Any,
    total: Any = None,
    linear: bool = False,
    after: Sequence[Any] = (),
    beside: Sequence[Any] = (),
) -> list[Any]:
    """Reduce gradients over all replicas of all workers, in replica context.

    Args:
        workers: The workers that reduce together.
        log_once: Logs a line on the chief, given its kind: on inexact results.
        gradients: One tensor or IndexedSlices per variable, or None.
        rows: Number of rows that this replica's gradients are the mean over, a
            scalar integer tensor: the result is the mean over all rows. Or None:
            the result is the sum over the replicas, as in custom loops of
            `tf.distribute`.
        total: Number of rows of all replicas, if it's known: otherwise it's reduced,
            or sent with the gradients.
        linear: Whether slices of one index may be added up: see `Returns`.
        after: Tensors that the last bucket waits for.
        beside: Host tensors that are summed over the workers, by the last collective,
            for workers of one replica.

    Returns:
        Tensors (or None), the same on all replicas; then the sums. IndexedSlices are
        those that one process would have: Adam squares each slice by itself, and
        clipping takes the norm of them all. So slices of tokens stay unchanged, those
        of all replicas, in replica order; slices that one process has once are added
        up: see
        `kerasdist.strategies.reduce.index_origin`. If the optimizer is `linear` in
        the slices they are added up anyway, before they are sent, and sent as a
        whole table where that is less: see
        `kerasdist.strategies.reduce.indexed_slices`.
    """
    if workers.is_alone:
        return [*gradients, *beside]
    slices = [g for g in gradients if _is_slices(g)]
    # Without the table's shape they can't be sent as one.
    linear = linear and all(s.dense_shape is not None for s in slices)
    split = SplitGradients(gradients, linear=linear)
    pieces = split.pieces
    if rows is None:
        replicas = workers.replicas
        shares = [narrow(workers, piece, 1 / replicas) for piece in pieces]
        totals = sum_once_per_worker(workers, shares)
        wide = [
            widen(workers, total, piece, replicas)
            for total, piece in zip(totals, pieces, strict=True)
        ]
        _warn_of_constants(split, wide, linear, log_once)
        sums = workers.ops.all_reduce(beside) if beside else []
        return [*split.combine(wide, replicas), *sums]
    slices = [piece for piece in pieces if _is_slices(piece)]
    dense = [piece for piece in pieces if not _is_slices(piece)]

    buckets = _buckets(workers, dense)
    riding: list[int] = []
    if slices and buckets and _may_ride(workers, [dense[i] for i in buckets[-1]]):
        riding = buckets.pop()
    # The collective with the sums is the last one.
    with_slices = bool(slices) and len(workers.devices) == 1
    taken = beside if buckets and workers.compression is None and not slices else ()
    means, sums = _mean_of_dense(
        workers, dense, buckets, rows, total, () if slices else after, taken
    )
    gathered: list[Any] = []
    if slices:
        with tf.control_dependencies(after):
            gathered, small = mean_of_slices(
                workers,
                slices,
                rows,
                total,
                linear=linear,
                means=[dense[i] for i in riding],
                beside=beside if with_slices else (),
                step=not buckets,
            )
        for i, mean in zip(riding, small, strict=False):
            means[i] = mean
        sums = small[len(riding) :]
    if beside and not (taken or with_slices):
        sums = workers.ops.all_reduce(beside)
    parts = {True: iter(gathered), False: iter(means)}
    reduced = [next(parts[_is_slices(piece)]) for piece in pieces]
    _warn_of_constants(split, reduced, linear, log_once)
    return [*split.combine(reduced), *sums]


def _buckets(workers: Workers, gradients: list[Any]) -> list[list[int]]:
    return in_buckets([_bytes(g) for g in gradients], workers.bucket_size)


def _bytes(gradient: Any) -> int:
    return int((gradient.shape.num_elements() or 0) * gradient.dtype.size)


def _may_ride(workers: Workers, bucket: list[Any]) -> bool:
    """Return whether a bucket is sent with the slices, and not by itself."""
    return (
        len(workers.devices) == 1
        and workers.compression is None
        and sum(_bytes(gradient) for gradient in bucket) <= _MOST_BESIDE_BYTES
    )


def _warn_of_constants(
    split: SplitGradients,
    reduced: list[Any],
    linear: bool,
    log_once: Callable[[str, str], None],
) -> None:
    """Inform once that slices of eager steps may be added up differently."""
    if linear or not _tf.executing_eagerly():
        return
    if split.seem_constant(reduced):
        log_once(
            "eager slices",
            "kerasdist: all replicas have looked up the same rows of a table, in a "
            "step that runs eagerly. If they are constants (positions), an "
            "optimizer that isn't linear (Adam, clipping) gets them once for each "
            "replica, and its results differ from those of one process. In a "
            "`tf.function`, and without `run_eagerly=True`, the numbers are the "
            "same.",
        )


def _is_slices(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _mean_of_dense(
    workers: Workers,
    gradients: list[Any],
    buckets: list[list[int]],
    rows: Any,
    total: Any,
    after: Sequence[Any],
    beside: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Reduce buckets of gradients to their means; the last one with what's beside.

    Returns:
        A mean for each gradient, None if it's in no bucket; then the sums.
    """
    share = None
    if workers.compression is not None and buckets:
        share = _share(workers, rows, total)
    means: list[Any] = [None] * len(gradients)
    sums: list[Any] = []
    for number, bucket in enumerate(buckets):
        some = [gradients[i] for i in bucket]
        last = bucket is buckets[-1]
        with tf.control_dependencies(after if last else ()):
            if share is None:
                reduced = _mean_of_bucket(
                    *(workers, some, rows, total, number == 0, beside if last else ())
                )
                reduced, sums = reduced[: len(some)], reduced[len(some) :]
            else:
                shares = [narrow(workers, g, share) for g in some]
                totals = sum_over_replicas(workers, shares)
                reduced = [
                    widen(workers, t, g, 1) for t, g in zip(totals, some, strict=True)
                ]
        for i, mean in zip(bucket, reduced, strict=True):
            means[i] = mean
    return means, sums


def _share(workers: Workers, rows: Any, total: Any) -> Any:
    """Return this replica's rows divided by those of all: float32, scalar."""
    count = tf.cast(rows, tf.float32)
    if total is None:
        (total,) = sum_over_replicas(workers, [count])
    return tf.math.divide_no_nan(count, tf.cast(total, tf.float32))


def narrow(workers: Workers, gradient: Any, share: Any) -> Any:
    """Return a gradient's share of the mean, in the dtype in which it is sent.

    The share is computed before the cast: the sum of all shares isn't larger than the
    largest gradient, so 16 bits hold it if they hold the gradients.
    """
    if not _is_narrowed(workers, gradient):
        return gradient
    return tf.cast(_tf.weighted(gradient, share), _WIRE[str(workers.compression)])


def widen(workers: Workers, total: Any, gradient: Any, factor: int) -> Any:
    """Convert the sum of shares back to the dtype of `gradient` before `narrow`."""
    if not _is_narrowed(workers, gradient):
        return total
    return tf.cast(total, gradient.dtype) * tf.cast(factor, gradient.dtype)


def _is_narrowed(workers: Workers, gradient: Any) -> bool:
    return (
        workers.compression is not None
        and not _is_slices(gradient)
        and gradient.dtype.is_floating
    )


def _mean_of_bucket(
    workers: Workers,
    gradients: list[Any],
    rows: Any,
    total: Any,
    step: bool,
    beside: Sequence[Any],
) -> list[Any]:
    devices = workers.devices
    if len(devices) == 1:
        return workers.ops.weighted_mean(
            gradients, rows, total, beside=beside, step=step
        )
    host = _tf.host_of(devices[0])
    weighted = [_tf.weighted(gradient, rows) for gradient in gradients]

    # Local replicas are added before the workers are. From there on the steps are those
    # of a worker with one replica, because workers may have different numbers of
    # replicas.
    def merge(_: Any, rows: Any, total: Any, *weighted: Any) -> Any:
        values = [workers.local(value) for value in weighted]
        counts = workers.local(rows)
        known = None if total is None else workers.local(total)[0]
        floats = [tf.cast(count, tf.float32) for count in counts]
        sums = workers.ops.reduce_replicas([*values, floats], step=step)
        if sums is not None:
            *sums, totals = sums
            return [_tf.regroup(divided(parts, totals)) for parts in sums]
        added = workers.ops.add_replicas(values)
        with tf.device(host):
            count = tf.cast(tf.add_n(counts), tf.int64)
            some = tf.maximum(count, 1)
            means = [total / tf.cast(some, total.dtype) for total in added]
            reduced = means
            if workers.size > 1:
                reduced = workers.ops.weighted_mean(means, count, known, step=step)
        return [_tf.broadcast_to_devices(mean, devices) for mean in reduced]

    def divided(parts: list[Any], totals: list[Any]) -> list[Any]:
        means = []
        for part, total, device in zip(parts, totals, devices, strict=True):
            with tf.device(device):
                means.append(part / tf.cast(tf.maximum(total, 1.0), part.dtype))
        return means

    replica = tf.distribute.get_replica_context()
    return list(replica.merge_call(merge, args=(rows, total, *weighted)))
