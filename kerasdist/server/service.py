"""A parameter server on the network.

    c: a worker     s: a server     one listening socket per server

    1. c -> s   connect, handshake, hello for a control connection: who I am, what I
                was asked for, which process I am; again and again until `startup`
    2. s        waits for all workers, the first time; compares what they were asked for
    3. s -> c   ROSTER: who I am, all workers' addresses     -> the worker is live
           or   REFUSAL: why not
    4. c -> s   connect, handshake, hello for a data connection; on the same host
                through a Unix socket, so that memory can be shared
    5. both     heartbeats on the control connection       (kerasdist.server.watch)
    6. c -> s   a REQUEST on the data connection             (kerasdist.server.desk)
       s -> c   its REPLY, or a FAILURE; then 6. again
    7. c -> s   GOODBYE on the control connection

Later a new process may come with a lost worker's rank (1. and 3. without 2.) if the job
is "async". After a restart of the server its workers come back the same way, and each
says what it has done (`resume`); a server without a snapshot refuses them.

Threads: one that accepts (the listener's), one that lets in (`serve`), one that watches
the control connections, one per worker that answers its requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Hashable
from typing import Any

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.server.crew import Event, Person
from kerasdist.server.desk import Desk, Farewell
from kerasdist.server.layout import Layout
from kerasdist.server.loads import Load
from kerasdist.server.settings import ServerSettings
from kerasdist.server.watch import Watch
from kerasdist.server.wire import SocketChannel
from kerasdist.transport.control import write_json
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.failures import encode
from kerasdist.transport.framing import FrameType
from kerasdist.transport.listener import Listener
from kerasdist.transport.member import host_key
from kerasdist.transport.secret import job_secret
from kerasdist.transport.startup import gone
from kerasdist.transport.timeouts import Timeouts

__all__ = ["PURPOSE", "ParameterServer", "session_name"]

PURPOSE = "server"
# How long a failed job's connections stay open, for workers to hear why.
_FAREWELL_SECONDS = 5.0
_ANSWER_SECONDS = 5.0
# How long a broken data connection waits for what the control connection says.
_VERDICT_SECONDS = 2.0
_JOIN_SECONDS = 10.0
_LOOK_SECONDS = 0.25
_SHORT_LOOK_SECONDS = 0.05


def session_name(cluster: Cluster) -> str:
    """What the session of a cluster's servers is called, alike in all tasks."""
    # In any order: that a server is taken for another one is found later, and said.
    text = json.dumps([cluster.workers, sorted(cluster.servers)])
    return "servers-" + hashlib.sha256(text.encode()).hexdigest()[:16]


class ParameterServer:
    """One server of a job: listens, and serves its workers until they have finished.

    Args:
        cluster: The job; this process is one of its `servers`.
        settings: What the job was asked for; the workers' must be equal.
        timeouts: How long each phase may take.
        on_table: Called with the layout of each table when the chief has brought its
            first values, for instance to say what this server holds.
        on_split: Called with what one worker sends to each server in a step, when the
            first step of a "sync" job is over.
        on_start: Called when all workers have come, before any of them hears of it;
            of a server that goes on from a snapshot at once.
        host: Overrides `host_key()`, for tests.

    Attributes:
        index: Index among the servers.
        address: Its address.

    Raises:
        ValueError: This process is no server of the cluster.
        ClusterError: There is no secret where one is needed.
        AddressInUseError: The server's port is taken.
        SnapshotError: There is a snapshot that can't be used.

    From the constructor on it listens; `serve` answers. `close` ends both.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: ServerSettings,
        *,
        timeouts: Timeouts | None = None,
        on_table: Callable[[Layout], None] | None = None,
        on_split: Callable[[list[Load]], None] | None = None,
        on_start: Callable[[], None] | None = None,
        host: str | None = None,
    ) -> None:
        if cluster.task_type != "ps":
            raise ValueError(
                "A parameter server is a 'ps' task. Received: task_type="
                f"{cluster.task_type!r}, task_index={cluster.task_index}."
            )
        self.index = cluster.task_index
        self.address = cluster.servers[self.index]
        self._workers = cluster.workers
        self._settings = settings
        self._timeouts = timeouts or Timeouts()
        self._host = host or host_key()
        self._session = session_name(cluster)
        self._incarnation = secrets.token_hex(8)
        self._stop = threading.Event()
        self._guests: dict[int, tuple[Person, socket.socket]] = {}
        self._serving: dict[str, tuple[SocketChannel, threading.Thread]] = {}
        self._lock = threading.Lock()
        self._bytes_received = self._bytes_sent = 0
        self._closed = False
        secret = job_secret((*cluster.workers, *cluster.servers), os.environ)
        size = len(cluster.workers)
        self.desk = Desk(
            *(self.index, len(cluster.servers), size, settings, self._timeouts),
            on_table,
            on_split,
        )
        self._on_start = on_start
        self._different = ""
        self._came: set[int] = set()
        self._gathering = not self.desk.resumed
        self._listener = Listener.acquire(self.address, secret)
        self._watch = Watch(
            f"server {self.index}", self._timeouts, self._hear, self._ended
        )
        crew = self.desk.crew
        crew.on_event.append(self._note)
        crew.on_failure.append(self._failed)

    # The whole life of a server.

    def serve(self) -> dict[str, Any]:
        """Serve until every worker has finished or is lost; then close.

        Returns:
            `Desk.stats` at the end, and "bytes_received" and "bytes_sent": of all
            workers' requests and of the answers.

        Raises:
            StartupError: Workers didn't come; the others have been told.
            CollectiveError: The job's failure; if all workers are lost, the last one's.
        """
        try:
            self._serve()
            stats = self.desk.stats()
        finally:
            self.close()
        with self._lock:
            return {
                **stats,
                "bytes_received": self._bytes_received,
                "bytes_sent": self._bytes_sent,
            }

    def _serve(self) -> None:
        crew = self.desk.crew
        if self._gathering:
            self._gather()
        elif self._on_start is not None:
            self._on_start()
        if self.desk.keeper is not None:
            self.desk.keeper.start()
        # Those of a snapshot who don't come again aren't waited for for ever.
        patience = Deadline(self._settings.restart_timeout)
        while not self._stop.is_set():
            for came in self._listener.take_any(
                self._session, PURPOSE, _LOOK_SECONDS, self._stop
            ):
                self._let_in(*came)
            if self.desk.resumed and patience.expired:
                self._give_up_on_absent(patience)
        # Who comes to a job that has failed hears why.
        farewell = Deadline(_FAREWELL_SECONDS)
        while not (crew.over or farewell.expired or self._closed):
            for came in self._listener.take_any(
                self._session, PURPOSE, _SHORT_LOOK_SECONDS
            ):
                self._let_in(*came)
        with crew.changed:
            if crew.failure is not None:
                raise crew.failure
            finished = any(person.state == "finished" for person in crew.people)
            lost = [event for event in self.desk.events if event.kind == "lost"]
        if self._closed and not crew.over:
            raise errors.TransportClosed("This server was closed.")
        if not finished and lost:
            last = lost[-1]
            raise errors.WorkerLost(last.rank, last.address, last.clock, last.reason)

    def close(self) -> None:
        """Close all connections and give back what is held. Can be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            serving = list(self._serving.values())
        self._stop.set()
        self._listener.interrupt()
        for _, sock in self._guests.values():
            sock.close()
        self._watch.close()
        for channel, _ in serving:
            channel.abort()
        for _, thread in serving:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)
        self._listener.release()
        self.desk.close()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Steps 1 to 3, the first time.

    def _gather(self) -> None:
        deadline = Deadline(self._timeouts.startup)
        size = len(self._workers)
        while len(self._guests) < size:
            if self._stop.is_set():
                raise errors.TransportClosed("This server was closed.")
            if deadline.expired:
                raise self._missing(deadline)
            seconds = min(deadline.remaining(), _LOOK_SECONDS)
            for rank, sock, hello in self._listener.take_any(
                self._session, PURPOSE, seconds, self._stop
            ):
                self._welcome(rank, sock, hello)
            if self._different:
                # Waiting wouldn't help anybody.
                error = self._dismiss(errors.StartupError(self._different))
                self._turn_away(str(error))
                raise error
            for rank, (_, sock) in list(self._guests.items()):
                if gone(sock):
                    self._guests.pop(rank)[1].close()
        self._gathering = False
        guests, self._guests = self._guests, {}
        for person, _ in guests.values():
            self.desk.crew.enter(person, None)
        if self._on_start is not None:
            self._on_start()
        for person, sock in guests.values():
            self._open_line(person, sock, joined=False)

    def _welcome(self, rank: int, sock: socket.socket, hello: dict[str, Any]) -> None:
        self._came.add(rank)
        person = self._examine(rank, sock, hello)
        if person is None:
            return
        if hello.get("resume"):
            _refuse(sock, self._no_snapshot())
            return
        older = self._guests.pop(rank, None)
        if older is not None:
            _refuse(older[1], f"Another process came as {person}.")
        self._guests[rank] = person, sock

    def _missing(self, deadline: Deadline) -> errors.StartupError:
        reasons = {
            rank: "it never came to this server"
            for rank in range(len(self._workers))
            if rank not in self._guests
        }
        names = ", ".join(f"rank {r} ({self._workers[r]})" for r in reasons)
        return self._dismiss(
            errors.StartupError(
                f"{names} didn't come to server {self.index} ({self.address}) within "
                f"{deadline.seconds:g} s. Are they running (look at their output "
                "first), and can they reach this address?",
                reasons,
            )
        )

    def _dismiss(self, error: errors.StartupError) -> errors.StartupError:
        """Tell all who have come why the job doesn't begin."""
        for _, sock in self._guests.values():
            _refuse(sock, str(error))
        self._guests.clear()
        return error

    def _turn_away(self, message: str) -> None:
        """Tell it to those who are on their way, for a moment.

        Who finds nobody would try again for as long as the start may take.
        """
        deadline = Deadline(_FAREWELL_SECONDS)
        while len(self._came) < len(self._workers) and not (
            deadline.expired or self._stop.is_set()
        ):
            for rank, sock, _ in self._listener.take_any(
                self._session, PURPOSE, _SHORT_LOOK_SECONDS, self._stop
            ):
                self._came.add(rank)
                _refuse(sock, message)

    # Steps 1 to 4, later.

    def _let_in(self, rank: int, sock: socket.socket, hello: dict[str, Any]) -> None:
        if hello.get("line") == "data":
            self._attend(rank, sock, hello)
            return
        person = self._examine(rank, sock, hello)
        if person is None:
            return
        crew = self.desk.crew
        resume = hello.get("resume")
        with crew.changed:
            known = crew.people[rank]
            returns = (
                known.incarnation == person.incarnation
                and known.returned
                and known.state in ("away", "live")
            )
            refusal = None
            if crew.failure is not None:
                refusal = f"The job has failed: {crew.failure}"
            elif resume and not returns:
                refusal = self._no_snapshot()
                if known.incarnation == person.incarnation:
                    refusal = f"{person} was taken for lost, and came back too late"
            elif not returns and self._settings.mode == "sync":
                refusal = (
                    f"{person} came after the start, and nobody can join a job with "
                    "mode='sync'. Start the whole job again, or use mode='async'."
                )
            if refusal is not None:
                _refuse(sock, refusal)
                return
            if returns:
                clocks = _clocks(resume)
                person.met = max(known.met, _number(resume, "met"))
                person.clock = max([known.clock, *clocks.values()])
                person.returned = True
                self.desk.stores.return_at(rank, clocks)
                crew.enter(person, "returned")
            else:
                crew.lose(known, "another process came with its rank")
                # Server 0 says which collectives are over; the others hear it.
                met = hello.get("met")
                person.met = met if isinstance(met, int) else self.desk.meetings.number
                person.met = max(person.met, *self._most_met())
                crew.enter(person, "joined")
        self._open_line(person, sock, joined=not returns)

    def _most_met(self) -> tuple[int, ...]:
        """Collectives that anybody has finished: a joiner needn't come to them."""
        if self.index != 0:
            return (0,)
        return tuple(person.met for person in self.desk.crew.people)

    def _examine(
        self, rank: int, sock: socket.socket, hello: dict[str, Any]
    ) -> Person | None:
        """Return who came; None if it was refused."""
        mine = self._settings.agreed()
        theirs = hello.get("settings")
        incarnation, replicas = hello.get("incarnation"), hello.get("replicas")
        if hello.get("line") != "control":
            sock.close()
            return None
        if not 0 <= rank < len(self._workers):
            fault = f"There is no rank {rank} among {len(self._workers)} workers."
        elif hello.get("server") != self.index:
            fault = (
                f"This is server {self.index} of the job. Received: server="
                f"{hello.get('server')!r}. Are the servers' addresses the same, in the "
                "same order, in all tasks?"
            )
        elif theirs != mine:
            fault = (
                f"Server {self.index} and rank {rank} were asked for different things. "
                f"Received: {theirs!r}, here {mine!r}. Give all tasks the same "
                "arguments."
            )
            self._different = fault
        elif not isinstance(incarnation, str) or not isinstance(replicas, int):
            fault = f"A hello is damaged. Received: {hello!r}."
        else:
            address = self._workers[rank]
            return Person(rank, address, incarnation, replicas, "live")
        _refuse(sock, fault)
        return None

    def _no_snapshot(self) -> str:
        return (
            f"server {self.index} was started again and has no snapshot of this job, "
            "so that its part of the weights is gone"
        )

    def _open_line(self, person: Person, sock: socket.socket, *, joined: bool) -> None:
        people = self.desk.crew.people
        roster = {
            "server": self.index,
            "incarnation": self._incarnation,
            "host": self._host,
            "unix_name": self._listener.unix_name,
            "replicas": [each.replicas for each in people],
            "met": person.met,
            "joined": joined,
        }
        try:
            write_json(sock, FrameType.ROSTER, roster, Deadline(_ANSWER_SECONDS))
        except OSError:  # it has died since: the watch finds that out
            pass
        self._watch.add((person.rank, person.incarnation), sock)

    def _attend(self, rank: int, sock: socket.socket, hello: dict[str, Any]) -> None:
        crew = self.desk.crew
        incarnation = str(hello.get("incarnation"))
        person = (
            crew.current(rank, incarnation) if 0 <= rank < len(crew.people) else None
        )
        with self._lock:
            if person is None or self._closed:
                sock.close()
                return
            channel = SocketChannel(sock, shared=hello.get("shared") is True)
            thread = threading.Thread(
                target=self._answer,
                args=(person, channel),
                name=f"kerasdist-server {self.index} rank {rank}",
                daemon=True,
            )
            self._serving[incarnation] = channel, thread
            thread.start()

    def _answer(self, person: Person, channel: SocketChannel) -> None:
        crew = self.desk.crew
        try:
            seen = self.desk.attend(person, channel)
        finally:
            channel.close()
            with self._lock:
                self._bytes_received += channel.bytes_received
                self._bytes_sent += channel.bytes_sent
        with crew.changed:
            # Did it say goodbye, has it died? The control connection knows better.
            crew.changed.wait_for(
                lambda: person.state != "live" or self._closed, _VERDICT_SECONDS
            )
            if not self._closed:
                crew.lose(person, seen)
        with self._lock:
            if self._serving.get(person.incarnation, (None,))[0] is channel:
                del self._serving[person.incarnation]

    def _give_up_on_absent(self, patience: Deadline) -> None:
        crew = self.desk.crew
        with crew.changed:
            for person in crew.people:
                if person.state == "away":
                    crew.lose(
                        person,
                        f"it didn't come back within {patience.seconds:g} s after this "
                        "server was restarted",
                    )

    # What the watch hears, and what happens to workers.

    def _hear(self, key: Hashable, kind: FrameType, payload: bytes) -> None:
        person = self._person(key)
        if kind is not FrameType.GOODBYE:
            raise errors.ProtocolError(f"A {kind.name} frame isn't due now.")
        if person is not None:
            self.desk.leave(person, Farewell.from_payload(payload))

    def _ended(self, key: Hashable, reason: str) -> tuple[FrameType, bytes] | None:
        person = self._person(key)
        if person is None or not self.desk.crew.lose(person, reason):
            return None
        # It may have been frozen, and wake up later.
        lost = errors.WorkerLost(person.rank, person.address, person.clock, reason)
        return FrameType.FAILURE, encode(lost)

    def _person(self, key: Hashable) -> Person | None:
        if not isinstance(key, tuple):
            return None
        return self.desk.crew.current(*key)

    def _note(self, event: Event) -> None:
        crew = self.desk.crew
        payload = json.dumps(event.to_json()).encode()
        for person in crew.people:
            if person.state == "live" and person.rank != event.rank:
                key = person.rank, person.incarnation
                self._watch.post(key, FrameType.EVENT, payload)
        if event.kind == "lost":
            person = crew.people[event.rank]
            with self._lock:
                found = self._serving.get(person.incarnation)
            if found is not None:
                found[0].abort()
        if crew.over:
            self._end()

    def _failed(self, error: errors.CollectiveError) -> None:
        for person in self.desk.crew.people:
            if person.state in ("live", "lost"):
                key = person.rank, person.incarnation
                self._watch.post(key, FrameType.FAILURE, encode(error))
        self._end()

    def _end(self) -> None:
        self._stop.set()
        self._listener.interrupt()


def _refuse(sock: socket.socket, message: str) -> None:
    with contextlib.suppress(OSError):
        write_json(
            sock, FrameType.REFUSAL, {"message": message}, Deadline(_ANSWER_SECONDS)
        )
    sock.close()


def _number(resume: Any, name: str) -> int:
    value = resume.get(name) if isinstance(resume, dict) else None
    return value if isinstance(value, int) else 0


def _clocks(resume: Any) -> dict[int, int]:
    value = resume.get("clocks") if isinstance(resume, dict) else None
    try:
        return {int(k): int(v) for k, v in dict(value or {}).items()}
    except (TypeError, ValueError):
        return {}
