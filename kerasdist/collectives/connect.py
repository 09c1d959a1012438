"""The connection of a cluster's workers: the choice of transport, and the job."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.collectives import mpi
from kerasdist.collectives.checked import CheckedCommunicator, SingleCommunicator
from kerasdist.collectives.ring import (
    HierarchicalCommunicator,
    RingCommunicator,
)
from kerasdist.collectives.shared_memory import SharedMemoryCommunicator
from kerasdist.transport.base import Aborted
from kerasdist.transport.deadline import Cancellation, Deadline, Timeouts, daemon
from kerasdist.transport.liveness.announcements import Announcements
from kerasdist.transport.liveness.failure_detector import FailureDetector
from kerasdist.transport.liveness.failure_protocol import Supervisor
from kerasdist.transport.liveness.launcher_pipe import Reporter
from kerasdist.transport.rendezvous.bind import require_word
from kerasdist.transport.rendezvous.startup import Session
from kerasdist.transport.sockets import SocketTransport

TRANSPORTS = ("auto", "hierarchical", "mpi", "native", "shared_memory", "tcp")


# Seconds that a failed job's connections stay open, for ranks that request the reason.
_LINGER_SECONDS = 5.0


class Job:
    """The workers of one strategy, connected. Made by `connect`.

    Attributes:
        cluster: The cluster with this worker's rank.
        communicator: Between all workers.
        transport: The transport of `communicator`: one of `TRANSPORTS` but "auto", or
            "none" for one worker.
        replicas: Each worker's number of replicas, by rank.
        timeouts: The timeouts as given.
        has_servers: Whether parameter servers connect the workers: no.
        servers: The names of these servers: none.
    """

    has_servers = False
    servers: tuple[str, ...] = ()

    def __init__(
        self,
        cluster: Cluster,
        communicator: CheckedCommunicator,
        transport: str,
        replicas: Sequence[int],
        timeouts: Timeouts,
        session: Session | None = None,
        supervisor: FailureDetector | None = None,
    ) -> None:
        self.cluster = cluster
        self.communicator = communicator
        self.transport = transport
        self.replicas = tuple(replicas)
        self.timeouts = timeouts
        self._session = session
        self._supervisor = supervisor
        self._closing = threading.Event()

    def close_soon(self) -> None:
        """Close from a thread of its own, when all ranks know of the failure.

        A failed job can't be used any more, but a script may hold its strategy for
        long: sockets and memory are released all the same.
        """
        daemon("kerasdist-closer", self._close_later).start()

    def _close_later(self) -> None:
        if not self._closing.wait(_LINGER_SECONDS):
            self.close()

    @property
    def failure(self) -> errors.CollectiveError | None:
        """The job's first failure, or None; doesn't wait."""
        return self.communicator.failure

    @property
    def announcements(self) -> Announcements | None:
        """The chief's announcements; None for a worker alone, and with MPI."""
        return None if self._supervisor is None else self._supervisor.announcements

    def await_end(self, rank: int | None = None) -> errors.CollectiveError | None:
        """See `FailureDetector.await_end`; a worker alone doesn't wait."""
        return None if self._supervisor is None else self._supervisor.await_end(rank)

    def abandon(self, error: errors.CollectiveError | None = None) -> None:
        """End all waits of this rank at once; the others aren't informed."""
        self.communicator.abort(error)
        if self._supervisor is not None and self.communicator.failure is not None:
            self._supervisor.abandon(self.communicator.failure)

    def explain(self, rank: int, seen: str) -> errors.CollectiveError | None:
        """Find out why a rank can't be reached any more; see `Supervisor.explain`.

        None for a worker alone.
        """
        if self._supervisor is None:
            return None
        return self._supervisor.explain(self.communicator.peers[rank], seen)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job; release sockets, threads and memory.

        Args:
            error: The error that ended this worker's script, if there was one: it is
                reported to the others, which fail at once. Can be called twice.
        """
        self._closing.set()
        if self._supervisor is not None:
            self._supervisor.close(error)
        self.communicator.close()
        if self._session is not None:
            self._session.close()


def connect(
    cluster: Cluster,
    *,
    transport: str = "auto",
    timeouts: Timeouts | None = None,
    replicas: int = 1,
    settings: dict[str, Any] | None = None,
    host: str | None = None,
    native: Callable[[SocketTransport, Supervisor, float], CheckedCommunicator]
    | None = None,
    name: str | None = None,
    watch: Callable[[errors.CollectiveError], None] | None = None,
    stop: Cancellation | None = None,
) -> Job:
    """Connect all workers of the cluster.

    Args:
        cluster: This worker's rank and its peers.
        transport: "auto": shared memory if all workers are on one host, else a
            TCP ring with one worker per host, else hierarchical; or one of these
            by name ("shared_memory", "tcp", "hierarchical", "native"); or "mpi",
            where `cluster` may be empty: `mpirun` defines rank and size. "auto" is
            "mpi" if only MPI knows the other workers.
        timeouts: The time limit of each phase.
        replicas: Number of this worker's replicas.
        settings: Further settings that must be the same on all workers.
        host: Overrides the identity of this worker's host, for tests.
        native: For "native": makes the communicator of a ring's connections, as
            `RingCommunicator`. An argument, because this module doesn't import
            TensorFlow.
        name: A name for the session, the same on all workers and used once; by
            default they count their sessions.
        watch: Called with the job's first failure, from another thread, in place of
            the report to the launcher and the log.
        stop: When another thread sets it, the call ends with `Aborted`.

    Raises:
        ValueError: Unknown transport, or "native" without `native`.
        ClusterError: Only MPI knows the other workers, and another transport is given;
            or mpi4py is missing there, or of another MPI.
        ClusterError: "native" without the user's consent, see
            `transport.rendezvous.bind`.
        ClusterError, AddressInUseError, StartupError, AuthenticationError,
            ProtocolError: See `kerasdist.errors`.
        WorkerLost: A worker joined, but died before all were connected.

    After an exception nothing is left open.
    """
    if transport not in TRANSPORTS:
        raise ValueError(
            f"Unknown transport. Received: transport={transport!r}; expected one of "
            f"{TRANSPORTS}."
        )
    if transport == "native" and native is None:
        raise ValueError(
            "TensorFlow's collectives need a strategy. Received: "
            "transport='native'. Use `kerasdist.RingStrategy(transport='native')`."
        )
    timeouts = timeouts or Timeouts()
    if cluster.needs_mpi:
        transport = mpi.transport_for(cluster, transport)
    if transport == "native" and cluster.size > 1:
        require_word(os.environ, "transport='native'")
    if transport == "mpi":
        cluster, world = mpi.join(cluster, timeouts)
        counts = [int(count[0]) for count in world.all_gather(replicas)]
        return Job(cluster, world, "mpi", counts, timeouts)
    if cluster.size == 1:
        return Job(cluster, SingleCommunicator(), "none", [replicas], timeouts)
    session = Session(
        cluster,
        settings={"transport": transport, **(settings or {})},
        timeouts=timeouts,
        host=host,
        replicas=replicas,
        name=name,
        stop=stop,
    )
    supervisor: FailureDetector | None = None
    parts: list[CheckedCommunicator] = []
    made: list[Job] = []

    def on_failure(error: errors.CollectiveError) -> None:
        session.interrupt()
        for part in parts:
            part.abort(error)
        for job in made:
            job.close_soon()
        if watch is not None:
            watch(error)

    try:
        chosen = _choose(transport, session)
        supervisor = FailureDetector(
            session.rank,
            session.peers,
            session.controls,
            timeouts,
            on_failure,
            Reporter(session.name, session.rank) if watch is None else None,
            log=watch is None,
        )
        every, timeout = list(range(session.size)), timeouts.collective
        communicator: CheckedCommunicator
        if chosen == "hierarchical":
            communicator = _hierarchical(session, supervisor)
        elif chosen == "shared_memory":
            net = mesh(session, every)
            communicator = SharedMemoryCommunicator(net, supervisor, timeout)
        else:
            ring = native if chosen == "native" and native else RingCommunicator
            communicator = ring(_circle(session, every), supervisor, timeout)
        parts.append(communicator)
        communicator.prepare()
    except BaseException as error:
        failure = None if supervisor is None else supervisor.failure
        if supervisor is not None:
            supervisor.close(error)
        for part in parts:
            part.close()
        session.close()
        if isinstance(error, Aborted) and failure is not None:
            raise failure from None
        raise
    job = Job(
        cluster,
        communicator,
        chosen,
        [member.replicas for member in session.members],
        timeouts,
        session,
        supervisor,
    )
    made.append(job)
    if supervisor.failure is not None:
        communicator.abort(supervisor.failure)
        job.close_soon()
    return job


def _choose(transport: str, session: Session) -> str:
    hosts = session.hosts()
    if transport == "auto":
        if len(hosts) == 1:
            return "shared_memory"
        return "tcp" if len(hosts) == session.size else "hierarchical"
    if transport == "shared_memory" and len(hosts) > 1:
        local = next(host for host in hosts if session.rank in host)
        raise errors.ClusterError(
            "Shared memory connects only the workers of one host. "
            f"Received: transport='shared_memory', {session.size} workers on "
            f"{len(hosts)} hosts (this host has ranks {local}). Use transport='auto'."
        )
    return transport


def _hierarchical(session: Session, supervisor: FailureDetector) -> CheckedCommunicator:
    timeout = session.timeouts.collective
    hosts = session.hosts()
    mine = next(host for host in hosts if session.rank in host)
    made: list[CheckedCommunicator] = []
    try:
        if len(mine) > 1:
            made.append(
                SharedMemoryCommunicator(mesh(session, mine), supervisor, timeout)
            )
        else:
            made.append(SingleCommunicator())
        if session.rank == mine[0] and len(hosts) > 1:
            circle = _circle(session, [host[0] for host in hosts])
            made.append(RingCommunicator(circle, supervisor, timeout))
    except BaseException:
        for part in made:
            part.close()
        raise
    return HierarchicalCommunicator(
        session.rank,
        session.peers,
        hosts,
        made[0],
        made[1] if len(made) > 1 else None,
        supervisor,
        timeout,
    )


def mesh(session: Session, ranks: list[int]) -> SocketTransport:
    """Connect every one of `ranks` with every other; the higher rank dials."""
    mine = ranks.index(session.rank)
    lower, higher = range(mine), range(mine + 1, len(ranks))
    dialed, answered = _links(session, "mesh", ranks, lower, higher)
    sockets, peers = dialed | answered, [session.peers[rank] for rank in ranks]
    return SocketTransport(mine, peers, sockets, sockets)


def _circle(session: Session, ranks: list[int]) -> SocketTransport:
    """Connect each of `ranks` with the next one; each dials its right neighbour."""
    mine = ranks.index(session.rank)
    right, left = (mine + 1) % len(ranks), (mine - 1) % len(ranks)
    links = _links(session, "circle", ranks, [right], [left])
    return SocketTransport(mine, [session.peers[rank] for rank in ranks], *links)


def _links(
    session: Session,
    purpose: str,
    ranks: list[int],
    dialed: Iterable[int],
    answered: Iterable[int],
) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Return sockets to some places in `ranks`: those that dial, then the others."""
    deadline = Deadline(session.timeouts.startup)
    with contextlib.ExitStack() as undo:
        found = [
            {
                place: undo.enter_context(link(purpose, ranks[place], deadline))
                for place in places
            }
            for link, places in ((session.dial, dialed), (session.answer, answered))
        ]
        undo.pop_all()
    return found[0], found[1]
