"""The workers that reduce together, as one of them sees them.

workers       0          1           size: 2
replicas      0  1       2  3        layout: first, local, total
rows          |...|...|  |...|...|   of each global batch, in this order
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kerasdist import _tf
from kerasdist.collectives import Communicator
from kerasdist.collectives.backends.single import SingleCommunicator
from kerasdist.strategies.job import StrategyJob
from kerasdist.strategies.options import Options
from kerasdist.strategies.reduce.graph_ops import CollectiveOps


class ReplicaLayout(NamedTuple):
    """The numbers of a worker's replicas.

    Attributes:
        first: The number of the worker's first replica over all workers.
        local: The number of the worker's replicas.
        total: The number of all replicas.
    """

    first: int
    local: int
    total: int


class Workers:
    """The connected workers of a strategy, and the replicas of this one.

    Everything in `strategies.reduce`, `.data` and `.chief_data` takes it.

    Args:
        job: The connected workers.
        devices: Canonical names of this worker's devices, one per replica.
        ops: Their collectives on tensors.
        options: The strategy's options.

    Attributes:
        job, ops: See above.
        bucket_size: Bytes of gradients that are sent at once.
        compression: None, "bf16" or "fp16", see `RingStrategy`.
        devices: Canonical names of this worker's devices, as a tuple.
        host: The CPU that these devices belong to.
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
        self.compression = options.compression
        self._shards = options.shards
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

    def current_replica(self) -> int:
        """Return the number of the replica that is being traced, over all workers."""
        return self.layout.first + _tf.local_replica_id()

    @property
    def layout(self) -> ReplicaLayout:
        """The replicas that reduce together."""
        local = len(self.devices)
        if self.excluding:
            return ReplicaLayout(0, local, local)
        first = sum(self.job.replicas[: self.communicator.rank])
        return ReplicaLayout(first, local, sum(self.job.replicas))

    @property
    def data_layout(self) -> ReplicaLayout:
        """The replicas that share a global batch that Keras is given."""
        local = len(self.devices)
        return self.layout if self._shards else ReplicaLayout(0, local, local)

    @property
    def size(self) -> int:
        """The number of workers that reduce and gather together."""
        return 1 if self.excluding else self.communicator.size

    @property
    def is_alone(self) -> bool:
        """Whether there's only one replica in all."""
        return self.layout.total == 1

    @contextlib.contextmanager
    def without_peers(self) -> Iterator[None]:
        """Run the block on this worker only; the other workers wait for it."""
        before = self.excluding, self.ops
        self.excluding = True
        self.ops = CollectiveOps(SingleCommunicator(), self.host)
        try:
            yield
        finally:
            self.excluding, self.ops = before

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
