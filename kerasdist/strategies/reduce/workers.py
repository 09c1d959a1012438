"""The workers that reduce together, as one of them sees them.

workers       0          1           size: 2
replicas      0  1       2  3        layout: first, local, total
rows          |...|...|  |...|...|   of each global batch, in this order
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kerasdist import _tf
from kerasdist.collectives import Communicator
from kerasdist.collectives.checked import SingleCommunicator
from kerasdist.strategies.options import Options, StrategyJob
from kerasdist.strategies.reduce.compressed import Memories
from kerasdist.strategies.reduce.graph_ops import CollectiveOps

# Reductions over the replicas of all workers, as `tf.distribute` defines them.


def in_all_replicas(
    workers: Workers, function: Callable[..., Any], *values: Any
) -> Any:
    """Call a function once for all replicas of this worker, in replica context.

    With no other replica to wait for there's no merge call, which couldn't be inside
    `tf.cond`.

    Args:
        workers: The workers that reduce together.
        function: Gets a value of each replica's for each of `values`, see
            `Workers.local`, and returns such values.
        values: This replica's.
    """
    if len(workers.devices) == 1:
        return function(*values)
    replica = tf.distribute.get_replica_context()
    return replica.merge_call(lambda _, *given: function(*given), args=values)


def sum_over_replicas(workers: Workers, tensors: Sequence[Any]) -> list[Any]:
    """Sum each tensor over all replicas, in replica context."""
    if workers.is_alone:
        return list(tensors)
    return reduce_in_replicas(workers, _tf.ReduceOp.SUM, list(tensors))


def sum_in_host(workers: Workers, tensors: Sequence[Any]) -> list[Any]:
    """Sum each tensor over the replicas of this host, in replica context."""

    def total(*values: Any) -> Any:
        added = workers.ops.add_replicas([workers.local(value) for value in values])
        totals = workers.ops.all_reduce_in_host(added)
        return [_tf.broadcast_to_devices(total, workers.devices) for total in totals]

    return list(in_all_replicas(workers, total, *tensors))


def gather_over_replicas(workers: Workers, tensor: Any) -> Any:
    """Concatenate all replicas' tensors along the first axis, in replica context."""

    def gather(value: Any) -> Any:
        with tf.device(workers.host):
            every = tf.concat(workers.local(value), 0)
        if workers.size > 1:
            with workers.ops.awaited():
                every = workers.ops.all_gather(every)
        return _tf.broadcast_to_devices(every, workers.devices)

    return in_all_replicas(workers, gather, tensor)


def sum_once_per_worker(workers: Workers, gradients: list[Any]) -> list[Any]:
    """Sum over all replicas, in replica context, as Keras's optimizers do.

    Keras's tests require that a value that is one object on all replicas of a worker
    counts once. `sum_over_replicas` counts it for each replica.
    """

    def once(value: Any) -> list[Any]:
        local = workers.local(value)
        if isinstance(value, _tf.DistributedValues):
            return local
        return [local[0], *(tf.zeros_like(tensor) for tensor in local[1:])]

    return reduce_in_replicas(workers, _tf.ReduceOp.SUM, gradients, once)


def reduce_in_replicas(
    workers: Workers,
    reduce_op: Any,
    flat: list[Any],
    spread: Callable[[Any], list[Any]] | None = None,
) -> list[Any]:
    """Reduce each replica's values, in replica context.

    Args:
        workers: The workers that reduce together.
        reduce_op: TensorFlow's `ReduceOp`.
        flat: One tensor or IndexedSlices for each result.
        spread: Makes one value per replica; by default `Workers.local`.
    """
    one = len(workers.devices) == 1

    def merge(*values: Any) -> Any:
        local = [(spread or workers.local)(v) for v in values]
        sparse = any(isinstance(v[0], tf.IndexedSlices) for v in local)
        here = sparse or (one and workers.size == 1)
        sums = None if here else workers.ops.reduce_replicas(local)
        if sums is not None:
            return [_mirror(workers, reduce_op, totals) for totals in sums]
        totals = over_workers(workers, [local_sum(workers, v) for v in local])
        means = [finish(workers, reduce_op, total) for total in totals]
        # A placement's one replica has several devices: they are left where they are.
        if one:
            return means
        return [_tf.broadcast_to_devices(mean, workers.devices) for mean in means]

    return list(in_all_replicas(workers, merge, *flat))


def _mirror(workers: Workers, reduce_op: Any, totals: list[Any]) -> Any:
    """Finish a reduction whose sums are on each device already."""
    finished = []
    for device, total in zip(workers.devices, totals, strict=True):
        with tf.device(device):
            finished.append(finish(workers, reduce_op, total))
    return _tf.mirrored(finished)


def local_sum(workers: Workers, local: list[Any]) -> Any:
    """Return the sum of this worker's replicas' values, on the host."""
    with tf.device(workers.host):
        if len(local) == 1:
            return local[0]
        if all(isinstance(tensor, tf.IndexedSlices) for tensor in local):
            return concat_slices(local)
        return tf.add_n([tf.convert_to_tensor(tensor) for tensor in local])


def concat_slices(slices: list[Any]) -> Any:
    """Return IndexedSlices with all slices of some, of one table."""
    if len(slices) == 1:
        return slices[0]
    return tf.IndexedSlices(
        tf.concat([part.values for part in slices], 0),
        tf.concat([part.indices for part in slices], 0),
        slices[0].dense_shape,
    )


def over_workers(workers: Workers, tensors: list[Any]) -> list[Any]:
    """Sum over the workers: dense ones at once, slices by gathering them."""
    if workers.size == 1:
        return tensors
    dense = [t for t in tensors if not isinstance(t, tf.IndexedSlices)]
    slices = [t for t in tensors if isinstance(t, tf.IndexedSlices)]
    with workers.ops.awaited():
        reduced = iter(workers.ops.all_reduce(dense) if dense else ())
        gathered = iter(workers.ops.exchange_rows(slices)[0] if slices else ())
    return [
        next(gathered if isinstance(t, tf.IndexedSlices) else reduced) for t in tensors
    ]


def finish(workers: Workers, reduce_op: Any, total: Any) -> Any:
    """Divide a sum by the number of replicas, if the mean is requested."""
    if reduce_op != _tf.ReduceOp.MEAN:
        return total
    if isinstance(total, tf.IndexedSlices):
        mean = finish(workers, reduce_op, total.values)
        return tf.IndexedSlices(mean, total.indices, total.dense_shape)
    return total / tf.cast(workers.replicas, total.dtype)


# Of shares of a batch: see `ReplicaLayout`.
Cuts = tuple[int, ...] | None
WHOLE = 1 << 20


class ReplicaLayout(NamedTuple):
    """The numbers of a worker's replicas.

    Attributes:
        first: The number of the worker's first replica over all workers.
        local: The number of the worker's replicas.
        total: The number of all replicas.
        cuts: The places between their rows, in parts of a batch of which there are
            `WHOLE`, from 0 to `WHOLE`; None: all replicas get as many rows.
    """

    first: int
    local: int
    total: int
    cuts: Cuts = None


class Workers:
    """The connected workers of a strategy, and the replicas of this one.

    Everything in `strategies.reduce` and `strategies.data` takes it.

    Args:
        job: The connected workers.
        devices: Canonical names of this worker's devices, one per replica.
        ops: Their collectives on tensors.
        options: The strategy's options.

    Attributes:
        job, ops: See above.
        bucket_size: Bytes of gradients that are sent at once.
        memories: What the replicas keep of their gradients.
        devices: Canonical names of this worker's devices, as a tuple.
        host: The CPU that these devices belong to.
        cuts: See `ReplicaLayout`.
        excluding: Whether this worker acts without the others.
        fault: An error raised inside of a graph; TensorFlow passes on only its text.
    """

    def __init__(
        self,
        job: StrategyJob,
        devices: Sequence[str],
        ops: CollectiveOps,
        options: Options,
    ) -> None:
        self.job = job
        self.ops = ops
        self.devices = tuple(devices)
        self.host = _tf.host_of(devices[0])
        self.bucket_size = options.bucket_size
        self.memories = Memories(options.compression)
        self._shards = options.shards
        self.cuts: Cuts = None
        self.excluding = False
        self.fault: Exception | None = None

    @property
    def communicator(self) -> Communicator:
        """The communicator between all workers, also while this one acts alone."""
        return self.job.communicator

    @property
    def rank(self) -> int:
        """This worker's rank in the job."""
        return self.communicator.rank

    @property
    def replicas(self) -> int:
        """The number of replicas that take a step together."""
        return self.layout.total

    @property
    def local_replicas(self) -> int:
        """The number of this worker's replicas."""
        return len(self.devices)

    @property
    def sums_in_host(self) -> bool:
        """Whether a host's replicas add up their gradients before these are sent."""
        group, compressor = self.ops.communicator, self.memories.compressor
        # Inside of a host sending is cheap.
        sends_far = group.size > 1 and not group.shares_memory
        return sends_far and compressor is not None and compressor.is_sparse

    def sends(self, replica: int) -> bool:
        """Return whether a replica of this worker sends compressed gradients itself."""
        within = self.ops.communicator.within_host
        leads_host = not replica and (within is None or within.rank == 0)
        return leads_host or not self.sums_in_host

    @property
    def acts_alone(self) -> bool:
        """Whether this worker's replicas reduce by themselves now."""
        return self.excluding

    def current_replica(self) -> int:
        """Return the number of the replica that is being traced, over all workers."""
        return self.layout.first + _tf.local_replica_id()

    @property
    def layout(self) -> ReplicaLayout:
        """The replicas that reduce together."""
        local = len(self.devices)
        if self.acts_alone:
            return ReplicaLayout(0, local, local)
        first = sum(self.job.replicas[: self.communicator.rank])
        return ReplicaLayout(first, local, sum(self.job.replicas), self.cuts)

    @property
    def data_layout(self) -> ReplicaLayout:
        """The replicas that share a global batch that Keras is given."""
        local = len(self.devices)
        return self.layout if self._shards else ReplicaLayout(0, local, local)

    @property
    def size(self) -> int:
        """The number of workers that reduce and gather together."""
        return 1 if self.acts_alone else self.communicator.size

    @property
    def is_alone(self) -> bool:
        """Whether there's only one replica in all."""
        return self.layout.total == 1

    def without_peers(self) -> contextlib.AbstractContextManager[None]:
        """Run the block on this worker only; the other workers wait for it."""
        ops = CollectiveOps(SingleCommunicator(), self.host)
        return _tf.replaced(self, excluding=True, ops=ops)

    def failure(self, error: Exception) -> Exception | None:
        """Return the failure behind TensorFlow's `error` in a graph, or None."""
        fault, self.fault = self.fault, None
        return fault or self.ops.failure(error)

    def local_step(self) -> contextlib.AbstractContextManager[None]:
        """Run a step of training in the block."""
        return contextlib.nullcontext()

    def collective_scope(self) -> contextlib.AbstractContextManager[None]:
        """Run a step of an evaluation or prediction in the block."""
        return contextlib.nullcontext()

    def local(self, value: Any) -> list[Any]:
        """Return one tensor per replica of this worker.

        TensorFlow passes a value that is one object on all replicas (a constant from
        outside the step) as that object, which then holds for each replica.
        """
        copies = self.copies(value)
        if not isinstance(value, _tf.DistributedValues):
            copies *= len(self.devices)
        return [_tf.tensor_or_slices(tensor) for tensor in copies]

    def copies(self, value: Any) -> tuple[Any, ...]:
        """Return a variable's copies, or a value's parts, on this worker."""
        return _tf.local_results(value)
