"""The connection of a worker to all servers of its cluster."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.collectives.communicator import copy_to_raise
from kerasdist.parameter_server.channel import Channel, ChannelEnded, Traffic
from kerasdist.parameter_server.client.client import ServerClient
from kerasdist.parameter_server.client.server_job import (
    GRACE_SECONDS,
    JOIN_SECONDS,
    ServerConnection,
    ServerJob,
)
from kerasdist.parameter_server.layout import ServerSettings
from kerasdist.parameter_server.membership import (
    Event,
    Goodbye,
    ServerHello,
    ServerRoster,
    WorkerProgress,
    WorkerRecord,
)
from kerasdist.parameter_server.server.handler import RequestHandler
from kerasdist.parameter_server.server.registration import PURPOSE, session_name
from kerasdist.transport import log
from kerasdist.transport.base import Aborted, Connection, connection_pair
from kerasdist.transport.deadline import Cancellation, Deadline, Timeouts, daemon
from kerasdist.transport.framing import FrameType, to_object
from kerasdist.transport.liveness.heartbeat import Heartbeat
from kerasdist.transport.memory import close_in_children
from kerasdist.transport.rendezvous.dial import (
    Refused,
    dial_address,
    hello_of,
    register,
    retry,
)
from kerasdist.transport.rendezvous.startup import host_key
from kerasdist.transport.tls import checked_secret

# A worker's connections to servers: over the network, and in its own process.

_Result = TypeVar("_Result")
# Seconds that a broken connection waits for a report on the control connection.
_REPORT_SECONDS = 1.0


class NetworkConnection(ServerConnection):
    """A server over the network.

    Args:
        address: Its address.
        hello: This worker's hello to it.
        session: The name of the servers' session.
        secret: The job's secret.
        heartbeat: Watches the control connections of this worker.
        job: This worker's part in the job.
        transport: "auto" or "tcp".
        stop: When it is set, by `abort` or another thread, waits for the server end.
    """

    def __init__(
        self,
        address: str,
        hello: ServerHello,
        session: str,
        secret: bytes,
        heartbeat: Heartbeat,
        job: ServerJob,
        transport: str,
        stop: Cancellation | None = None,
    ) -> None:
        super().__init__(job)
        self.index = hello.server
        self.address = address
        self._hello = hello
        self._session = session
        self._secret = secret
        self._heartbeat = heartbeat
        self._transport = transport
        self._reason = ""
        self._stop = stop or Cancellation()
        self._reviver: threading.Thread | None = None
        # Why it couldn't be reached; empty if it could.
        self.unreachable = ""

    def __str__(self) -> str:
        """Return its name, for instance `server 1 (10.0.0.9:2222)`."""
        return f"server {self.index} ({self.address})"

    def connect(
        self, deadline: Deadline, progress: WorkerProgress | None = None
    ) -> ServerRoster:
        """Connect at the start of the job, or join it later; or connect again.

        Args:
            deadline: When to give up.
            progress: This worker's, for a server that was started again.

        Raises:
            StartupError: The server is missing, refused this worker, or not all
                workers connected.
            AuthenticationError: The server doesn't hold the same secret.
            ProtocolError: The process at the address isn't kerasdist.
        """
        hello = dataclasses.replace(self._hello, resume=progress)
        secret, stop, rank = self._secret, self._stop, self._job.rank
        connected = threading.Event()
        enrolment = hello_of(self._session, PURPOSE, rank, hello)

        def enrol() -> tuple[Connection, ServerRoster]:
            return register(
                *(self.address, secret, enrolment, ServerRoster),
                *(deadline, stop, GRACE_SECONDS, connected),
            )

        control, roster = self._retry(enrol, deadline, connected)
        shared = self._transport == "auto" and roster.host == host_key()
        hello = dataclasses.replace(hello, line="data")
        data = hello_of(self._session, PURPOSE, rank, hello)
        name = roster.unix_name if shared else None
        try:
            channel = self._retry(
                lambda: dial_address(
                    *(self.address, secret, data, deadline, stop), unix_name=name
                ),
                deadline,
            )
        except BaseException:
            control.close()
            raise
        if self._channel is not None:
            self._channel.close()
        self._channel = Channel(channel, traffic=self._job.traffic)
        self._reason = ""
        self._heartbeat.add(self.index, control)
        return roster

    def _retry(
        self,
        attempt: Callable[[], _Result],
        deadline: Deadline,
        connected: threading.Event | None = None,
    ) -> _Result:
        """Try until it works."""
        try:
            return retry(
                *(attempt, deadline, self.index, self.address, self._stop),
                "Server",
                connected,
            )
        except Refused as refused:
            raise refused.to_startup_error() from None
        except errors.StartupError as error:
            # It has the index of a server, not the rank of a worker.
            self.unreachable = error.missing.get(self.index, "")
            error.missing = {}
            raise

    # When the connection is lost.

    def ended(self, reason: str) -> None:
        """See `ServerConnection.ended`."""
        self._reason = reason
        channel, generation = self._channel, self.generation
        if channel is not None:
            channel.abort()
        if self._stop.is_set() or self._job.closed:
            return
        if not self._job.settings.restartable:
            # At once: its part may be needed only much later.
            self._lost(reason)
        else:
            # The server waits for its workers; this one may be busy for long.
            self._reviver = daemon(
                f"kerasdist-reviver {self.index}", self._revive, generation
            )
            self._reviver.start()

    def _revive(self, generation: int) -> None:
        with self._lock:
            if self.generation != generation or self._job.failure is not None:
                return
            try:
                self._again(ChannelEnded(self._reason))
            except (errors.KerasDistError, Aborted):
                return  # the next request raises it

    def _again(self, error: Exception) -> None:
        # If it broke because the job has failed, a report follows.
        failure = self._job.await_failure(0.0 if self._reason else _REPORT_SECONDS)
        if failure is not None:
            raise copy_to_raise(failure) from error
        self._job.check()
        reason = self._reason or f"{error}".rstrip(".") or "its connection ended"
        if not self._job.settings.restartable:
            raise self._lost(reason) from error
        self._heartbeat.drop(self.index)
        deadline = Deadline(self._job.settings.restart_timeout)
        try:
            self.connect(deadline, self._job.progress())
        except Aborted:
            self._job.check()
            raise
        except errors.KerasDistError as refused:
            raise self._lost(f"{reason}; {refused}".rstrip(".")) from refused
        self.generation += 1

    def _lost(self, reason: str) -> errors.CollectiveError:
        return copy_to_raise(
            self._job.fail(
                errors.ServerLost(
                    *(self.index, self.address, self._job.step, reason),
                    self._job.settings.hold_weights,
                )
            )
        )

    # The end.

    def send_goodbye(self, goodbye: Goodbye) -> None:
        """See `ServerConnection.send_goodbye`."""
        payload = json.dumps(to_object(goodbye)).encode()
        self._heartbeat.post(self.index, FrameType.GOODBYE, payload)

    def abort(self) -> None:
        """See `ServerConnection.abort`."""
        self._stop.set()
        super().abort()

    def close(self) -> None:
        """See `ServerConnection.close`."""
        self.abort()
        reviver = self._reviver
        if reviver is not None and reviver is not threading.current_thread():
            reviver.join(JOIN_SECONDS)
        if self._channel is not None:
            self._channel.close()


class InProcessConnection(ServerConnection):
    """The server of a worker alone, in its own process.

    Args:
        handler: The server.
        worker: This worker.
        job: This worker's part in the job.
    """

    def __init__(
        self,
        handler: RequestHandler,
        worker: WorkerRecord,
        job: ServerJob,
    ) -> None:
        super().__init__(job)
        self._handler = handler
        self._worker = worker
        pair = socket.socketpair()
        for each in pair:
            close_in_children(each)
        mine, theirs = connection_pair(*pair)
        self._channel = Channel(mine, traffic=job.traffic)
        self._theirs = Channel(theirs)
        handler.membership.enter(worker, None)
        if handler.snapshotter is not None:
            handler.snapshotter.start()
        self._thread = daemon("kerasdist-server", handler.serve, worker, self._theirs)
        self._thread.start()

    def __str__(self) -> str:
        """Return its name in messages."""
        return "the server in this process"

    def _again(self, error: Exception) -> None:
        self._job.check()
        raise errors.TransportClosed("The server in this process was closed.")

    def ended(self, reason: str) -> None:
        """See `ServerConnection.ended`: there is no such connection."""

    def send_goodbye(self, goodbye: Goodbye) -> None:
        """See `ServerConnection.send_goodbye`."""
        self._handler.on_goodbye(self._worker, goodbye)

    def close(self) -> None:
        """See `ServerConnection.close`."""
        self.abort()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
        self._handler.close()
        self._current().close()
        self._theirs.close()


def connect_servers(
    cluster: Cluster,
    settings: ServerSettings,
    *,
    timeouts: Timeouts | None = None,
    replicas: int = 1,
    transport: str = "auto",
    on_event: Callable[[Event], None] | None = None,
    on_failure: Callable[[errors.CollectiveError], None] | None = None,
    join_barrier: bool = False,
    session: str | None = None,
    stop: Cancellation | None = None,
    traffic: Traffic | None = None,
) -> ServerClient:
    """Connect a worker to all servers of its job; wait until all workers are connected.

    Args:
        cluster: This worker's rank, the other workers and the servers. Without
            servers, and with one worker, the server runs in this process.
        settings: The job's settings; the same on all tasks.
        timeouts: The time limit of each phase.
        replicas: Number of this worker's replicas.
        transport: "auto": shared memory with servers on the same host, else TCP; or
            "tcp".
        on_event: Called with each `Event` of another worker, from a thread.
        on_failure: Called once with the first failure, from the thread that notices it,
            before it is reported to any other process: to inform a launcher. It mustn't
            wait.
        join_barrier: Whether a worker that starts later joins at an epoch's end, see
            `parameter_server.server.collectives`; else the others wait for it at once.
        session: The name of the session; by default `session_name`.
        stop: When another thread sets it, the call ends with `Aborted`.
        traffic: Counts the requests, and their replies; by default those of this
            client alone.

    Raises:
        ValueError: The cluster's task is a server.
        ClusterError: There are several workers but no server; or no secret where one
            is needed.
        StartupError: Servers or workers are missing, or have other settings.
        AuthenticationError: A server doesn't hold the same secret.
        ProtocolError: The process at a server's address isn't kerasdist.
        SnapshotError: The server in this process can't use its snapshot.

    After an exception nothing is left open.
    """
    if cluster.rank is None:
        raise ValueError(
            "A server is no worker. Received: a 'ps' task. Use `ParameterServer`."
        )
    if not cluster.servers and cluster.size > 1:
        raise no_servers(cluster.size, "kerasdist run")
    timeouts = timeouts or Timeouts()
    client = ServerClient(cluster, settings, timeouts, on_event, on_failure, traffic)
    address = client.peers[client.rank].address
    worker = WorkerRecord(client.rank, address, secrets.token_hex(8), replicas, "live")
    if not cluster.servers:
        handler = RequestHandler(0, 1, 1, settings, timeouts)
        roster = ServerRoster(
            replicas=(replicas,),
            met=handler.membership.workers[0].met,
            joined=handler.resumed,
            seed=handler.tables.seed,
        )
        worker.met = roster.met
        client.connections.append(InProcessConnection(handler, worker, client))
        client.start(roster)
        return client
    secret = checked_secret((*cluster.workers, *cluster.servers), os.environ)
    heartbeat = client.heartbeat()
    cause: errors.ServerLost | None = None
    try:
        met: int | None = None
        joining: bool | None = None
        rosters: list[ServerRoster] = []
        for index, server in enumerate(cluster.servers):
            connection = NetworkConnection(
                server,
                ServerHello(
                    server=index,
                    incarnation=worker.incarnation,
                    replicas=replicas,
                    settings=settings.agreed(),
                    met=met,
                    join_barrier=join_barrier,
                    joining=joining,
                ),
                session or session_name(cluster),
                secret,
                heartbeat,
                client,
                transport,
                stop,
            )
            # A failure that an earlier server reports ends the wait for this one.
            client.connections.append(connection)
            try:
                rosters.append(connection.connect(Deadline(timeouts.startup)))
            finally:
                if connection.unreachable:
                    cause = errors.ServerLost(
                        *(index, server, 0, connection.unreachable),
                        settings.hold_weights,
                    )
            met, joining = rosters[0].met, rosters[0].joining
        client.start(rosters[0])
        resumed = any(each.resumed for each in rosters)
        if resumed and client.rank == 0 and not client.joining:
            _log_resumed(settings)
    except BaseException as error:
        failure = client.failure
        client.close(error, cause)
        if failure is not None and not isinstance(error, errors.StartupError):
            raise copy_to_raise(failure) from error
        raise
    return client


def no_servers(size: int, command: str) -> errors.ClusterError:
    """Return the error that a job of several workers has no server."""
    return errors.ClusterError(
        f"There are {size} workers, but no parameter server. Received: a cluster "
        f"without 'ps' tasks. Start the job with `{command} -n {size} --ps 1`, or name "
        "at least one server under 'ps' in TF_CONFIG, in all tasks."
    )


def _log_resumed(settings: ServerSettings) -> None:
    """Log the restart on the chief: a folder that was used before must be noticed."""
    log.log_in_background(
        logging.WARNING,
        "kerasdist: the servers continue from their snapshots in %s, not from the "
        "script's initial weights. To start from scratch, end the job and remove them.",
        settings.snapshot_dir,
    )
