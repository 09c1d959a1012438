"""A parameter server on the network.

    c: a worker     s: a server     one listening socket per server

    1. c -> s   connect, handshake, hello for a control connection: rank, settings and
                identity of the process; repeated until `startup`
    2. s        waits for all workers, the first time; compares their settings
    3. s -> c   ROSTER: server and workers                   -> the worker is live
           or   REFUSAL: the reason
    4. c -> s   connect, handshake, hello for a data connection; on the same host
                through a Unix socket, so that memory can be shared
    5. both     heartbeats on the control connection (transport.liveness.heartbeat)
    6. c -> s   a REQUEST on the data connection     (parameter_server.server.handler)
       s -> c   its REPLY, or a FAILURE; then 6. again
    7. c -> s   on the control connection GOODBYE: whether the script ended well;
                NOTICE: an announcement, passed on to other workers
       s -> c   EVENT: a worker was lost, has joined, has finished; FAILURE: the job's

Later a new process may join with a lost worker's rank (1. and 3. without 2.) if the job
is "async". After a restart of the server its workers reconnect the same way, and each
reports its progress (`resume`); a server without a snapshot refuses them.

Threads: one that accepts (the listener's), one that registers workers (`serve`), one
that watches the control connections, one per worker that serves its requests.
"""

from __future__ import annotations

import collections
import functools
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.errors import ServerLost, WorkerLost
from kerasdist.parameter_server.channel import Channel, Traffic
from kerasdist.parameter_server.layout import Layout, ServerSettings
from kerasdist.parameter_server.membership import (
    Event,
    Goodbye,
    ServerHello,
    ServerRoster,
    Successor,
    WorkerRecord,
)
from kerasdist.parameter_server.server.handler import (
    Load,
    RequestHandler,
    loads_of,
    share_in_words,
)
from kerasdist.parameter_server.server.registration import (
    GOODBYE_SECONDS,
    LOOK_SECONDS,
    PURPOSE,
    Arrival,
    Registrar,
    ServerTask,
    session_name,
)
from kerasdist.transport import log
from kerasdist.transport.base import Connection
from kerasdist.transport.deadline import Deadline, Timeouts, daemon
from kerasdist.transport.framing import (
    FrameType,
    read_record,
    to_json,
    to_object,
    unexpected,
)
from kerasdist.transport.liveness.failure_protocol import encode, hand_over_final_error
from kerasdist.transport.liveness.heartbeat import Frame, Heartbeat
from kerasdist.transport.liveness.launcher_pipe import ServerReporter
from kerasdist.transport.rendezvous.dial import answer
from kerasdist.transport.rendezvous.startup import host_key

# The process of a parameter server: its output, and its reports to the launcher.

_FLUSH_SECONDS = 1.0


def run_server(
    cluster: Cluster, settings: ServerSettings, timeouts: Timeouts | None = None
) -> None:
    """Run a server of a job until the job is over.

    Strategies of the workers' scripts that have other settings are served one after the
    other, each by a `ParameterServer` of its own. Each logs the number of its workers,
    its part of each table when that is opened (with "sync" its part of a step, when the
    first one is finished), and at the end the traffic and the staleness of the weights
    that were read.

    Args:
        cluster: The job; this process is one of its `servers`.
        settings: The job's settings; the workers' must be the same.
        timeouts: The time limit of each phase.

    Raises:
        KerasDistError: As `ParameterServer` and its `serve`.
    """
    hand_over_final_error()
    part = 0
    following: Successor | None = Successor(
        settings=settings, timeouts=timeouts or Timeouts()
    )
    while following is not None:
        following = _serve_part(cluster, following, part)
        part += 1


def _serve_part(cluster: Cluster, served: Successor, part: int) -> Successor | None:
    """Serve until all workers have finished; return what their scripts continue with.

    Args:
        cluster: The job.
        served: The settings.
        part: How often the scripts have continued with other settings.
    """
    settings = served.settings
    name = name_of(cluster)

    def opened(layout: Layout) -> None:
        share = share_in_words(loads_of(layout), cluster.task_index)
        log_line(f"{name} holds {share}; variables: {len(layout.variables):,}.")

    def split(loads: list[Load]) -> None:
        share = share_in_words(loads, cluster.task_index)
        log_line(f"{name} gets of each worker and step: {share}.")

    launcher = ServerReporter(cluster.task_index)
    patience = settings.restart_timeout if settings.restartable else 0.0
    started = functools.partial(launcher.report, "begun", patience=patience)
    tolerant = settings.mode == "async"
    server = ParameterServer(
        cluster,
        settings,
        timeouts=served.timeouts,
        on_start=started if tolerant else None,
        session=session_name(cluster, part),
    )
    server.handler.on_split = split
    server.handler.tables.on_table = opened
    members = server.handler.membership
    if tolerant:
        # Before it is reported to any worker, which then ends.
        report = launcher.report
        members.on_failure.insert(
            0, lambda e: report("failed", reason=f"{type(e).__name__}: {e}")
        )
        members.on_event.insert(
            0, lambda event: report(event.kind, rank=event.rank, reason=event.reason)
        )
    log_line(f"{name} serves {cluster.size} worker(s), mode={settings.mode!r}.")
    for table in server.handler.tables.tables.values():  # those of a snapshot
        opened(table.layout)
    serve_logged(cluster, server)
    return members.successor


def serve_logged(cluster: Cluster, server: ServerTask) -> None:
    """Serve until the job is over, and log the traffic."""
    try:
        stats = server.serve()
    except (WorkerLost, ServerLost):
        # It may end before the lost task does.
        ServerReporter(cluster.task_index).report("gave_up")
        raise
    epochs = f"{stats['epochs']:,} epochs, " if "epochs" in stats else ""
    log_line(
        f"{name_of(cluster)} has finished: {epochs}{stats['requests']:,} requests, "
        f"{stats['bytes_received']:,} bytes received, {stats['bytes_sent']:,} sent"
        f"{_staleness_in_words(stats.get('tables', []))}."
    )
    log.flush(_FLUSH_SECONDS)


def _staleness_in_words(tables: list[dict[str, Any]]) -> str:
    """Return the staleness of all reads as text; "" if there was none."""
    counts: collections.Counter[int] = collections.Counter()
    for table in tables:
        for observed in table["observed"].values():
            counts.update({int(steps): n for steps, n in observed.items()})
    reads = counts.total()
    if not reads:
        return ""
    mean = sum(steps * n for steps, n in counts.items()) / reads
    return (
        f"; staleness of {reads:,} reads: {mean:.2f} steps in the mean, {max(counts)} "
        "at most"
    )


def name_of(cluster: Cluster) -> str:
    """Return the name of this process, a server, in its output."""
    count = len(cluster.servers)
    return f"kerasdist: server {cluster.task_index} of {count} ({cluster.address})"


def log_line(text: str) -> None:
    """Log in the background: some of it while a worker waits for its reply."""
    log.log_in_background(logging.INFO, "%s", text)


def _key(worker: WorkerRecord) -> tuple[int, str]:
    return worker.rank, worker.incarnation


# Seconds that a broken data connection waits for the control connection's end.
_REPORT_SECONDS = 2.0
_JOIN_SECONDS = 10.0
_SHORT_LOOK_SECONDS = 0.05


class ParameterServer(ServerTask):
    """One server of a job: listens, and serves its workers until they have finished.

    Args:
        cluster: The job; this process is one of its `servers`.
        settings: The job's settings; the workers' must be the same.
        timeouts: The time limit of each phase.
        on_start: Called when all workers are connected, before the job begins; at a
            server that continues from a snapshot, at once.
        session: The name of the session; by default `session_name`.
        once: Whether the workers live, and connect once, as in an epoch of an elastic
            job.
        traffic: As for `ServerTask`.

    Attributes:
        index: Index among the servers.
        address: Its address.

    Raises:
        ValueError: This process is no server of the cluster.
        ClusterError: There is no secret where one is needed.
        AddressInUseError: The server's port is taken.
        SnapshotError: There is a snapshot that can't be used.

    From the constructor on it listens; `serve` handles requests. `close` ends both.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: ServerSettings,
        *,
        timeouts: Timeouts | None = None,
        on_start: Callable[[], None] | None = None,
        session: str | None = None,
        once: bool = False,
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__(cluster, timeouts, session, traffic)
        self._settings = settings
        self._serving: dict[str, tuple[Channel, threading.Thread]] = {}
        size = len(cluster.workers)
        self.handler = RequestHandler(
            *(self.index, len(cluster.servers), size, settings, self._timeouts),
        )
        self._on_start = on_start
        self._registrar = Registrar(
            *(self.handler, self.address, cluster.workers),
            *(lambda seconds: self._arrivals(seconds, self._stop), self._stop),
            last_received=lambda worker: self._heartbeat.last_received(_key(worker)),
            once=once,
        )
        try:
            self._listen()
        except BaseException:
            self.handler.close()
            raise
        # Watches the workers' control connections, in a thread of its own.
        self._heartbeat = Heartbeat(
            f"kerasdist-watch server {self.index}",
            self._timeouts,
            self._on_frame,
            self._ended,
        )
        self.handler.membership.on_event.append(self._announce)
        self.handler.membership.on_failure.append(self._fail)

    # The whole life of a server.

    def _stats(self) -> dict[str, Any]:
        return self.handler.stats()

    def _serve(self) -> None:
        """Serve until every worker has finished or is lost.

        Raises:
            StartupError: Workers are missing; the others were sent a refusal.
            CollectiveError: The job's failure; if all workers are lost, the loss of
                another server that they reported, or else that of the last worker.
        """
        members = self.handler.membership
        if not self.handler.resumed:
            self._gather()
        elif self._on_start is not None:
            self._on_start()
        if self.handler.snapshotter is not None:
            self.handler.snapshotter.start()
        # Workers of a snapshot that don't reconnect aren't waited for for ever.
        patience = Deadline(self._settings.restart_timeout)
        while not self._stop.is_set():
            self._admit(LOOK_SECONDS, self._stop)
            if self.handler.resumed and patience.expired:
                self._give_up_on_absent(patience)
        # Workers that connect to a failed job are sent the reason.
        goodbye = Deadline(GOODBYE_SECONDS)
        while not (members.over or goodbye.expired or self._closed):
            self._admit(_SHORT_LOOK_SECONDS)
        with members.changed:
            members.check()
            finished = any(worker.state == "finished" for worker in members.workers)
            lost = [event for event in self.handler.events if event.kind == "lost"]
        if self._closed and not members.over:
            raise errors.TransportClosed("This server was closed.")
        if not finished and self.handler.server_lost is not None:
            # The workers left because of it: none of them is the cause.
            raise self.handler.server_lost
        if not finished and lost:
            last = lost[-1]
            raise errors.WorkerLost(last.rank, last.address, last.clock, last.reason)

    def close(self) -> None:
        """Close all connections, threads and tables. Can be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            serving = list(self._serving.values())
        self._end()
        self._registrar.close()
        self._heartbeat.close()
        for channel, _ in serving:
            channel.abort()
        members = self.handler.membership
        with members.changed:
            # Threads may be waiting for the other workers in a collective.
            if members.failure is None and not members.over:
                members.failure = errors.TransportClosed("This server was closed.")
                members.changed.notify_all()
        for _, thread in serving:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)
        self._listener.release()
        self.handler.close()

    # Steps 1 to 4.

    def _gather(self) -> None:
        pending = self._registrar.gather(Deadline(self._timeouts.startup))
        if self._on_start is not None:
            self._on_start()
        for worker, connection in pending:
            self._open_control(worker, connection, joined=False)

    def _arrivals(
        self, seconds: float, stop: threading.Event | None = None
    ) -> list[Arrival]:
        return self._take(PURPOSE, ServerHello, seconds, stop)

    def _admit(self, seconds: float, stop: threading.Event | None = None) -> None:
        for arrival in (*self._arrivals(seconds, stop), *self._registrar.waiting()):
            self._let_in(*arrival)

    def _let_in(self, rank: int, connection: Connection, hello: ServerHello) -> None:
        try:
            if hello.line == "data":
                self._serve_requests(rank, connection, hello)
                return
            found = self._registrar.later(rank, connection, hello)
            if found is not None:
                worker, joined = found
                self._open_control(worker, connection, joined=joined)
        except Exception:
            # A fault of one worker mustn't affect the others.
            log.log_in_background(
                *(logging.ERROR, "kerasdist: registering rank %d failed", rank),
                exc_info=True,
            )
            connection.close()

    def _open_control(
        self, worker: WorkerRecord, connection: Connection, *, joined: bool
    ) -> None:
        workers = self.handler.membership.workers
        roster = ServerRoster(
            host=host_key(),
            unix_name=self._listener.unix_name,
            replicas=tuple(each.replicas for each in workers),
            met=worker.met,
            joined=joined,
            joining=worker.joining,
            resumed=self.handler.resumed,
            seed=self.handler.tables.seed,
        )
        # Of one that died since the heartbeat notices that.
        answer(connection, roster)
        self._heartbeat.add(_key(worker), connection)

    def _serve_requests(
        self, rank: int, connection: Connection, hello: ServerHello
    ) -> None:
        worker = self.handler.membership.current(rank, hello.incarnation)
        with self._lock:
            if worker is None or self._closed:
                connection.close()
                return
            channel = Channel(connection, traffic=self._traffic)
            thread = daemon(
                f"kerasdist-server {self.index} rank {rank}",
                self._answer,
                worker,
                channel,
            )
            self._serving[hello.incarnation] = channel, thread
            thread.start()

    def _answer(self, worker: WorkerRecord, channel: Channel) -> None:
        members = self.handler.membership
        try:
            seen = self.handler.serve(worker, channel)
        finally:
            channel.close()
        with members.changed:
            # Whether it sent a goodbye or died shows on the control connection.
            members.changed.wait_for(
                lambda: worker.state != "live" or self._closed, _REPORT_SECONDS
            )
            if not self._closed:
                members.lose(worker, seen)
        with self._lock:
            if self._serving.get(worker.incarnation, (None,))[0] is channel:
                del self._serving[worker.incarnation]

    def _give_up_on_absent(self, patience: Deadline) -> None:
        members = self.handler.membership
        with members.changed:
            for worker in members.workers:
                if worker.state == "away":
                    members.lose(
                        worker,
                        f"it didn't reconnect within {patience.seconds:g} s after this "
                        "server was restarted",
                    )

    def _end(self) -> None:
        self._stop.set()
        self._listener.pending.interrupt()

    # Frames on control connections, and events to them.

    def _on_frame(self, key: Any, frame: Frame) -> None:
        kind, _, payload = frame
        worker = self.handler.membership.current(*key)
        if kind is FrameType.NOTICE:
            if worker is not None:
                self._pass_on(worker, payload)
            return
        if kind is not FrameType.GOODBYE:
            raise unexpected(kind)
        if worker is not None:
            goodbye = read_record(to_json(payload), Goodbye, "A goodbye")
            self.handler.on_goodbye(worker, goodbye)

    def _ended(self, key: Any, reason: str) -> None:
        members = self.handler.membership
        worker = members.current(*key)
        if worker is None or not members.lose(worker, reason):
            return
        # It may have been frozen, and wake up later.
        others_go_on = self.handler.settings.mode == "async" and not members.over
        lost = worker.lost(reason, others_go_on=others_go_on)
        self._heartbeat.post(key, FrameType.FAILURE, encode(lost))

    def _pass_on(self, sender: WorkerRecord, payload: bytes) -> None:
        """Send a worker's notice to another one, or to all others."""
        notice = to_json(payload)
        to = notice.get("to")
        value = {"from": sender.rank, "value": notice.get("value")}
        for worker in self.handler.membership.workers:
            receives = worker.rank == to if to is not None else worker is not sender
            if worker.state == "live" and receives:
                content = json.dumps(value).encode()
                self._heartbeat.post(_key(worker), FrameType.NOTICE, content)

    def _announce(self, event: Event) -> None:
        members = self.handler.membership
        payload = json.dumps(to_object(event)).encode()
        for worker in members.workers:
            if worker.state == "live" and worker.rank != event.rank:
                self._heartbeat.post(_key(worker), FrameType.EVENT, payload)
        if event.kind == "lost":
            with self._lock:
                found = self._serving.get(members.workers[event.rank].incarnation)
            if found is not None:
                found[0].abort()
        if members.over:
            self._end()

    def _fail(self, error: errors.CollectiveError) -> None:
        for worker in self.handler.membership.workers:
            if worker.state in ("live", "lost"):
                self._heartbeat.post(_key(worker), FrameType.FAILURE, encode(error))
        self._end()
