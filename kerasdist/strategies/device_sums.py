"""Sums over replicas by TensorFlow's collectives, on their devices.

    replica 0   gradients ─ bucket ─┐  ┌─ sum
    replica 1   gradients ─ bucket ─┼──┼─ sum      one group of devices
    replica 2   gradients ─ bucket ─┘  └─ sum

TensorFlow matches the operations of one collective by an instance key: a number that is
the same on all devices of the group, and new each time. Of one worker's replicas a
variable counts it, and no server is needed, since all devices are this process's. Of
all workers' ("native") it's the number of the collective in the job.
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist.collectives import Communicator
from kerasdist.strategies.native_communicator import NativeCommunicator
from kerasdist.strategies.options import StrategyJob
from kerasdist.strategies.reduce.graph_ops import CollectiveOps, make_ops

# The choice of where replicas and workers add their gradients, and what is said of it.
#
# one worker, several GPUs       on the GPUs, by NCCL
# several workers                each worker's GPUs by NCCL, then through host memory
# several workers, "native"      over all GPUs, by NCCL
# devices of the CPU             in host memory, where they are anyway

_LOG = logging.getLogger("kerasdist")
_NATIVE = (
    " transport='native' lets NCCL transfer them between GPUs; neither the job's "
    "secret nor TLS protects NCCL and TensorFlow's servers, which "
    "KERASDIST_ALLOW_OPEN_SERVERS=1 accepts."
)


def sums_on_devices(option: str, devices: Sequence[str]) -> bool:
    """Return whether a worker's replicas are added on their devices.

    Args:
        option: The argument `local_reduction`.
        devices: Canonical names of the worker's devices, one per replica.

    Raises:
        ValueError: The devices are of two kinds, which can't be added on them.
    """
    kinds = {name.rpartition(":")[0] for name in devices}
    if len(devices) == 1 or option == "host":
        return False
    if option == "auto":
        return len(kinds) == 1 and _are_gpus(devices)
    if len(kinds) > 1:
        raise ValueError(
            "Gradients can be added on devices of one kind only. Received: "
            f"local_reduction='device' with devices={list(devices)}. Use 'host', or "
            "GPUs alone."
        )
    return True


def communication_hint(device: str) -> str:
    """Return the implementation of TensorFlow's collectives for a kind of device.

    NCCL needs a physical GPU for each device; parts of one use TensorFlow's ring.
    """
    if ":GPU:" not in device:
        return "ring"
    physical = tf.config.list_physical_devices("GPU")
    logical = [d for d in tf.config.list_logical_devices("GPU") if _is_here(d.name)]
    return "ring" if len(physical) < len(logical) else "nccl"


def report(
    devices: Sequence[str],
    *,
    size: int,
    asked: str,
    transport: str,
    on_devices: bool,
    has_nccl: bool = True,
) -> None:
    """Log how gradients of GPUs are added. Nothing is logged for CPUs.

    Args:
        devices: Canonical names of this worker's devices.
        size: The number of workers.
        asked: The transport that the user has asked for.
        transport: The one between the workers; "none" for one worker.
        on_devices: Whether the worker's replicas are added on their devices.
        has_nccl: Whether transport="native" would be possible.
    """
    if not _are_gpus(devices) or transport == "native":
        return
    if size > 1 and asked == "auto":
        advice = _NATIVE if has_nccl else ""
        _LOG.warning(
            "kerasdist: the GPUs of %d workers exchange gradients through host memory "
            "(transport=%r, chosen by 'auto').%s Pass transport=%r to keep host memory "
            "without this warning.",
            size,
            transport,
            advice,
            transport,
        )
    if len(devices) == 1:
        return
    if on_devices:
        way = (
            "NCCL" if communication_hint(devices[0]) == "nccl" else "TensorFlow's ring"
        )
        _LOG.info(
            "kerasdist: %d GPUs of this worker add dense gradients by %s; those of "
            "embeddings (IndexedSlices) pass through host memory",
            len(devices),
            way,
        )
    else:
        _LOG.warning(
            "kerasdist: %d GPUs of this worker add gradients in host memory. Expected "
            "a RingStrategy that isn't elastic, with local_reduction='auto' and GPUs "
            "alone, to add them by NCCL.",
            len(devices),
        )


def report_servers(devices: Sequence[str]) -> None:
    """Log that the gradients of GPUs pass through host memory on the way to servers."""
    if _are_gpus(devices):
        _LOG.info(
            "kerasdist: parameter servers hold the weights in host memory: the "
            "gradients of GPUs pass through it"
        )


def _are_gpus(devices: Sequence[str]) -> bool:
    return all(":GPU:" in name for name in devices)


def _is_here(name: str) -> bool:
    job = tf.DeviceSpec.from_string(name)
    mine = tf.DeviceSpec.from_string(tf.config.list_logical_devices("CPU")[0].name)
    return (job.job, job.task) == (mine.job, mine.task)


# Sums on devices by TensorFlow's collectives: of one worker, and of all.


def group_options(key: int, size: int, device: str) -> dict[str, Any]:
    """Return the arguments that all of TensorFlow's collective operations have.

    Args:
        key: The group's key.
        size: Number of its devices.
        device: One of its devices, which are all of one kind.
    """
    return {
        "group_size": size,
        "group_key": key,
        "communication_hint": communication_hint(device),
        # See `kerasdist.strategies.native_communicator`.
        "timeout_seconds": 0,
    }


def make_tokens(devices: Sequence[str]) -> list[Any]:
    """Return a variable on each device, whose handle orders a replica's collectives.

    TensorFlow runs operations with side effects one after the other, unless each has a
    token of its own: otherwise the replicas would wait for each other.
    """
    tokens = []
    for device in devices:
        with tf.init_scope(), tf.device(device):
            tokens.append(tf.Variable(0.0, trainable=False))
    return tokens


def reduce_on(
    devices: Sequence[str],
    buckets: Sequence[Any],
    tokens: Sequence[Any],
    key: Any,
    group: dict[str, Any],
) -> list[Any]:
    """Sum a bucket of each device over a group.

    Args:
        devices: This worker's devices.
        buckets: A tensor on each of them.
        tokens: See `make_tokens`.
        key: The collective's instance key.
        group: See `group_options`.
    """
    reduced = []
    for device, bucket, token in zip(devices, buckets, tokens, strict=True):
        with tf.device(device):
            reduced.append(
                tf.raw_ops.CollectiveReduceV2(
                    input=bucket,
                    instance_key=key,
                    ordering_token=[token.handle],
                    merge_op="Add",
                    final_op="Id",
                    name="kerasdist_reduce",
                    **group,
                )
            )
    return reduced


# Dtypes that devices add. Sums of 16 bits are computed in 32; bfloat16 isn't among
# NCCL's dtypes in TensorFlow anyway.
_ADDED = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_WIDER = {tf.bfloat16: tf.float32, tf.float16: tf.float32}
_KEYS = 2**31


def _can_be_added(values: Sequence[Sequence[Any]]) -> bool:
    return all(value[0].dtype in _ADDED for value in values)


def sum_by_dtype(
    values: Sequence[Sequence[Any]],
    devices: Sequence[str],
    reduce: Callable[[list[Any], int], list[Any]],
) -> list[list[Any]]:
    """Add each value over the replicas, those of a dtype by one collective.

    Args:
        values: For each value, a tensor per device.
        devices: The devices.
        reduce: Returns the sums of a bucket per device; the second argument is the
            number of calls before.
    """
    groups: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        dtype = value[0].dtype
        groups.setdefault(_WIDER.get(dtype, dtype), []).append(index)
    sums: list[list[Any]] = [[] for _ in values]
    for number, (wide, indices) in enumerate(groups.items()):
        buckets = []
        for replica, device in enumerate(devices):
            with tf.device(device):
                mine = [tf.cast(values[i][replica], wide) for i in indices]
                buckets.append(tf.concat([tf.reshape(t, [-1]) for t in mine], 0))
        for replica, total in enumerate(reduce(buckets, number)):
            with tf.device(devices[replica]):
                mine = [values[i][replica] for i in indices]
                parts = tf.split(total, [tf.size(tensor) for tensor in mine])
                for i, tensor, part in zip(indices, mine, parts, strict=True):
                    shaped = tf.cast(tf.reshape(part, tf.shape(tensor)), tensor.dtype)
                    sums[i].append(tf.ensure_shape(shaped, tensor.shape))
    return sums


class _Groups:
    """The group keys of this process, as a class attribute: no two may be equal.

    Distinct from those of TensorFlow's own strategies, which count up from 1, and of
    `strategies.native_communicator`.
    """

    keys = itertools.count(0x4B45_0000)


class DeviceOps(CollectiveOps):
    """Collectives between workers; a worker's replicas are added on their devices.

    Args:
        communicator: The communicator of the workers.
        host: The CPU device of this process.
        devices: This worker's devices, several of one kind.

    Attributes:
        number: A variable with the number of sums so far.
    """

    def __init__(
        self, communicator: Communicator, host: str, devices: Sequence[str]
    ) -> None:
        super().__init__(communicator, host)
        self._devices = list(devices)
        # Only operations of one graph wait for each other, and all run.
        self._group = group_options(next(_Groups.keys), len(devices), devices[0])
        with tf.init_scope(), tf.device(host):
            self.number = tf.Variable(
                0, dtype=tf.int64, trainable=False, name="kerasdist_local_sums"
            )
        self._tokens = make_tokens(devices)
        # Eagerly the first replica would wait for the second, which is called later.
        self._compiled = tf.function(self._sum, autograph=False)

    def reduce_replicas(
        self, values: Sequence[Sequence[Any]], *, step: bool = False
    ) -> list[list[Any]] | None:
        """Sum over all replicas on their devices, if this worker has all of them.

        See `CollectiveOps.reduce_replicas`. Several workers may have different
        numbers of replicas, so each adds its own, see `add_replicas`.
        """
        if self.communicator.size > 1 or not _can_be_added(values):
            return None
        return self._sums(values)

    def add_replicas(self, values: Sequence[Sequence[Any]]) -> list[Any]:
        """See `CollectiveOps.add_replicas`: only the sums cross to the host."""
        if not _can_be_added(values):
            return super().add_replicas(values)
        sums = self._sums(values)
        with tf.device(self._host):
            return [tf.identity(parts[0]) for parts in sums]

    def _sums(self, values: Sequence[Sequence[Any]]) -> list[list[Any]]:
        plain = [list(value) for value in values]
        found = self._compiled(plain) if tf.executing_eagerly() else self._sum(plain)
        return [list(parts) for parts in found]

    def _sum(self, values: list[list[Any]]) -> list[list[Any]]:
        return sum_by_dtype(values, self._devices, self._reduce)

    def _reduce(self, buckets: list[Any], number: int) -> list[Any]:
        del number
        with tf.device(self._host):
            count = self.number.assign_add(1, read_value=True)
            key = tf.cast(count % _KEYS, tf.int32)
        # None begins before all buckets are there: if a replica fails before that, no
        # operation waits for it, and TensorFlow's collectives can be used again.
        with tf.control_dependencies(buckets):
            return reduce_on(self._devices, buckets, self._tokens, key, self._group)


def make_device_ops(job: StrategyJob, devices: Sequence[str]) -> CollectiveOps:
    """Return a job's collectives on tensors of these devices, which add replicas."""
    return DeviceOps(job.communicator, _tf.host_of(devices[0]), devices)


class NativeOps(CollectiveOps):
    """Collectives between workers; gradients are added on all workers' devices.

    All other tensors are sent by the ring, from host memory. TensorFlow's instance key
    of a sum is the number of the collective in the job, taken when it runs: so workers
    may trace their graphs at different times, or again.

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
        self._has_one_each = replicas == communicator.size
        self._group = group_options(communicator.group, replicas, devices[0])
        self._tokens = make_tokens(devices)

    def failure(self, error: Exception) -> Exception | None:
        """See `CollectiveOps.failure`."""
        return self._native.translate(error)

    def sum_gradients(
        self,
        gradients: Sequence[Any],
        there: Any,
        *,
        beside: Sequence[Any] = (),
        step: bool = False,
    ) -> list[Any]:
        """See `CollectiveOps.sum_gradients`."""
        sums = None
        if len(self._devices) == 1:
            with tf.device(self._devices[0]):
                parts = [[_tf.weighted(each, there)] for each in gradients]
            sums = self.reduce_replicas(parts, step=step)
        if sums is None:
            return super().sum_gradients(gradients, there, beside=beside, step=step)
        more = self.all_reduce(beside) if beside else ()
        return [*(total for (total,) in sums), *more]

    def reduce_replicas(
        self, values: Sequence[Sequence[Any]], *, step: bool = False
    ) -> list[list[Any]] | None:
        """Sum over all replicas of all workers, on their devices.

        See `CollectiveOps.reduce_replicas`. None if it isn't possible: in eager
        execution a replica would wait for the next one, which is called only after it.
        """
        in_turn = tf.executing_eagerly() and not self._has_one_each
        if in_turn or not _can_be_added(values):
            return None

        def reduce(buckets: list[Any], number: int) -> list[Any]:
            return self._reduce(buckets, step and number == 0)

        return sum_by_dtype(values, self._devices, reduce)

    def _reduce(self, buckets: list[Any], step: bool) -> list[Any]:
        """Number a sum, run it after the collective before it, and record its end."""
        first = buckets[0]
        elements = first.shape.num_elements() or 0
        detail = zlib.crc32(str(first.shape).encode())

        def begin() -> Any:
            self._native.step += step
            return np.int64(self._native.begin(first.dtype.name, elements, detail))

        def end(number: Any) -> Any:
            self._native.end(int(number))
            return np.bool_(True)

        def build(number: Any) -> list[Any]:
            with tf.device(self._host):
                key = tf.cast(number % _KEYS, tf.int32)
            return reduce_on(self._devices, buckets, self._tokens, key, self._group)

        if tf.executing_eagerly():
            number = begin()
            try:
                return build(number)
            except tf.errors.OpError as error:
                failure = self._native.translate(error)
                raise failure or error from error
            finally:
                end(number)
        with tf.device(self._host):
            order = self._counter.assign_add(1, read_value=True)
            with tf.control_dependencies([order]):
                number = tf.numpy_function(begin, [], tf.int64, name="kerasdist_begin")
            number.set_shape([])
        results = build(number)
        with tf.device(self._host), tf.control_dependencies(results):
            ended = tf.numpy_function(end, [number], tf.bool, name="kerasdist_end")
            self._hold_back([ended])
        return results


def make_native_ops(job: StrategyJob, devices: Sequence[str]) -> CollectiveOps:
    """Return a job's collectives on tensors of these devices: TensorFlow's own.

    Alone a worker has no communicator of TensorFlow's.
    """
    if not isinstance(job.communicator, NativeCommunicator):
        return make_ops(job, devices)
    host = _tf.host_of(devices[0])
    return NativeOps(job.communicator, host, devices, sum(job.replicas))
