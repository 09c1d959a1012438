"""The connection of a worker to all servers of its cluster."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.collectives.communicator import copy_to_raise
from kerasdist.parameter_server.channel import Channel, memory_pair
from kerasdist.parameter_server.client.client import TRANSPORTS, ServerClient
from kerasdist.parameter_server.client.network import (
    JOIN_SECONDS,
    NetworkConnection,
    ServerConnection,
)
from kerasdist.parameter_server.client.server_communicator import ServerJob
from kerasdist.parameter_server.layout import Layout, ServerSettings
from kerasdist.parameter_server.membership import (
    Event,
    Goodbye,
    ServerRoster,
    WorkerRecord,
)
from kerasdist.parameter_server.server.collectives import Entry
from kerasdist.parameter_server.server.handler import Enter, Entered, RequestHandler
from kerasdist.parameter_server.server.server import session_name
from kerasdist.transport import log
from kerasdist.transport.credentials import checked_secret
from kerasdist.transport.deadline import Cancellation, Deadline, Timeouts
from kerasdist.transport.framing import read_record
from kerasdist.transport.rendezvous.startup import host_key

# Joining a running job: this worker waits for the end of the others' epoch.
#
# The protocol is in `kerasdist.parameter_server.server.collectives`.


def enter(client: ServerClient, fit: int) -> Entry:
    """Wait until the others are between two epochs, and join them.

    Args:
        client: This worker's client; it joins later.
        fit: Number of the `fit` that it is in, from 1.

    Raises:
        CollectiveTimeout: The others have sent no requests for as long as a collective
            may take.
        CollectiveError: It is too late; see `kerasdist.errors`.
    """
    seen = -1
    deadline = Deadline(client.timeouts.collective)
    while True:
        reply = client.request("joining the others", Enter(fit=fit))
        found = read_record(reply.meta, Entered, "A reply")
        if found.entry is not None:
            return found.entry
        # An epoch may take longer than any wait inside of it.
        if found.requests != seen:
            seen = found.requests
            deadline = Deadline(client.timeouts.collective)
        if deadline.expired:
            raise client.fail(
                errors.CollectiveTimeout(
                    f"Rank {client.rank} waited for the end of the others' epoch, and "
                    f"none of them took a step in {deadline.seconds:g} s. Are they "
                    "busy with other work? Give them more time with `timeout=`."
                )
            )


# A worker's connection to a server in its own process.


class InProcessConnection(ServerConnection):
    """The server of a worker alone, in its own process.

    Args:
        handler: The server.
        worker: This worker.
        timeouts: The time limit of each phase.
        job: This worker's part in the job.
    """

    def __init__(
        self,
        handler: RequestHandler,
        worker: WorkerRecord,
        timeouts: Timeouts,
        job: ServerJob,
    ) -> None:
        super().__init__(job, timeouts)
        self._handler = handler
        self._worker = worker
        self._channel, theirs = memory_pair()
        handler.membership.enter(worker, None)
        if handler.snapshotter is not None:
            handler.snapshotter.start()
        self._thread = threading.Thread(
            target=handler.serve,
            args=(worker, theirs),
            name="kerasdist-server",
            daemon=True,
        )
        self._thread.start()

    def __str__(self) -> str:
        """Return its name in messages."""
        return "the server in this process"

    def _current(self) -> Channel:
        return self._channel

    def _again(self, error: Exception) -> None:
        self._job.check()
        raise errors.TransportClosed("The server in this process was closed.")

    def ended(self, reason: str) -> None:
        """See `ServerConnection.ended`: there is no such connection."""

    def send_goodbye(self, goodbye: Goodbye) -> None:
        """See `ServerConnection.send_goodbye`."""
        self._handler.on_goodbye(self._worker, goodbye)

    def abort(self) -> None:
        """See `ServerConnection.abort`."""
        self._channel.abort()

    def close(self) -> None:
        """See `ServerConnection.close`."""
        self.abort()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
        self._handler.close()


def connect_servers(
    cluster: Cluster,
    settings: ServerSettings,
    *,
    timeouts: Timeouts | None = None,
    replicas: int = 1,
    transport: str = "auto",
    on_event: Callable[[Event], None] | None = None,
    on_failure: Callable[[errors.CollectiveError], None] | None = None,
    on_table: Callable[[Layout], None] | None = None,
    join_barrier: bool = False,
    host: str | None = None,
    session: str | None = None,
    stop: Cancellation | None = None,
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
        on_table: As for `ParameterServer`; for a server in this process.
        join_barrier: Whether a worker that starts later joins at an epoch's end, see
            `parameter_server.server.collectives`; else the others wait for it at once.
        host: Overrides `host_key()`, for tests.
        session: The session of an elastic job's epoch; by default `session_name`.
        stop: When another thread sets it, the call ends with `Aborted`.

    Raises:
        ValueError: Unknown transport.
        ClusterError: There are several workers but no server; or no secret where one
            is needed.
        StartupError: Servers or workers are missing, or have other settings.
        AuthenticationError: A server doesn't hold the same secret.
        ProtocolError: The process at a server's address isn't kerasdist.
        SnapshotError: The server in this process can't use its snapshot.

    After an exception nothing is left open.
    """
    if transport not in TRANSPORTS:
        raise ValueError(
            f"Unknown transport. Received: transport={transport!r}; expected one of "
            f"{TRANSPORTS}."
        )
    if cluster.rank is None:
        raise ValueError(
            "A server is no worker. Received: a 'ps' task. Use `ParameterServer`."
        )
    if not cluster.servers and cluster.size > 1:
        raise errors.ClusterError(
            f"There are {cluster.size} workers, but no parameter server. Received: a "
            "cluster without 'ps' tasks. Start the job with `kerasdist run -n "
            f"{cluster.size} --ps 1`, or name at least one server under 'ps' in "
            "TF_CONFIG, in all tasks."
        )
    timeouts = timeouts or Timeouts()
    client = ServerClient(cluster, settings, timeouts, on_event, on_failure)
    address = client.peers[client.rank].address
    worker = WorkerRecord(client.rank, address, secrets.token_hex(8), replicas, "live")
    if not cluster.servers:
        handler = RequestHandler(0, 1, 1, settings, timeouts, on_table)
        roster = ServerRoster(
            replicas=(replicas,),
            met=handler.membership.workers[0].met,
            joined=handler.resumed,
            seed=handler.tables.seed,
        )
        worker.met = roster.met
        client.connections.add(InProcessConnection(handler, worker, timeouts, client))
        client.start(roster)
        return client
    secret = checked_secret((*cluster.workers, *cluster.servers), os.environ)
    heartbeat = client.heartbeat()
    cause: errors.ServerLost | None = None
    try:
        met: int | None = None
        rosters: list[ServerRoster] = []
        for index, server in enumerate(cluster.servers):
            connection = NetworkConnection(
                index,
                server,
                worker,
                host or host_key(),
                session or session_name(cluster),
                secret,
                settings,
                timeouts,
                heartbeat,
                client,
                transport,
                stop,
            )
            first = rosters[0] if rosters else None
            joining = None if first is None else first.joining
            if session is not None:
                # A failure that an earlier server reports ends the wait for this one.
                client.connections.add(connection)
            try:
                rosters.append(
                    connection.open(met, join_barrier=join_barrier, joining=joining)
                )
            finally:
                if connection.unreachable:
                    cause = errors.ServerLost(
                        *(index, server, 0, connection.unreachable),
                        settings.hold_weights,
                    )
            if session is None:
                client.connections.add(connection)
            met = rosters[0].met
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


def _log_resumed(settings: ServerSettings) -> None:
    """Log the restart on the chief: a folder that was used before must be noticed."""
    log.log_in_background(
        logging.WARNING,
        "kerasdist: the servers continue from their snapshots in %s, not from the "
        "script's initial weights. To start from scratch, end the job and remove them.",
        settings.snapshot_dir,
    )
