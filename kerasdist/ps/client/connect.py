"""From a cluster to a worker's connection to all servers."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.collectives.failures import copy_to_raise
from kerasdist.ps.client.client import TRANSPORTS, ServerClient
from kerasdist.ps.client.connection import Roster
from kerasdist.ps.client.in_process import InProcessConnection
from kerasdist.ps.client.network import NetworkConnection
from kerasdist.ps.layout import Layout
from kerasdist.ps.membership import Event, WorkerRecord
from kerasdist.ps.server.handler import RequestHandler
from kerasdist.ps.server.server import session_name
from kerasdist.ps.settings import ServerSettings
from kerasdist.transport.log import background_log
from kerasdist.transport.rendezvous.member import host_key
from kerasdist.transport.timeouts import Timeouts
from kerasdist.transport.wire.secret import job_secret

__all__ = ["connect_servers"]


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
    gate: bool = False,
    host: str | None = None,
) -> ServerClient:
    """Connect a worker to all servers of its job; wait until all workers have come.

    Args:
        cluster: Who this worker is, who the others and the servers are. Without
            servers, and with one worker, the server lives in this process.
        settings: What the job was asked for; all tasks' must be equal.
        timeouts: How long each phase may take.
        replicas: Number of this worker's replicas.
        transport: "auto": shared memory with servers on the same host, else TCP; or
            "tcp".
        on_event: Called with each `Event` of another worker, from a thread.
        on_failure: Called once with the first failure, from whichever thread sees it,
            before anybody else hears of it: to tell a launcher. It mustn't wait.
        on_table: As for `ParameterServer`; for a server in this process.
        gate: Whether a worker that comes later joins at a gate, see
            `kerasdist.ps.server.join`; else the others wait for it at once.
        host: Overrides `host_key()`, for tests.

    Raises:
        ValueError: Unknown transport.
        ClusterError: There are several workers but no server; or no secret where one
            is needed.
        StartupError: Servers or workers didn't come, or were asked for something else.
        AuthenticationError: A server doesn't hold the same secret.
        ProtocolError: What answers at a server's address isn't kerasdist.
        SnapshotError: The server in this process can't use its snapshot.

    Nothing is left behind after an exception.
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
        roster = Roster(
            replicas=(replicas,),
            met=handler.membership.workers[0].met,
            joined=handler.resumed,
            seed=handler.tables.seed,
        )
        worker.met = roster.met
        client.add(InProcessConnection(handler, worker, timeouts, client))
        client.start(roster)
        return client
    secret = job_secret((*cluster.workers, *cluster.servers), os.environ)
    heartbeat = client.heartbeat()
    cause: errors.ServerLost | None = None
    try:
        met: int | None = None
        rosters: list[Roster] = []
        for index, server in enumerate(cluster.servers):
            connection = NetworkConnection(
                index,
                server,
                worker,
                host or host_key(),
                session_name(cluster),
                secret,
                settings,
                timeouts,
                heartbeat,
                client,
                transport,
            )
            first = rosters[0] if rosters else None
            joining = None if first is None else first.joining
            try:
                rosters.append(connection.open(met, gate=gate, joining=joining))
            finally:
                if connection.unreachable:
                    cause = errors.ServerLost(index, server, 0, connection.unreachable)
            client.add(connection)
            met = rosters[0].met
        client.start(rosters[0])
        resumed = any(each.resumed for each in rosters)
        if resumed and client.rank == 0 and not client.joining:
            _tell_resumed(settings)
    except BaseException as error:
        failure = client.failure
        client.close(error, cause)
        if failure is not None and not isinstance(error, errors.StartupError):
            raise copy_to_raise(failure) from error
        raise
    return client


def _tell_resumed(settings: ServerSettings) -> None:
    """Where users look: a folder that was used before mustn't go unnoticed."""
    background_log.log(
        logging.WARNING,
        "kerasdist: the servers go on from their snapshots in %s, not from the weights "
        "that the script begins with. To begin anew, end the job and remove them.",
        settings.snapshot_dir,
    )
