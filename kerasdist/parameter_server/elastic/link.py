"""The connection of an elastic job's members through the servers that are present.

Each epoch is a session of its own at the servers; `search` finds these.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.collectives.communicator import Communicator
from kerasdist.collectives.elastic.groups import Connected
from kerasdist.parameter_server.client.client import ServerClient
from kerasdist.parameter_server.client.connect_servers import connect_servers
from kerasdist.parameter_server.elastic.search import Refused, Search, agreed, names
from kerasdist.parameter_server.layout import ServerSettings
from kerasdist.parameter_server.server.server import session_name
from kerasdist.transport.credentials import checked_secret
from kerasdist.transport.deadline import Cancellation, Deadline, Timeouts
from kerasdist.transport.liveness.announcements import Announcements

# Of the time for connecting.
_LEAST_SECONDS = 0.1


class ServerGroup:
    """The members of an epoch, connected by servers; see `Connected`.

    Args:
        client: This worker's connection to the servers.
        servers: The names of the servers.
        closed: Called once when the connection is closed.
    """

    def __init__(
        self,
        client: ServerClient,
        servers: tuple[str, ...],
        closed: Callable[[ServerGroup], None],
    ) -> None:
        self.client = client
        self.servers = servers
        self._closed: Callable[[ServerGroup], None] | None = closed

    @property
    def communicator(self) -> Communicator:
        """See `Connected.communicator`."""
        return self.client.communicator

    @property
    def transport(self) -> str:
        """See `Connected.transport`."""
        return self.client.connections.transports[0]

    @property
    def replicas(self) -> tuple[int, ...]:
        """See `Connected.replicas`."""
        return self.client.replicas

    @property
    def failure(self) -> errors.CollectiveError | None:
        """See `Connected.failure`."""
        return self.client.failure

    @property
    def announcements(self) -> Announcements | None:
        """See `Connected.announcements`."""
        return self.client.announcements

    def abandon(self, error: errors.CollectiveError | None = None) -> None:
        """See `Connected.abandon`."""
        error = error or errors.TransportClosed(
            "The members of this group are changing. Use the next group."
        )
        self.client.abandon(error)
        self.client.communicator.abort(self.client.failure)

    def close(self, error: BaseException | None = None) -> None:
        """See `Connected.close`. The goodbye is sent before it, by `ServerLink.leave`.

        Without one, servers don't take a member of a later epoch for one that has left.
        """
        self.abandon()
        self.client.close(error)
        closed, self._closed = self._closed, None
        if closed is not None:
            closed(self)


class ServerLink:
    """Connects the members of each epoch by servers; see `Link`.

    Args:
        cluster: The job, with this worker's rank at the start.
        settings: The job's settings.
        min_workers: The smallest number of workers that continue.
        transport: See `connect_servers`.
        host: See `connect_servers`.

    Raises:
        ClusterError: There is no secret where one is needed, or no server.
    """

    has_servers = True

    def __init__(
        self,
        cluster: Cluster,
        settings: ServerSettings,
        min_workers: int,
        *,
        transport: str = "auto",
        host: str | None = None,
    ) -> None:
        if not cluster.servers:
            raise errors.ClusterError(
                f"There are {cluster.size} workers, but no parameter server. Received: "
                "a cluster without 'ps' tasks. Start the job with `kerasdist run "
                f"--elastic -n {cluster.size} --ps 1`, or name at least one server "
                "under 'ps' in TF_CONFIG, in all tasks."
            )
        self._rank = cluster.rank or 0
        self._servers = cluster.servers
        self._session = session_name(cluster)
        self._secret = checked_secret((*cluster.workers, *cluster.servers), os.environ)
        self._agreed = agreed(settings, min_workers)
        self._settings = settings
        self._transport = transport
        self._host = host
        self._is_first = True
        self._lock = threading.Lock()
        self._groups: set[ServerGroup] = set()
        self._sent = self._received = 0

    @property
    def bytes_sent(self) -> int:
        """Bytes of all requests to all servers, in all epochs."""
        with self._lock:
            return self._sent + sum(
                group.client.connections.bytes_sent for group in self._groups
            )

    @property
    def bytes_received(self) -> int:
        """Bytes of all replies of all servers, in all epochs."""
        with self._lock:
            return self._received + sum(
                group.client.connections.bytes_received for group in self._groups
            )

    def connect(
        self,
        cluster: Cluster,
        epoch: int,
        *,
        name: str,
        timeouts: Timeouts,
        replicas: int,
        watch: Callable[[errors.CollectiveError], None],
        stop: Cancellation,
    ) -> Connected:
        """See `Link.connect`; the session's name is the first member's choice."""
        deadline = Deadline(timeouts.startup)
        search = Search(
            rank=self._rank,
            servers=self._servers,
            session=self._session,
            secret=self._secret,
            agreed=self._agreed,
            epoch=epoch,
            first=self._is_first,
            deadline=deadline,
            stop=stop,
        )
        try:
            if cluster.rank == 0:
                layout = search.begin(cluster.workers)
            else:
                layout = search.ask(cluster.workers[0])
        except Refused as refused:
            raise errors.StartupError(str(refused)) from refused

        def failed(error: errors.CollectiveError) -> None:
            if isinstance(error, errors.ServerLost):
                index = layout.servers[error.index]
                error = errors.ServerLost(
                    *(index, error.address, error.step, error.reason),
                    error.held_weights,
                )
            watch(error)

        servers = tuple(self._servers[index] for index in layout.servers)
        seconds = max(deadline.remaining(), _LEAST_SECONDS)
        try:
            client = connect_servers(
                dataclasses.replace(cluster, servers=servers),
                self._settings,
                timeouts=dataclasses.replace(timeouts, startup=seconds),
                replicas=replicas,
                transport=self._transport,
                on_failure=failed,
                host=self._host,
                session=layout.session,
                stop=stop,
            )
        except errors.StartupError as error:
            for rank, reason in sorted(error.missing.items()):
                if rank < cluster.size:
                    lost = errors.WorkerLost(rank, cluster.workers[rank], 0, reason)
                    raise lost from error
            raise
        self._is_first = False
        group = ServerGroup(client, names(layout.servers, self._servers), self._forget)
        with self._lock:
            self._groups.add(group)
        return group

    def _forget(self, group: ServerGroup) -> None:
        with self._lock:
            self._groups.discard(group)
            self._sent += group.client.connections.bytes_sent
            self._received += group.client.connections.bytes_received

    def leave(self, group: Connected, error: BaseException | None) -> None:
        """See `Link.leave`."""
        if isinstance(group, ServerGroup) and group.failure is None:
            group.client.close(error)
