"""The gradients of a global batch, as sums of the replicas' parts.

A replica with n of the N rows multiplies its loss by n / N before the backward pass. So
its gradient is a part of the global batch's, for every division of the rows, and in the
last batch of an epoch, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.context import current
from kerasdist._keras.protocols import StepTimer, WorkerHooks
from kerasdist.collectives.fused_buffer import in_buckets
from kerasdist.prediction.noise import GradientNorms
from kerasdist.strategies.reduce.compressed import compressed_sums
from kerasdist.strategies.reduce.sparse_parts import (
    SplitGradients,
    rows_of,
    sum_of_slices,
    sum_over_workers,
)
from kerasdist.strategies.reduce.workers import (
    Workers,
    gather_over_replicas,
    in_all_replicas,
    sum_in_host,
    sum_once_per_worker,
    sum_over_replicas,
)

# Gradient accumulation: the gradients of k steps are sent once.
#
# Keras adds up the gradients of k steps, a window, in variables, its accumulators, and
# updates the weights in the last of them:
#
#     a = 0;  steps 1..k-1:  a = a + g;  step k:  update with (g + a) / k, a = 0
#
# Here each replica adds up its own weighted gradients, and g + a of the last step is
# reduced: one collective of the gradients per window. Then `a` is set to 0, so that
# Keras continues with the gradients of the global batches.
#
# A replica's gradients are weighted by n_r / N x R: of N rows and R replicas it had
# n_r. So accumulators have the size of a single process's, and their mean over the
# replicas is the value of one process: at the end of an epoch, where they may be saved,
# all take that mean, which doesn't change the sum of the window.


def end_window(
    workers: Workers,
    gradients: Sequence[Any],
    accumulators: Sequence[Any],
    last: Any,
    steps: int,
    after: Sequence[Any] = (),
) -> list[Any]:
    """Reduce a window in its last step; in others return the gradients unchanged.

    In replica context. All ranks must be in the same step of the window.

    Args:
        workers: The workers that reduce together.
        gradients: Tensors or IndexedSlices: this replica's, weighted.
        accumulators: The variable to which each is added, of the same shape.
        last: Whether this is the window's last step, a scalar boolean tensor.
        steps: How many steps a window has.
        after: Tensors that all of this waits for.

    Returns:
        Tensors. In the last step the mean over the replicas of their windows' sums,
        the same on all replicas, and the accumulators are 0.
    """
    with tf.control_dependencies(after):
        copies = [workers.copies(a) for a in accumulators]
        sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]

        def end(values: list[list[Any]], last: Any) -> list[list[Any]]:
            def reduce() -> list[list[Any]]:
                own = []
                for parts, variables in zip(values, copies, strict=True):
                    mine = []
                    for part, variable in zip(parts, variables, strict=True):
                        with tf.device(variable.device):
                            mine.append(_wide(part) + _wide(variable.read_value()))
                            variable.assign(tf.zeros_like(variable))
                    own.append(mine)
                totals = map(
                    workers.local, _sums(workers, own, accumulators, sparse, steps)
                )
                replicas = workers.replicas
                return [
                    [tf.cast(total / replicas, parts[0].dtype) for total in local]
                    for local, parts in zip(totals, values, strict=True)
                ]

            return tf.cond(last, reduce, lambda: values)

        # Several replicas merge outside of the `tf.cond` of Keras.
        def merge(last: Any, *values: Any) -> Any:
            ended = end([*map(workers.local, values)], workers.local(last)[0])
            return [p[0] if len(p) == 1 else _tf.regroup(p) for p in ended]

        return list(in_all_replicas(workers, merge, last, *dense))


def _sums(
    workers: Workers,
    own: list[list[Any]],
    owners: Sequence[Any],
    sparse: list[bool],
    steps: int,
) -> list[list[Any]]:
    """Sum over all replicas; for sparse gradients only the rows that aren't 0."""
    tables = [values for values, there in zip(own, sparse, strict=True) if there]
    whole = [values for values, there in zip(own, sparse, strict=True) if not there]
    theirs = [each for each, there in zip(owners, sparse, strict=True) if not there]
    dense = iter(_sums_in_buckets(workers, whole, theirs, steps))
    with tf.device(workers.host):
        slices = [rows_of(tf.add_n(values)) for values in tables]
        summed = sum_over_workers(workers, slices)
        added = [tf.convert_to_tensor(s) for s in summed]
    copied = iter([_tf.broadcast_to_devices(table, workers.devices) for table in added])
    return [next(copied if there else dense) for there in sparse]


def _sums_in_buckets(
    workers: Workers, own: list[list[Any]], owners: Sequence[Any], steps: int
) -> list[list[Any]]:
    """Sum over all replicas, as part of the update."""
    parts = workers.replicas * steps
    sizes = [_tf.bytes_of(values[0]) for values in own]
    sums: list[list[Any]] = [[] for _ in own]
    for number, bucket in enumerate(in_buckets(sizes, workers.bucket_size)):
        values = [own[i] for i in bucket]
        if workers.memories.compressor is None:
            totals = _sum_of_local(workers, values, step=number == 0)
        else:
            some = [owners[i] for i in bucket]
            totals = _compressed_on_host(workers, values, some, parts)
        for i, total in zip(bucket, totals, strict=True):
            sums[i] = total
    return sums


def _compressed_on_host(
    workers: Workers, values: list[list[Any]], owners: Sequence[Any], parts: int
) -> list[list[Any]]:
    """Sum by the compressor; the replicas of a worker are added before that."""
    with tf.device(workers.host):
        sums = compressed_sums(
            workers,
            [tf.add_n(v) if len(v) > 1 else v[0] for v in values],
            owners,
            # A part of the mean, so that 16 bits hold it if they hold the gradients.
            tf.constant(1 / parts),
            workers.ops.all_reduce if workers.size > 1 else list,
            workers.ops.all_gather if workers.size > 1 else tf.identity,
        )
        sums = [total * tf.cast(parts, total.dtype) for total in sums]
    return [_tf.broadcast_to_devices(total, workers.devices) for total in sums]


def _sum_of_local(
    workers: Workers, values: list[list[Any]], *, step: bool
) -> list[Any]:
    """Sum each value over all replicas; each has a tensor for each local replica.

    Local replicas are added before the workers are. From there on the steps are those
    of a worker with one replica, because workers may have different numbers of
    replicas.
    """
    sums = workers.ops.reduce_replicas(values, step=step)
    if sums is not None:
        return [_tf.regroup(parts) for parts in sums]
    added = workers.ops.add_replicas(values)
    if workers.size > 1:
        with tf.device(workers.host):
            added = workers.ops.sum_gradients(added, tf.constant(1), step=step)
    return [_tf.broadcast_to_devices(total, workers.devices) for total in added]


def _wide(tensor: Any) -> Any:
    """Widen a tensor of 16 bits, because sums are computed in 32."""
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor


# The division of gradients into buckets, each sent by a collective of its own.
#
# The backward pass computes the gradients of the last layers first, so those are in the
# first bucket, which is sent while the rest of the pass still runs: TensorFlow starts a
# collective as soon as its own inputs are computed.
#
#     computing    | grad D | grad C | grad B | grad A |            | update
#     on the wire           |  bucket D, C    |   bucket B, A       |


# Up to this size the last bucket is sent with the slices, by one collective.
_MOST_BESIDE_BYTES = 64 << 10


def reduce_gradients(
    workers: Workers,
    log_once: Callable[[str, str], None],
    gradients: Sequence[Any],
    share: Any,
    *,
    linear: bool = False,
    after: Sequence[Any] = (),
    beside: Sequence[Any] = (),
    step: bool = True,
    owners: Sequence[Any] = (),
) -> list[Any]:
    """Sum gradients over all replicas of all workers, in replica context.

    Args:
        workers: The workers that reduce together.
        log_once: Logs a line on the chief, given its kind: on inexact results.
        gradients: One tensor or IndexedSlices per variable, or None.
        share: This replica's part of all rows, a float32 scalar: a replica without
            rows adds nothing, whatever its gradients hold. None in custom loops of
            `tf.distribute`, whose gradients may be as large as all replicas'.
        linear: Whether slices of one index may be added up: see `Returns`.
        after: Tensors that the last bucket waits for.
        beside: Host tensors that are summed over the workers, by the last collective,
            for workers of one replica.
        step: Whether an optimizer step begins with it.
        owners: The variable of each gradient, for compressors with a memory.

    Returns:
        Tensors (or None), the same on all replicas; then the sums. IndexedSlices are
        those that one process would have: Adam squares each slice by itself, and
        clipping takes the norm of them all. So slices of tokens stay unchanged, those
        of all replicas, in replica order; slices that one process has once are added
        up: see
        `kerasdist.strategies.reduce.sparse_parts`. If the optimizer is `linear` in
        the slices they are added up anyway, before they are sent, and sent as a
        whole table where that is less: see
        `kerasdist.strategies.reduce.sparse_parts`.
    """
    if workers.is_alone:
        return [*gradients, *beside]
    slices = [g for g in gradients if _is_slices(g)]
    # Without the table's shape they can't be sent as one.
    linear = linear and all(s.dense_shape is not None for s in slices)
    split = SplitGradients(gradients, linear=linear, share=share)
    pieces = split.pieces
    known = {id(g): owner for g, owner in zip(gradients, owners, strict=False)}

    def owner_of(piece: Any) -> Any:
        return known.get(id(piece))

    if share is None:
        replicas = workers.replicas
        wide = _sum_once(workers, pieces, owner_of)
        _warn_of_constants(split, wide, linear, log_once)
        sums = workers.ops.all_reduce(beside) if beside else []
        return [*split.combine(wide, replicas), *sums]
    there = tf.cast(share > 0, tf.int32)
    slices = [piece for piece in pieces if _is_slices(piece)]
    dense = [piece for piece in pieces if not _is_slices(piece)]

    buckets = _buckets(workers, dense)
    riding: list[int] = []
    if slices and buckets and _may_ride(workers, [dense[i] for i in buckets[-1]]):
        riding = buckets.pop()
    # The collective with the sums is the last one.
    with_slices = bool(slices) and len(workers.devices) == 1
    taken = (
        beside if buckets and workers.memories.compressor is None and not slices else ()
    )
    totals, sums = _sum_of_dense(
        *(workers, dense, buckets, there, () if slices else after, taken),
        owners=[owner_of(piece) for piece in dense],
        step=step,
    )
    gathered: list[Any] = []
    if slices:
        with tf.control_dependencies(after):
            gathered, small = sum_of_slices(
                workers,
                slices,
                there,
                linear=linear,
                dense=[dense[i] for i in riding],
                beside=beside if with_slices else (),
                step=step and not buckets,
            )
        for i, total in zip(riding, small, strict=False):
            totals[i] = total
        sums = small[len(riding) :]
    if beside and not (taken or with_slices):
        sums = workers.ops.all_reduce(beside)
    parts = {True: iter(gathered), False: iter(totals)}
    reduced = [next(parts[_is_slices(piece)]) for piece in pieces]
    _warn_of_constants(split, reduced, linear, log_once)
    return [*split.combine(reduced), *sums]


def _buckets(workers: Workers, gradients: list[Any]) -> list[list[int]]:
    return in_buckets([_tf.bytes_of(g) for g in gradients], workers.bucket_size)


def _may_ride(workers: Workers, bucket: list[Any]) -> bool:
    """Return whether a bucket is sent with the slices, and not by itself."""
    return (
        len(workers.devices) == 1
        and workers.memories.compressor is None
        and sum(_tf.bytes_of(gradient) for gradient in bucket) <= _MOST_BESIDE_BYTES
    )


def _warn_of_constants(
    split: SplitGradients,
    reduced: list[Any],
    linear: bool,
    log_once: Callable[[str, str], None],
) -> None:
    """Inform once that slices of eager steps may be added up differently."""
    if linear or not tf.executing_eagerly():
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


def _sum_of_dense(
    workers: Workers,
    gradients: list[Any],
    buckets: list[list[int]],
    there: Any,
    after: Sequence[Any],
    beside: Sequence[Any],
    *,
    owners: Sequence[Any],
    step: bool,
) -> tuple[list[Any], list[Any]]:
    """Sum buckets of gradients; the last one with what's beside.

    Returns:
        A sum for each gradient, None if it's in no bucket; then the sums beside.
    """
    totals: list[Any] = [None] * len(gradients)
    sums: list[Any] = []
    for number, bucket in enumerate(buckets):
        some = [gradients[i] for i in bucket]
        last = bucket is buckets[-1]
        with tf.control_dependencies(after if last else ()):
            if workers.memories.compressor is None:
                reduced = _sum_of_bucket(
                    *(workers, some, there, step and number == 0),
                    beside if last else (),
                )
                reduced, sums = reduced[: len(some)], reduced[len(some) :]
            else:
                theirs = [owners[i] for i in bucket]
                reduced = _compressed(workers, some, theirs, there, sum_over_replicas)
        for i, total in zip(bucket, reduced, strict=True):
            totals[i] = total
    return totals, sums


def _sum_once(
    workers: Workers, pieces: list[Any], owner_of: Callable[[Any], Any]
) -> list[Any]:
    """Sum pieces of gradients in a custom loop, see `sum_once_per_worker`."""
    if workers.memories.compressor is None:
        return sum_once_per_worker(workers, pieces)
    dense = [piece for piece in pieces if not _is_slices(piece)]
    slices = [piece for piece in pieces if _is_slices(piece)]
    replicas = workers.replicas
    sums = _compressed(
        *(workers, dense, [owner_of(piece) for piece in dense]),
        # A part of the mean, so that 16 bits hold it if they hold the gradients.
        tf.constant(1 / replicas),
        sum_once_per_worker,
    )
    waiting = {
        False: iter([total * tf.cast(replicas, total.dtype) for total in sums]),
        True: iter(sum_once_per_worker(workers, slices) if slices else ()),
    }
    return [next(waiting[_is_slices(piece)]) for piece in pieces]


def _compressed(
    workers: Workers,
    gradients: list[Any],
    owners: Sequence[Any],
    weight: Any,
    sum_up: Callable[[Workers, list[Any]], list[Any]],
) -> list[Any]:
    """Sum over all replicas by the compressor, in replica context."""
    replica = _tf.local_replica_id()
    return compressed_sums(
        *(workers, gradients, owners, weight),
        lambda tensors: sum_up(workers, list(tensors)),
        lambda tensor: gather_over_replicas(workers, tensor),
        replica=replica,
        device=workers.devices[replica],
        in_host=partial(sum_in_host, workers) if workers.sums_in_host else None,
        leads=workers.sends(replica),
    )


def _sum_of_bucket(
    workers: Workers,
    gradients: list[Any],
    there: Any,
    step: bool,
    beside: Sequence[Any],
) -> list[Any]:
    devices = workers.devices
    if len(devices) == 1:
        return workers.ops.sum_gradients(gradients, there, beside=beside, step=step)
    weighted = [_tf.weighted(gradient, there) for gradient in gradients]

    def merge(*weighted: Any) -> Any:
        return _sum_of_local(workers, [*map(workers.local, weighted)], step=step)

    return list(in_all_replicas(workers, merge, *weighted))


# Norms of each replica's gradients, and of their sum, measured where they are reduced.
#
#     gradients ──┬── reduce ──┬── update
#                 │            │
#               |own|^2     |mean|^2  ──>  sums in a variable, read now and then
#
# Nothing more is sent: workers exchange their sums when a callback does. Only steps
# that a clock measures have these operations, or all while a callback needs them.


class GradientNormMeter:
    """Sums norms over the steps of one worker.

    Args:
        workers: The workers that reduce together.
        timer: Measures their steps.
        host: The CPU device of this process.
        reduce: Reduces gradients, see `reduce.gradients.reduce_gradients`.

    Attributes:
        always: Whether each step is measured that is traced from here on.
    """

    def __init__(
        self,
        workers: WorkerHooks,
        timer: StepTimer,
        host: str,
        reduce: Callable[..., list[Any]],
    ) -> None:
        self.always = False
        self._workers = workers
        self._timer = timer
        self._host = host
        self._reduce = reduce
        self._sums: Any = None

    def read(self) -> GradientNorms:
        """Return the sums of all steps so far; eagerly."""
        if self._sums is None:
            return GradientNorms()
        return GradientNorms(*map(float, self._sums.numpy()))

    def reduce(self, gradients: Sequence[Any], share: Any, **options: Any) -> list[Any]:
        """Reduce gradients, and note their norms if this step is measured."""
        reduced = self._reduce(gradients, share, **options)
        measured = self.always or self._timer.marks
        # In custom loops nobody knows the rows.
        known = share is not None and current.rows is not None
        if measured and known and self._workers.replicas > 1:
            self._note(gradients, share, reduced[: len(gradients)])
        return reduced

    def _note(self, gradients: Sequence[Any], share: Any, sums: Sequence[Any]) -> None:
        replicas, first = self._workers.replicas, _tf.local_replica_id() == 0
        if self._sums is None:
            with tf.init_scope():
                self._sums = _tf.own_variable(
                    np.zeros(len(GradientNorms._fields)), tf.float64, self._host
                )
        with _tf.outside_of_xla():
            rows = tf.cast(current.total_rows, tf.float64)
            share = tf.cast(share, tf.float64)
            # Weighted by the share when the loss was: once is right.
            own = tf.math.divide_no_nan(_square(gradients), share)
            mean = _square(sums) if first else tf.zeros_like(own)
            with tf.device(self._host):
                one = tf.ones_like(own) if first else tf.zeros_like(own)
                per_row = tf.math.divide_no_nan(one, rows)
                found = tf.stack([one, own, own * rows, mean, mean * rows, per_row])
                # An overflow of 16 bits, and a batch without rows for all, say nothing.
                counts = (rows >= replicas) & tf.reduce_all(tf.math.is_finite(found))
                found = tf.where(counts, found, tf.zeros_like(found))
                self._sums.assign_add(found, read_value=False)


def _square(gradients: Sequence[Any]) -> Any:
    """Return the squared norm of all gradients; float64, scalar."""
    norms = []
    for gradient in gradients:
        if gradient is None:
            continue
        values = gradient
        if isinstance(gradient, tf.IndexedSlices):
            # Slices of one row are a sum.
            rows, where = tf.unique(gradient.indices)
            values = tf.math.unsorted_segment_sum(gradient.values, where, tf.size(rows))
        wide = tf.cast(values, tf.float32) if values.dtype.size < 4 else values
        norms.append(2 * tf.cast(tf.nn.l2_loss(wide), tf.float64))
    return tf.add_n(norms) if norms else tf.constant(0.0, tf.float64)
