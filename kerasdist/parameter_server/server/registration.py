"""The registration of workers at a server: at the start, and later.

A `ServerTask` listens for workers; a `Registrar` admits or refuses them.

At the start it waits for all workers, each once; if some have other settings, it
refuses all of them at once. Later a worker may reconnect after a restart of the server,
or, with mode="async", a new process with a lost worker's rank may join.
"""

from __future__ import annotations

import abc
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.errors import ProtocolError
from kerasdist.parameter_server.channel import Traffic
from kerasdist.parameter_server.membership import (
    ServerHello,
    WorkerProgress,
    WorkerRecord,
)
from kerasdist.parameter_server.server.handler import RequestHandler
from kerasdist.transport.base import Connection
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.framing import read_record
from kerasdist.transport.rendezvous.dial import refuse
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.rendezvous.waiting_notice import (
    Absent,
    Sight,
    WaitingNotice,
    ranks_in_words,
)
from kerasdist.transport.tls import checked_secret

PURPOSE = "server"
# Seconds during which arriving workers are refused because the job has failed.
GOODBYE_SECONDS = 5.0
# Seconds that a server waits for connections before it looks at other things.
LOOK_SECONDS = 0.25
_SHORT_LOOK_SECONDS = 0.05
# Live workers retry about once per second; after this long the rest are presumed gone.
RETURN_SECONDS = 10.0

_ENDED = "its connection ended before all workers were connected"


def different_settings(server: int, rank: int, theirs: object, mine: object) -> str:
    """Return why a server refuses a worker that has other settings."""
    return (
        f"Server {server} and rank {rank} were started with different arguments. "
        f"Received: {theirs!r}, here {mine!r}. Give all tasks the same arguments."
    )


# The task of a server: it listens, and takes the hellos of workers.


def session_name(cluster: Cluster, part: int = 0) -> str:
    """Return the name of the session of a cluster's servers, the same in all tasks.

    Args:
        cluster: The job.
        part: How often the script has continued with other settings.
    """
    # In any order: a server that is taken for another one is reported later.
    text = json.dumps([cluster.workers, sorted(cluster.servers)])
    name = "servers-" + hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{name}-{part}" if part else name


_Hello = TypeVar("_Hello")


class ServerTask(abc.ABC):
    """The task of a server, which `ParameterServer` and `ElasticServer` serve.

    Args:
        cluster: The job; this process is one of its `servers`.
        timeouts: The time limit of each phase.
        session: The name of the session; by default `session_name`.
        traffic: Counts the workers' requests, and the replies; by default those of this
            server alone.

    Attributes:
        index: Index among the servers.
        address: Its address.

    Raises:
        ValueError: This process is no server of the cluster.
        ClusterError: There is no secret where one is needed.
    """

    def __init__(
        self,
        cluster: Cluster,
        timeouts: Timeouts | None,
        session: str | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        if cluster.task_type != "ps":
            raise ValueError(
                "A parameter server is a 'ps' task. Received: task_type="
                f"{cluster.task_type!r}, task_index={cluster.task_index}."
            )
        self.index = cluster.task_index
        self.address = cluster.servers[self.index]
        self._timeouts = timeouts or Timeouts()
        self._session = session or session_name(cluster)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._traffic = traffic or Traffic()
        self._secret = checked_secret((*cluster.workers, *cluster.servers), os.environ)

    def _listen(self) -> None:
        self._listener = Listener.acquire(
            self.address, self._secret, self._timeouts.startup
        )

    def _take(
        self,
        purpose: str,
        kind: type[_Hello],
        seconds: float,
        stop: threading.Event | None = None,
    ) -> list[tuple[int, Connection, _Hello]]:
        """Wait for connections of workers; return them. Damaged ones are refused."""
        arrived: list[tuple[int, Connection, _Hello]] = []
        for rank, connection, hello in self._listener.pending.take_any(
            *(self._session, purpose, seconds, stop)
        ):
            try:
                arrived.append((rank, connection, read_record(hello, kind, "A hello")))
            except ProtocolError as error:
                refuse(connection, str(error))
        return arrived

    def serve(self) -> dict[str, Any]:
        """Serve until the job is over; then close.

        Returns:
            `_stats` at the end, "bytes_received" and "bytes_sent": of all workers'
            requests and of the replies.

        Raises:
            KerasDistError: As `_serve`.
        """
        try:
            self._serve()
        finally:
            self.close()
        return {
            **self._stats(),
            "bytes_received": self._traffic.bytes_received,
            "bytes_sent": self._traffic.bytes_sent,
        }

    @abc.abstractmethod
    def _serve(self) -> None:
        """Serve until the job is over."""

    @abc.abstractmethod
    def _stats(self) -> dict[str, Any]:
        """Return statistics, as a JSON object."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close all connections and threads. Can be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The admission of workers at a `ParameterServer`.

# A worker's rank, its connection, and its hello.
Arrival = tuple[int, Connection, ServerHello]


class Registrar:
    """Admits or refuses workers, in the thread that takes connections.

    Args:
        handler: The server.
        address: Its address, for messages.
        workers: The workers' addresses.
        take: Waits this many seconds for connections, and returns the new ones.
        stop: Set when the server ends.
        last_received: Returns the time of a worker's last frame (monotonic); None: it
            has no connection.
        once: Whether each worker connects at most once: one whose connection ends at
            the start isn't waited for, and refusals list the workers that are missing.
    """

    def __init__(
        self,
        handler: RequestHandler,
        address: str,
        workers: Sequence[str],
        take: Callable[[float], Sequence[Arrival]],
        stop: threading.Event,
        last_received: Callable[[WorkerRecord], float | None],
        *,
        once: bool = False,
    ) -> None:
        self._once = once
        self._handler = handler
        self._address = address
        self._workers = workers
        self._take = take
        self._stop = stop
        self._last_received = last_received
        self._pending: dict[int, tuple[WorkerRecord, Connection]] = {}
        self._arrived_ranks: set[int] = set()
        self._different = ""
        # New processes that may or may not join, by rank; until when.
        self._held: dict[int, Arrival] = {}
        self._patience: Deadline | None = None
        # The arrival of a process whose rank another one has, by its incarnation.
        self._arrived_at: dict[str, float] = {}
        # Whether the whole job was started again, from its snapshots.
        self._all_restarted = False

    # At the start.

    def gather(self, deadline: Deadline) -> list[tuple[WorkerRecord, Connection]]:
        """Wait for all workers; return them, live, and their control connections.

        Raises:
            StartupError: Some are missing, or have other settings; the others were
                sent a refusal.
            TransportClosed: The server was closed.
        """
        name = f"server {self._handler.server}"
        goal = f"{name} ({self._address})"
        with WaitingNotice(name, self._sight, deadline, goal=goal):
            self._wait(deadline)
        pending, self._pending = list(self._pending.values()), {}
        for worker, _ in pending:
            self._handler.membership.enter(worker, None)
        return pending

    def _sight(self) -> Sight:
        """Return which workers are here, in the thread of the notice."""
        here = sorted(self._pending.copy())
        missing = [
            Absent(f"rank {rank}", address)
            for rank, address in enumerate(self._workers)
            if rank not in here
        ]
        return Sight(missing, ranks_in_words(here) if here else "no worker")

    def _wait(self, deadline: Deadline) -> None:
        while len(self._pending) < len(self._workers):
            if self._stop.is_set():
                raise errors.TransportClosed("This server was closed.")
            ended = self._drop_ended()
            if ended and self._once:
                # Others give up because of the first, perhaps before it's seen here.
                self._stop.wait(LOOK_SECONDS)
                raise self._lost(sorted(ended + self._drop_ended()))
            if deadline.expired:
                raise self._missing(deadline)
            for arrival in self._take(min(deadline.remaining(), LOOK_SECONDS)):
                self._accept_handshake(*arrival)
            if self._different:
                # Waiting can't help.
                error = self._dismiss(errors.StartupError(self._different))
                self._turn_away(str(error))
                raise error

    def _drop_ended(self) -> list[int]:
        """Drop workers whose connection has ended; return their ranks."""
        ended = [rank for rank, (_, line) in self._pending.items() if line.ended]
        for rank in ended:
            self._pending.pop(rank)[1].close()
        return ended

    def _accept_handshake(
        self, rank: int, connection: Connection, hello: ServerHello
    ) -> None:
        self._arrived_ranks.add(rank)
        worker = self._examine(rank, connection, hello)
        if worker is None:
            return
        if hello.resume is not None:
            refuse(connection, self._no_snapshot())
            return
        older = self._pending.pop(rank, None)
        if older is not None:
            refuse(older[1], f"Another process connected as {worker}.")
        self._pending[rank] = worker, connection

    def _missing(self, deadline: Deadline) -> errors.StartupError:
        reasons = {
            rank: _ENDED
            if rank in self._arrived_ranks
            else "it never connected to this server"
            for rank in range(len(self._workers))
            if rank not in self._pending
        }
        names = "; ".join(
            f"rank {r} ({self._workers[r]}): {reason}" for r, reason in reasons.items()
        )
        return self._dismiss(
            errors.StartupError(
                f"Not all workers connected to server {self._handler.server} "
                f"({self._address}) within {deadline.seconds:g} s. Received: {names}. "
                "Are they running (look at their output first), and can they reach "
                "this address?",
                reasons,
            )
        )

    def _lost(self, ranks: Sequence[int]) -> errors.StartupError:
        names = ", ".join(f"rank {rank} ({self._workers[rank]})" for rank in ranks)
        more = "" if len(ranks) == 1 else " One of them may have ended the others."
        return self._dismiss(
            errors.StartupError(
                f"Workers were lost at the start. Received: {names}: {_ENDED}.{more} "
                "Look at their output.",
                dict.fromkeys(ranks, _ENDED),
            )
        )

    def _dismiss(self, error: errors.StartupError) -> errors.StartupError:
        """Refuse all connected workers, with the reason why the job doesn't begin."""
        missing = error.missing if self._once else {}
        for _, connection in self._pending.values():
            refuse(connection, str(error), missing)
        self._pending.clear()
        return error

    def _turn_away(self, message: str) -> None:
        """Refuse workers that still arrive, for a moment.

        Without a reply they would retry for as long as the start may take.
        """
        deadline = Deadline(GOODBYE_SECONDS)
        while len(self._arrived_ranks) < len(self._workers) and not (
            deadline.expired or self._stop.is_set()
        ):
            for rank, connection, _ in self._take(_SHORT_LOOK_SECONDS):
                self._arrived_ranks.add(rank)
                refuse(connection, message)

    # Later.

    def later(
        self, rank: int, connection: Connection, hello: ServerHello
    ) -> tuple[WorkerRecord, bool] | None:
        """Admit or refuse a process that connects after the start.

        Returns:
            The worker, live, and whether it's a new process; None if it was refused.
        """
        worker = self._examine(rank, connection, hello)
        if worker is None:
            return None
        members = self._handler.membership
        with members.changed:
            known = members.workers[rank]
            returns = (
                known.incarnation == worker.incarnation
                and known.returned
                and known.state in ("away", "live")
            )
            refusal = self._why_not(known, worker, hello, returns=returns)
            hold = refusal is None and not returns and self._waits(rank, hello)
            if returns and refusal is not None:
                members.lose(known, "it reconnected too late")
            if hold:
                older = self._held.pop(rank, None)
                self._held[rank] = rank, connection, hello
                if older is not None:
                    refuse(older[1], f"Another process connected as {worker}.")
            elif refusal is None and returns:
                self._return(known, worker, hello.resume or WorkerProgress())
            elif refusal is None:
                self._join(known, worker, hello)
        if not hold:
            self._arrived_at.pop(worker.incarnation, None)
        if refusal is not None:
            refuse(connection, refusal)
        return None if hold or refusal is not None else (worker, not returns)

    def waiting(self) -> list[Arrival]:
        """Return the processes that were held in `later` and can be admitted now."""
        members = self._handler.membership
        with members.changed:
            for rank, (_, connection, hello) in list(self._held.items()):
                if connection.ended:
                    self._held.pop(rank)[1].close()
                    self._arrived_at.pop(hello.incarnation, None)
            ready = [
                arrival
                for rank, arrival in self._held.items()
                if members.failure is not None or not self._waits(rank, arrival[2])
            ]
            for rank, _, _ in ready:
                del self._held[rank]
        return ready

    def _waits(self, rank: int, hello: ServerHello) -> bool:
        """Return whether a new process has to be held for now. Under `changed`."""
        return self._answers(rank, hello) is None or self._is_open(rank, hello)

    def _answers(self, rank: int, hello: ServerHello) -> bool | None:
        """Return whether another process with this rank is alive; None: unknown yet.

        A frame from it after the new one's arrival proves it. Else it's lost after
        `heartbeat` seconds, and its connection ends at once if it was killed.
        """
        here = self._handler.membership.workers[rank]
        if here.state != "live" or here.incarnation == hello.incarnation:
            return False
        received = self._last_received(here)
        if received is None:
            return False
        arrival = self._arrived_at.setdefault(hello.incarnation, time.monotonic())
        return True if received > arrival else None

    def _is_open(self, rank: int, hello: ServerHello) -> bool:
        """Return whether it is open if a new process joins others. Under `changed`."""
        workers = self._handler.membership.workers
        if (
            self._all_restarted
            or self._handler.server != 0
            or not hello.join_barrier
            or not (self._handler.resumed and workers[rank].returned)
            or any(each.returned and each.state == "live" for each in workers)
        ):
            return False
        if not any(
            each.state == "away" and each.rank not in (rank, *self._held)
            for each in workers
        ):
            return False
        if self._patience is None:
            self._patience = Deadline(RETURN_SECONDS)
        return not self._patience.expired

    def _why_not(
        self,
        known: WorkerRecord,
        worker: WorkerRecord,
        hello: ServerHello,
        *,
        returns: bool,
    ) -> str | None:
        failure = self._handler.membership.failure
        if failure is not None:
            return f"The job has failed: {failure}"
        if returns and self._all_restarted:
            return (
                f"{worker} reconnected too late: the job was started again without it"
            )
        if hello.resume is not None and not returns:
            if known.incarnation == worker.incarnation:
                return f"{worker} was taken for lost, and reconnected too late"
            return self._no_snapshot()
        answers = None if returns else self._answers(worker.rank, hello)
        if answers:
            return (
                f"{worker} is connected already, and alive. Do two processes have the "
                "same task (TF_CONFIG), or does the script make a second "
                "ParameterServerStrategy? End one of the processes, or use one "
                "strategy for all models."
            )
        if answers is False and self._handler.settings.mode == "sync":
            return (
                f"{worker} connected after the start, and a job with mode='sync' "
                "can't be joined. Start the whole job again, or use mode='async'."
            )
        return None

    def _return(
        self, known: WorkerRecord, worker: WorkerRecord, progress: WorkerProgress
    ) -> None:
        worker.met = max(known.met, progress.met)
        worker.clock = max([known.clock, *progress.clocks.values()])
        worker.returned = True
        worker.joining = progress.joining
        self._handler.tables.return_at(worker.rank, progress.clocks)
        for dataset, (epoch, numbers) in progress.claims.items():
            self._handler.batch_queue.resume(dataset, epoch, numbers)
        self._handler.membership.enter(worker, "returned")

    def _join(
        self, known: WorkerRecord, worker: WorkerRecord, hello: ServerHello
    ) -> None:
        members = self._handler.membership
        # As server 0 decided, or by this server's own decision.
        worker.joining = hello.join_barrier and (
            self._others_train(known) if hello.joining is None else hello.joining
        )
        # All others wait for it from the start, or none of them do.
        self._all_restarted = self._all_restarted or (
            self._handler.resumed and hello.join_barrier and not worker.joining
        )
        members.lose(known, "another process joined with its rank")
        # Server 0 knows the last finished collective; the joiner reports it to others.
        worker.met = (
            self._handler.collectives.number if hello.met is None else hello.met
        )
        if self._handler.server == 0:
            # A joiner doesn't take part in collectives that any worker has finished.
            worker.met = max(worker.met, *(each.met for each in members.workers))
        members.enter(worker, "joined")

    def _others_train(self, known: WorkerRecord) -> bool:
        """Return whether there is a job to join; else all tasks were started again."""
        back = any(
            p.returned and p.state == "live" for p in self._handler.membership.workers
        )
        return back or not (self._handler.resumed and known.returned)

    # At any time.

    def _examine(
        self, rank: int, connection: Connection, hello: ServerHello
    ) -> WorkerRecord | None:
        """Return the worker of a connection; None if it was refused."""
        here = self._handler.server
        mine = self._handler.settings.agreed()
        theirs = hello.settings
        if hello.line != "control":
            connection.close()
            return None
        if not 0 <= rank < len(self._workers):
            fault = f"There is no rank {rank} among {len(self._workers)} workers."
        elif hello.server != here:
            fault = (
                f"This is server {here} of the job. Received: server="
                f"{hello.server}. Are the servers' addresses the same, in the "
                "same order, in all tasks?"
            )
        elif theirs != mine:
            fault = self._different = different_settings(here, rank, theirs, mine)
        else:
            return WorkerRecord(
                *(rank, self._workers[rank], hello.incarnation, hello.replicas, "live")
            )
        refuse(connection, fault)
        return None

    def _no_snapshot(self) -> str:
        return (
            f"server {self._handler.server} was started again and has no snapshot of "
            "this job, so that its part of the weights is gone"
        )

    def close(self) -> None:
        """Close the connections of workers that wait for others."""
        for _, connection in self._pending.values():
            connection.close()
        for _, connection, _ in self._held.values():
            connection.close()
