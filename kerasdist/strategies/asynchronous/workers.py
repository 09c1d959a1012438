"""The workers of an asynchronous job: this one alone, or all live ones.

    local step          this worker's replicas only. A step consumes a whole batch,
                        reduces over local replicas, and ends with an exchange of the
                        weights (`strategies.asynchronous.weights`)
    collective scope    in `evaluate` and `predict`, and everywhere outside of a step:
                        all live workers, synchronously, as with the synchronous
                        strategies

Code in `strategy.run`, in a graph that isn't an evaluation, or in a pass of a custom
loop (`strategies.asynchronous.loop`) is a local step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from kerasdist import _tf
from kerasdist.ps import ServerClient
from kerasdist.strategies.asynchronous.live_group import LiveCommunicator, LiveJob
from kerasdist.strategies.options import Options
from kerasdist.strategies.reduce.graph_ops import CollectiveOps
from kerasdist.strategies.reduce.workers import ReplicaLayout, Workers


class AsyncWorkers(Workers):
    """See `Workers`; which workers reduce together depends on what is done.

    Args:
        job: The live workers of a job.
        devices: Canonical names of this worker's devices, one per replica.
        ops: Their collectives on tensors.
        options: The strategy's options.

    Attributes:
        client: This worker's connection to the servers.
        live: The communicator between the live workers.
        passes: The custom loops over distributed datasets that are in a pass.
    """

    def __init__(
        self,
        job: LiveJob,
        devices: Sequence[str],
        ops: CollectiveOps,
        options: Options,
    ) -> None:
        super().__init__(job, devices, ops, options)
        self.client: ServerClient = job.client
        self.live: LiveCommunicator = job.live
        self.passes: set[object] = set()
        self._evaluating = 0
        self._stepping = 0

    @property
    def rank(self) -> int:
        """See `Workers.rank`; the communicator numbers live workers without gaps."""
        return self.client.rank

    @property
    def is_evaluating(self) -> bool:
        """Whether a collective scope is open."""
        return self._evaluating > 0

    @property
    def is_local(self) -> bool:
        """Whether the code that is run or traced now is this worker's own step."""
        if self._evaluating:
            return False
        in_step = self._stepping > 0 or bool(self.passes)
        return in_step or not _tf.executing_eagerly()

    @contextlib.contextmanager
    def local_step(self) -> Iterator[None]:
        """Make the block this worker's own step."""
        self._stepping += 1
        try:
            yield
        finally:
            self._stepping -= 1

    @contextlib.contextmanager
    def collective_scope(self) -> Iterator[None]:
        """Run the block on all workers, synchronously."""
        self._evaluating += 1
        try:
            yield
        finally:
            self._evaluating -= 1

    @property
    def layout(self) -> ReplicaLayout:
        """See `Workers.layout`; in a local step that of this worker alone."""
        local = len(self.devices)
        return ReplicaLayout(0, local, local) if self.is_local else super().layout

    @property
    def size(self) -> int:
        """See `Workers.size`."""
        return 1 if self.is_local else super().size

    def current_replica(self) -> int:
        """See `Workers.current_replica`; the same inside of a local step."""
        return sum(self.client.replicas[: self.client.rank]) + _tf.local_replica_id()

    def check_joined(self) -> None:
        """Refuse to train before this worker has joined the others.

        Raises:
            RuntimeError: It has not joined.
        """
        if self.client.joining:
            raise RuntimeError(
                f"Rank {self.client.rank} was started late, and can join the job in "
                "`fit` only. Received: a step of training before or outside of `fit`. "
                "Let the script train with `fit` alone, or start the whole job again."
            )
