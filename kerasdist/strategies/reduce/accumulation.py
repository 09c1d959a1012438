"""Gradient accumulation: the gradients of k steps are sent once.

Keras adds up the gradients of k steps, a window, in variables, its accumulators, and
updates the weights in the last of them:

    a = 0;  steps 1..k-1:  a = a + g;  step k:  update with (g + a) / k, a = 0

Here each replica adds up its own weighted gradients, and g + a of the last step is
reduced: one collective of the gradients per window. Then `a` is set to 0, so that Keras
continues with the gradients of the global batches.

A replica's gradients are weighted by n_r / N x R: of N rows and R replicas it had n_r.
So accumulators have the size of a single process's, and their mean over the replicas is
the value of one process: at the end of an epoch, where they may be saved, all take that
mean, which doesn't change the sum of the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist.strategies.reduce.gradients import in_buckets, narrow, widen
from kerasdist.strategies.reduce.sparse_parts import rows_of, sum_over_workers
from kerasdist.strategies.reduce.workers import Workers


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
        devices = workers.devices
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
                totals = _sums(workers, own, sparse, steps)
                replicas = workers.replicas
                return [
                    [tf.cast(total / replicas, parts[0].dtype) for total in local]
                    for local, parts in zip(totals, values, strict=True)
                ]

            return tf.cond(last, reduce, lambda: values)

        if len(devices) == 1:
            return [parts[0] for parts in end([[value] for value in dense], last)]

        # In a merge call, which can't be inside the `tf.cond` of Keras.
        def merge(_: Any, last: Any, *values: Any) -> Any:
            local = [workers.local(value) for value in values]
            return [_tf.regroup(part) for part in end(local, workers.local(last)[0])]

        replica = tf.distribute.get_replica_context()
        return list(replica.merge_call(merge, args=(last, *dense)))


def _sums(
    workers: Workers, own: list[list[Any]], sparse: list[bool], steps: int
) -> list[list[Any]]:
    """Sum over all replicas; for sparse gradients only the rows that aren't 0."""
    devices = workers.devices
    tables = [values for values, there in zip(own, sparse, strict=True) if there]
    whole = [values for values, there in zip(own, sparse, strict=True) if not there]
    dense = iter(_sums_in_buckets(workers, whole, steps))
    with tf.device(_tf.host_of(devices[0])):
        slices = [rows_of(tf.add_n(values)) for values in tables]
        summed = sum_over_workers(workers, slices)
        added = [tf.convert_to_tensor(s) for s in summed]
    copies = [_tf.broadcast_to_devices(table, devices) for table in added]
    copied = iter([workers.local(copy) for copy in copies])
    return [next(copied if there else dense) for there in sparse]


def _sums_in_buckets(
    workers: Workers, own: list[list[Any]], steps: int
) -> list[list[Any]]:
    """Sum over all replicas, in 16 bits if that is requested, as part of the update."""
    parts = workers.replicas * steps
    sizes = [
        (values[0].shape.num_elements() or 0) * values[0].dtype.size for values in own
    ]
    sums: list[list[Any]] = [[] for _ in own]
    for number, bucket in enumerate(in_buckets(sizes, workers.bucket_size)):
        sent = [[narrow(workers, v, 1 / parts) for v in own[i]] for i in bucket]
        totals = _sum_of_local(workers, sent, step=number == 0)
        for i, total in zip(bucket, totals, strict=True):
            sums[i] = [
                widen(workers, t, value, parts)
                for t, value in zip(total, own[i], strict=True)
            ]
    return sums


def _sum_of_local(
    workers: Workers, values: list[list[Any]], *, step: bool
) -> list[list[Any]]:
    """Sum each value over all replicas; each has a tensor for each local replica."""
    sums = workers.ops.reduce_replicas(values, step=step)
    if sums is not None:
        return sums
    devices = workers.devices
    with tf.device(_tf.host_of(devices[0])):
        local = [tf.add_n(v) if len(v) > 1 else v[0] for v in values]
    if workers.size > 1:
        local = workers.ops.all_reduce(local, step=step)
    copies = [_tf.broadcast_to_devices(total, devices) for total in local]
    return [workers.local(copy) for copy in copies]


def _wide(tensor: Any) -> Any:
    """Widen a tensor of 16 bits, because sums are computed in 32."""
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
