"""A parameter server on the network.

    c: a worker     s: a server     one listening socket per server

    1. c -> s   connect, handshake, hello for a control connection: who I am, what I
                was asked for, which process I am; again and again until `startup`
    2. s        waits for all workers, the first time; compares what they were asked for
    3. s -> c   ROSTER: who I am, all workers' addresses     -> the worker is live
           or   REFUSAL: why not
    4. c -> s   connect, handshake, hello for a data connection; on the same host
                through a Unix socket, so that memory can be shared
    5. both     heartbeats on the control connection       (kerasdist.ps.heartbeat) 6. c
    -> s   a REQUEST on the data connection             (kerasdist.ps.server.handler)
       s -> c   its REPLY, or a FAILURE; then 6. again
    7. c -> s   GOODBYE on the control connection

Later a new process may come with a lost worker's rank (1. and 3. without 2.) if the job
is "async". After a restart of the server its workers come back the same way, and each
says what it has done (`resume`); a server without a snapshot refuses them.

Threads: one that accepts (the listener's), one that lets in (`serve`), one that watches
the control connections, one per worker that answers its requests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.ps.channel.socket_channel import SocketChannel
from kerasdist.ps.heartbeat import Heartbeat
from kerasdist.ps.layout import Layout
from kerasdist.ps.server.handler import Goodbye, RequestHandler
from kerasdist.ps.server.membership import Event, WorkerRecord
from kerasdist.ps.server.registration import (
    FAREWELL_SECONDS,
    LOOK_SECONDS,
    PURPOSE,
    Registrar,
)
from kerasdist.ps.settings import ServerSettings
from kerasdist.transport.connection import Connection
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.liveness.failure_protocol import encode
from kerasdist.transport.log import background_log
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.rendezvous.member import host_key
from kerasdist.transport.timeouts import Timeouts
from kerasdist.transport.wire.framing import FrameType, unexpected
from kerasdist.transport.wire.messages import to_json
from kerasdist.transport.wire.secret import job_secret

__all__ = ["ParameterServer", "session_name"]

_ANSWER_SECONDS = 5.0
# How long a broken data connection waits for what the control connection says.
_VERDICT_SECONDS = 2.0
_JOIN_SECONDS = 10.0
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
        self._settings = settings
        self._timeouts = timeouts or Timeouts()
        self._host = host or host_key()
        self._session = session_name(cluster)
        self._incarnation = secrets.token_hex(8)
        self._stop = threading.Event()
        self._serving: dict[str, tuple[SocketChannel, threading.Thread]] = {}
        self._lock = threading.Lock()
        self._bytes_received = self._bytes_sent = 0
        self._closed = False
        secret = job_secret((*cluster.workers, *cluster.servers), os.environ)
        size = len(cluster.workers)
        self.desk = RequestHandler(
            *(self.index, len(cluster.servers), size, settings, self._timeouts),
            on_table,
        )
        self._on_start = on_start
        self._admission = Registrar(
            *(self.desk, self.address, cluster.workers, self._take, self._stop),
            heard=lambda person: self._watch.heard((person.rank, person.incarnation)),
        )
        patience = self._timeouts.startup
        try:
            self._listener = Listener.acquire(self.address, secret, patience)
        except BaseException:
            self.desk.close()
            raise
        self._watch = Heartbeat(
            f"server {self.index}", self._timeouts, self._on_frame, self._ended
        )
        crew = self.desk.crew
        crew.on_event.append(self._note)
        crew.on_failure.append(self._failed)

    # The whole life of a server.

    def serve(self) -> dict[str, Any]:
        """Serve until every worker has finished or is lost; then close.

        Returns:
            `RequestHandler.stats` at the end, "bytes_received" and "bytes_sent": of all
            workers' requests and of the answers.

        Raises:
            StartupError: Workers didn't come; the others have been told.
            CollectiveError: The job's failure; if all workers are lost, the loss of
                another server that they have told of, or else that of the last one.
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
        if not self.desk.resumed:
            self._gather()
        elif self._on_start is not None:
            self._on_start()
        if self.desk.keeper is not None:
            self.desk.keeper.start()
        # Those of a snapshot who don't come again aren't waited for for ever.
        patience = Deadline(self._settings.restart_timeout)
        while not self._stop.is_set():
            for came in (*self._take(LOOK_SECONDS), *self._admission.waiting()):
                self._let_in(*came)
            if self.desk.resumed and patience.expired:
                self._give_up_on_absent(patience)
        # Who comes to a job that has failed hears why.
        farewell = Deadline(FAREWELL_SECONDS)
        while not (crew.over or farewell.expired or self._closed):
            new = self._listener.take_any(self._session, PURPOSE, _SHORT_LOOK_SECONDS)
            for came in (*new, *self._admission.waiting()):
                self._let_in(*came)
        with crew.changed:
            if crew.failure is not None:
                raise crew.failure
            finished = any(person.state == "finished" for person in crew.people)
            lost = [event for event in self.desk.events if event.kind == "lost"]
        if self._closed and not crew.over:
            raise errors.TransportClosed("This server was closed.")
        if not finished and self.desk.server_lost is not None:
            # Why the workers have left: none of them is to blame.
            raise self.desk.server_lost
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
        self._admission.close()
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

    # Steps 1 to 4.

    def _gather(self) -> None:
        guests = self._admission.gather(Deadline(self._timeouts.startup))
        if self._on_start is not None:
            self._on_start()
        for person, connection in guests:
            self._open_line(person, connection, joined=False)

    def _take(self, seconds: float) -> Sequence[tuple[int, Connection, Any]]:
        return self._listener.take_any(self._session, PURPOSE, seconds, self._stop)

    def _let_in(self, rank: int, connection: Connection, hello: dict[str, Any]) -> None:
        try:
            if hello.get("line") == "data":
                self._attend(rank, connection, hello)
                return
            found = self._admission.later(rank, connection, hello)
            if found is not None:
                person, joined = found
                self._open_line(person, connection, joined=joined)
        except Exception:
            # Whatever one of them says, the others are served.
            background_log.log(
                *(logging.ERROR, "kerasdist: letting rank %d in failed", rank),
                exc_info=True,
            )
            connection.close()

    def _open_line(
        self, person: WorkerRecord, connection: Connection, *, joined: bool
    ) -> None:
        people = self.desk.crew.people
        roster = {
            "server": self.index,
            "incarnation": self._incarnation,
            "host": self._host,
            "unix_name": self._listener.unix_name,
            "replicas": [each.replicas for each in people],
            "met": person.met,
            "joined": joined,
            "joining": person.joining,
            "resumed": self.desk.resumed,
            "seed": self.desk.stores.seed,
        }
        try:
            deadline = Deadline(_ANSWER_SECONDS)
            connection.write_json(FrameType.ROSTER, roster, deadline)
        except OSError:  # it has died since: the watch finds that out
            pass
        self._watch.add((person.rank, person.incarnation), connection)

    def _attend(self, rank: int, connection: Connection, hello: dict[str, Any]) -> None:
        crew = self.desk.crew
        incarnation = str(hello.get("incarnation"))
        person = (
            crew.current(rank, incarnation) if 0 <= rank < len(crew.people) else None
        )
        with self._lock:
            if person is None or self._closed:
                connection.close()
                return
            channel = SocketChannel(connection, shared=hello.get("shared") is True)
            thread = threading.Thread(
                target=self._answer,
                args=(person, channel),
                name=f"kerasdist-server {self.index} rank {rank}",
                daemon=True,
            )
            self._serving[incarnation] = channel, thread
            thread.start()

    def _answer(self, person: WorkerRecord, channel: SocketChannel) -> None:
        crew = self.desk.crew
        try:
            seen = self.desk.serve(person, channel)
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

    def _on_frame(self, key: Hashable, kind: FrameType, payload: bytes) -> None:
        person = self._person(key)
        if kind is FrameType.NOTICE:
            if person is not None:
                self._pass_on(person, payload)
            return
        if kind is not FrameType.GOODBYE:
            raise unexpected(kind)
        if person is not None:
            self.desk.leave(person, Goodbye.from_payload(payload))

    def _ended(self, key: Hashable, reason: str) -> tuple[FrameType, bytes] | None:
        person = self._person(key)
        if person is None or not self.desk.crew.lose(person, reason):
            return None
        # It may have been frozen, and wake up later.
        lost = errors.WorkerLost(
            *(person.rank, person.address, person.clock, reason),
            others_go_on=self._settings.mode == "async" and not self.desk.crew.over,
        )
        return FrameType.FAILURE, encode(lost)

    def _pass_on(self, sender: WorkerRecord, payload: bytes) -> None:
        """Send a worker's notice to another one, or to all others."""
        notice = to_json(payload)
        to = notice.get("to")
        value = {"from": sender.rank, "value": notice.get("value")}
        for person in self.desk.crew.people:
            meant = person.rank == to if to is not None else person is not sender
            if person.state == "live" and meant:
                key = person.rank, person.incarnation
                self._watch.post(key, FrameType.NOTICE, json.dumps(value).encode())

    def _person(self, key: Hashable) -> WorkerRecord | None:
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
