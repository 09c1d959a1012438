"""Collectives on tensors by TensorFlow's own operations: nothing leaves the graph.

TensorFlow matches the operations of different workers by a number, the instance
key, which must be the same on all of them and new each time. It's the number of
the collective in the job, taken when it runs: so workers may trace their graphs at
different times, or again. `CollectiveOps` describes the order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist.strategies.local_sums import (
    group_options,
    make_tokens,
    reduce_on,
    reduce_one,
    sum_by_dtype,
)
from kerasdist.strategies.native_communicator import NativeCommunicator
from kerasdist.strategies.options import StrategyJob
from kerasdist.strategies.reduce.graph_ops import CollectiveOps, make_ops

# Slices of tables to all workers by TensorFlow's collectives, one after the other.


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


_MERGE = {"sum": "Add", "prod": "Mul", "min": "Min", "max": "Max"}
_REDUCED = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
# In TensorFlow, NCCL's dtypes.
_OF_NCCL = tuple(dtype for dtype in _REDUCED if dtype != tf.bfloat16)
# How dtypes that TensorFlow doesn't transfer are sent: cast, or bit by bit.
_CAST = {
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.bfloat16: tf.float32,
    tf.float16: tf.float32,
}
_BITS = {tf.uint64: tf.int64, tf.complex64: tf.int64}


class NativeOps(CollectiveOps):
    """Collectives between workers by TensorFlow, in graphs and eagerly.

    Gradients stay on the replicas' devices; all other tensors pass through host memory.

    Args:
        communicator: The communicator of the workers.
        host: The CPU device of this process.
        devices: This worker's devices, one per replica.
        replicas: Number of replicas over all workers.
    """

    def __init__(
        self,
        communicator: NativeCommunicator,
        host: str,
        devices: Sequence[str],
        replicas: int,
    ) -> None:
        super().__init__(communicator, host)
        self._native = communicator
        self._devices = list(devices)
        self._over_hosts = group_options(communicator.group, communicator.size, host)
        self._over_replicas = group_options(
            communicator.replica_group, replicas, devices[0]
        )
        self._tokens = make_tokens(devices)

    def failure(self, error: Exception) -> Exception | None:
        """See `CollectiveOps.failure`."""
        return self._native.translate(error)

    def all_reduce(
        self, tensors: Sequence[Any], op: str = "sum", *, step: bool = False
    ) -> list[Any]:
        """See `CollectiveOps.all_reduce`."""
        if any(tensor.dtype not in _REDUCED for tensor in tensors):
            return super().all_reduce(tensors, op, step=step)
        return [
            self._reduce_on_hosts(tensor, op, step=step and number == 0)
            for number, tensor in enumerate(tensors)
        ]

    def all_gather(self, tensor: Any, axis: int = 0) -> Any:
        """See `CollectiveOps.all_gather`."""
        if tensor.dtype in (tf.string, tf.complex128):
            return super().all_gather(tensor, axis)
        rank = tensor.shape.rank
        axis = axis % rank
        order = [axis, *(i for i in range(rank) if i != axis)]
        with tf.device(self._host):
            first = tf.transpose(tensor, order)
            flat = tf.reshape(_pack(first), [-1])
            counts = self._gather(tf.shape(first, tf.int64)[:1], "rows")
            # All have the same number of elements per row.
            width = tf.reduce_prod(tf.shape(first, tf.int64)[1:])
            # TensorFlow crashes when it gathers nothing.
            longest = tf.reduce_max(counts) * width + 1
            padded = tf.pad(flat, [[0, longest - tf.size(flat, tf.int64)]])
            every = tf.reshape(
                self._gather(padded, "elements"), [self._native.size, longest]
            )
            parts = [every[r, : counts[r] * width] for r in range(self._native.size)]
            shape = tf.concat(
                [[tf.reduce_sum(counts)], tf.shape(first, tf.int64)[1:]], 0
            )
            rows = tf.reshape(_unpack(tf.concat(parts, 0), tensor.dtype), shape)
            result = tf.transpose(rows, np.argsort(order))
        static = tensor.shape.as_list()
        static[axis] = None
        return tf.ensure_shape(result, static)

    def broadcast(self, tensor: Any) -> Any:
        """See `CollectiveOps.broadcast`."""
        if tensor.dtype not in (*_REDUCED, *_CAST, *_BITS):
            return super().broadcast(tensor)
        with tf.device(self._host):
            flat = tf.reshape(_pack(tensor), [-1])
            flat = tf.pad(flat, [[0, 1]])

            def give(key: Any) -> list[Any]:
                if self._native.rank == 0:
                    return [
                        tf.raw_ops.CollectiveBcastSendV2(
                            input=flat, instance_key=key, **self._over_hosts
                        )
                    ]
                return [
                    tf.raw_ops.CollectiveBcastRecvV2(
                        T=flat.dtype,
                        shape=tf.shape(flat),
                        instance_key=key,
                        **self._over_hosts,
                    )
                ]

            (given,) = self._collective("broadcast", "none", [flat], give)
            return tf.reshape(_unpack(given[:-1], tensor.dtype), tf.shape(tensor))

    def sum_gradients(
        self,
        gradients: Sequence[Any],
        there: Any,
        *,
        beside: Sequence[Any] = (),
        step: bool = False,
    ) -> list[Any]:
        """See `CollectiveOps.sum_gradients`."""
        parts = []
        with tf.device(self._devices[0]):
            for gradient in gradients:
                wide = tf.float64 if gradient.dtype == tf.float64 else tf.float32
                parts.append([_tf.weighted(tf.cast(gradient, wide), there)])
        found = self._sum_on_devices(parts, self._devices[:1], step=step)
        with tf.device(self._devices[0]):
            sums = [
                tf.ensure_shape(tf.cast(part, gradient.dtype), gradient.shape)
                for (part,), gradient in zip(found, gradients, strict=True)
            ]
        return [*sums, *(self.all_reduce(beside) if beside else ())]

    def exchange_rows(
        self,
        tables: Sequence[Any],
        there: Any = None,
        *,
        once: Sequence[Any] = (),
        dense: Sequence[Any] = (),
        beside: Sequence[Any] = (),
        step: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """See `CollectiveOps.exchange_rows`; one collective after the other."""
        # `there` is 0 on a worker that contributes none, whatever its slices hold.
        if there is not None:
            tables = [_if_any(table, there) for table in tables]
        sums: list[Any] = []
        if once:
            numbers = [tf.size(table.indices, tf.int64) for table in tables]
            (stacked,) = self.all_reduce([tf.stack(numbers)], step=step)
            sums, step = tf.unstack(stacked, len(numbers)), False
        small = list(dense)
        if small and there is None:
            small = self.all_reduce(small, step=step)
        elif small:
            small = self.sum_gradients(small, there, step=step)
        slices = [
            _sum(self, table, sums[place]) if once else _gathered(self, table)
            for place, table in enumerate(tables)
        ]
        return slices, [*small, *(self.all_reduce(beside) if beside else ())]

    def reduce_replicas(
        self, values: Sequence[Sequence[Any]], *, step: bool = False
    ) -> list[list[Any]] | None:
        """Sum over all replicas of all workers, on their devices.

        Args:
            values: For each value, a tensor per local replica.
            step: Whether an optimizer step begins with it.

        The same for the sums. None if it isn't possible: in eager execution a replica
        would wait for the next one, which is called only after it.
        """
        known = _REDUCED if ":GPU:" not in self._devices[0] else _OF_NCCL
        if (_tf.executing_eagerly() and len(self._devices) > 1) or any(
            value[0].dtype not in known for value in values
        ):
            return None
        return self._sum_on_devices(values, self._devices, step=step)

    def _sum_on_devices(
        self, values: Sequence[Sequence[Any]], devices: Sequence[str], *, step: bool
    ) -> list[list[Any]]:
        def reduce(buckets: list[Any], number: int) -> list[Any]:
            def build(key: Any) -> list[Any]:
                group = self._over_replicas
                return reduce_on(self._devices, buckets, self._tokens, key, group)

            first = step and number == 0
            return self._collective("all_reduce", "sum", buckets, build, step=first)

        return sum_by_dtype(values, devices, {}, reduce)

    # One collective each.

    def _reduce_on_hosts(self, tensor: Any, op: str, *, step: bool = False) -> Any:
        def reduce(key: Any) -> list[Any]:
            with tf.device(self._host):
                return [reduce_one(tensor, key, self._over_hosts, op=_MERGE[op])]

        return self._collective("all_reduce", op, [tensor], reduce, step=step)[0]

    def _gather(self, tensor: Any, what: str) -> Any:
        def gather(key: Any) -> list[Any]:
            with tf.device(self._host):
                return [
                    tf.raw_ops.CollectiveGatherV2(
                        input=tensor,
                        instance_key=key,
                        ordering_token=[],
                        name=f"kerasdist_gather_{what}",
                        **self._over_hosts,
                    )
                ]

        return self._collective("all_gather", "none", [tensor], gather)[0]

    def _collective(
        self,
        kind: str,
        op: str,
        tensors: Sequence[Any],
        build: Callable[[Any], list[Any]],
        *,
        step: bool = False,
    ) -> list[Any]:
        """Number a collective, run it after the one before it, and record its end.

        Args:
            kind: One of `framing.KINDS`.
            op: One of `framing.OPS`.
            tensors: The tensors of this worker's replicas.
            build: Makes the operations from the instance key.
            step: Whether an optimizer step begins with it.
        """
        first = tensors[0]
        elements = first.shape.num_elements() or 0
        detail = zlib.crc32(str(first.shape).encode())

        def begin() -> Any:
            if step:
                self._native.step += 1
            number = self._native.begin(kind, op, first.dtype.name, elements, detail)
            return np.int64(number)

        def end(number: Any) -> Any:
            self._native.end(int(number))
            return np.bool_(True)

        if _tf.executing_eagerly():
            number = begin()
            try:
                with tf.device(self._host):
                    key = tf.constant(number % 2**31, tf.int32)
                return build(key)
            except tf.errors.OpError as error:
                failure = self._native.translate(error)
                raise failure or error from error
            finally:
                end(number)
        return self._in_graph(begin, end, build)

    def _in_graph(
        self,
        begin: Callable[[], Any],
        end: Callable[[Any], Any],
        build: Callable[[Any], list[Any]],
    ) -> list[Any]:
        with tf.device(self._host):
            order = self._counter.assign_add(1, read_value=True)
            with tf.control_dependencies([order]):
                number = tf.numpy_function(begin, [], tf.int64, name="kerasdist_begin")
            number.set_shape([])
            key = tf.cast(number % 2**31, tf.int32)
        results = build(key)
        with tf.device(self._host), tf.control_dependencies(results):
            ended = tf.numpy_function(end, [number], tf.bool, name="kerasdist_end")
            self._hold_back([ended])
        return results


def _pack(tensor: Any) -> Any:
    if tensor.dtype in _BITS:
        return tf.bitcast(tensor, _BITS[tensor.dtype])
    return tf.cast(tensor, _CAST.get(tensor.dtype, tensor.dtype))


def _unpack(tensor: Any, dtype: Any) -> Any:
    if dtype in _BITS:
        return tf.bitcast(tensor, dtype)
    return tf.cast(tensor, dtype)


def make_native_ops(job: StrategyJob, devices: Sequence[str]) -> CollectiveOps:
    """Return a job's collectives on tensors of these devices: TensorFlow's own.

    Alone a worker has no communicator of TensorFlow's.
    """
    if not isinstance(job.communicator, NativeCommunicator):
        return make_ops(job, devices)
    host = _tf.host_of(devices[0])
    return NativeOps(job.communicator, host, devices, sum(job.replicas))
