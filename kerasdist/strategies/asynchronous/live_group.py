"""The live workers of a job, with collectives that leave out lost workers.

With mode="async" a lost worker is left out of collectives. The servers send the set of
live workers with each result, the same to all that get it. Here the live workers are
numbered without gaps, so that rows divided over "all workers" are divided over these:

    rank in the job     0  1  2  3        rank 1 is lost
    rank here           0  -  1  2        size 3

A worker that has started late is alone until it joins the others: its collectives
before that end at once, with its own contribution.

Work that was divided must be repeated if a worker is lost meanwhile: such a block is
`strict`, and in it all remaining workers raise `WorkersChanged` at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from kerasdist import _tf
from kerasdist.collectives import Communicator
from kerasdist.collectives.checked import SingleCommunicator
from kerasdist.collectives.communicator import ForwardingCommunicator
from kerasdist.collectives.row_exchange import Array
from kerasdist.errors import CollectiveError
from kerasdist.parameter_server import ServerClient
from kerasdist.strategies.options import Options
from kerasdist.strategies.reduce.graph_ops import CollectiveOps
from kerasdist.strategies.reduce.workers import Workers
from kerasdist.transport.tracing import Recorder

# The workers of an asynchronous job: this one alone, or all live ones.
#
#     local step          this worker's replicas only. A step consumes a whole batch,
#                         reduces over local replicas, and ends with an exchange of the
#                         weights (`strategies.asynchronous.weights`)
#     collective scope    in `evaluate` and `predict`, and everywhere outside of a step:
#                         all live workers, synchronously, as with the synchronous
#                         strategies
#
# Code in `strategy.run`, in a graph that isn't an evaluation, or in a pass of a custom
# loop (`strategies.asynchronous.extended`) is a local step.


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
        is_evaluating: Whether a collective scope is open.
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
        self.live: LiveCommunicator = job.communicator
        self.passes: set[object] = set()
        self.is_evaluating = False
        self._stepping = False

    @property
    def rank(self) -> int:
        """See `Workers.rank`; the communicator numbers live workers without gaps."""
        return self.client.rank

    @property
    def is_local(self) -> bool:
        """Whether the code that is run or traced now is this worker's own step."""
        if self.is_evaluating:
            return False
        in_step = self._stepping or bool(self.passes)
        return in_step or not tf.executing_eagerly()

    @property
    def acts_alone(self) -> bool:
        """See `Workers.acts_alone`."""
        return self.is_local or self.excluding

    def local_step(self) -> contextlib.AbstractContextManager[None]:
        """Make a `with` block this worker's own step."""
        return _tf.replaced(self, _stepping=True)

    def collective_scope(self) -> contextlib.AbstractContextManager[None]:
        """Run a `with` block on all workers, synchronously."""
        return _tf.replaced(self, is_evaluating=True)

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


# Smaller arrays are gathered, which works with any worker lost at that moment.
_LEAST_BROADCAST_BYTES = 4096


class WorkersChanged(Exception):
    """A worker was lost, or has joined, during a strict block."""


class LiveCommunicator(ForwardingCommunicator):
    """Collectives between the live workers of a job.

    Args:
        client: The job.

    Attributes:
        ranks: The ranks in the job of the participants of the last collective.
        changed: Whether `WorkersChanged` was raised, perhaps inside a graph.
        owed: Meetings that the others may wait in, and this worker has left out: they
            come before its next collective.
    """

    def __init__(self, client: ServerClient) -> None:
        self.changed = False
        self.owed: list[Callable[[], None]] = []
        self._strict = False
        self._client = client
        self._inner: Communicator = client.communicator
        if client.joining:
            self._inner = SingleCommunicator(client.peers[client.rank].address)
            self._number((client.rank,))
        else:
            self._number(self._inner.ranks)

    def strict(self) -> contextlib.AbstractContextManager[None]:
        """Raise `WorkersChanged` when the workers change, for a `with` block."""
        self.changed = False
        return _tf.replaced(self, _strict=True)

    def join_barrier(self, facts: dict[str, Any]) -> bool:
        """Run a barrier at which others may join; return whether one has.

        Args:
            facts: The state that they get.
        """
        self._catch_up()
        joined = self._client.communicator.join_barrier(facts)
        self._note()
        return bool(joined)

    def enter(self) -> Mapping[str, Any]:
        """Join the others in their `fit`; return their facts."""
        entry = self._client.enter(self._client.fits)
        self._inner = self._client.communicator
        self._number(entry.ranks)
        return entry.facts

    @property
    def failure(self) -> CollectiveError | None:
        """Return the failure that ended this worker's part in the job, or None."""
        return self._inner.failure or self._client.failure

    def _run(self, collective: Callable[[Communicator], list[Array]]) -> list[Array]:
        self._catch_up()
        result = collective(self._inner)
        self._note()
        return result

    def all_gather(self, array: npt.ArrayLike) -> list[Array]:
        """See `Communicator.all_gather`; one array per live rank."""
        result = super().all_gather(array)
        return result if self._client.joining else [result[rank] for rank in self.ranks]

    def broadcast(self, buffers: Sequence[npt.ArrayLike], root: int = 0) -> list[Array]:
        """See `Communicator.broadcast`."""
        arrays = [np.asarray(buffer) for buffer in buffers]
        if sum(array.nbytes for array in arrays) >= _LEAST_BROADCAST_BYTES:

            def give(inner: Communicator) -> list[Array]:
                alone = self._client.joining
                return inner.broadcast(arrays, 0 if alone else self.ranks[root])

            return self._run(give)
        every = [self.all_gather(array.reshape(1, *array.shape)) for array in arrays]
        return [
            parts[min(root, len(parts) - 1)].reshape(array.shape)
            for parts, array in zip(every, arrays, strict=True)
        ]

    def _catch_up(self) -> None:
        while self.owed:
            self.owed.pop(0)()

    def _note(self) -> None:
        if self._client.joining:
            return
        ranks = self._client.communicator.ranks
        if ranks == self.ranks:
            return
        self._number(ranks)
        if self._strict:
            self.changed = True
            raise WorkersChanged

    def _number(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.rank = ranks.index(self._client.rank)
        self.size = len(ranks)
        self.peers = tuple(self._client.peers[rank] for rank in ranks)

    @property
    def step(self) -> int:
        """See `Communicator.step`."""
        return self._client.step

    @step.setter
    def step(self, value: int) -> None:
        self._client.step = value

    # Recording goes on when this worker, which may be alone so far, joins the others.

    def _record(self, recorder: Recorder | None) -> None:
        for each in {self._inner, self._client.communicator}:
            each._record(recorder)

    def abort(self, error: CollectiveError | None = None) -> None:
        """See `Communicator.abort`."""
        self._inner.abort(error)

    def close(self) -> None:
        """See `Communicator.close`."""
        self._inner.abort()
        self._inner.close()


class LiveJob:
    """A job that consists of its live workers; see `StrategyJob`.

    Args:
        client: The job.

    Attributes:
        communicator: The communicator of the live workers.
        has_servers: See `StrategyJob.has_servers`.
        announcements: See `StrategyJob.announcements`.
    """

    has_servers = True

    def __init__(self, client: ServerClient) -> None:
        self.client = client
        self.communicator = LiveCommunicator(client)
        self.announcements = client.announcements

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of replicas of each live worker."""
        every = self.client.replicas
        if len(every) == 1:
            return every * self.communicator.size
        return tuple(every[rank] for rank in self.communicator.ranks)

    def close(self, error: BaseException | None = None) -> None:
        """See `StrategyJob.close`."""
        self.client.close(error)
