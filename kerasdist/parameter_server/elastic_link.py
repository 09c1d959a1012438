"""The connection of an elastic job's members through the servers that are present.

Each epoch is a session of its own at the servers. The first member of an epoch decides
which servers it has: those that answer. So the servers need no agreement, and one that
was started again serves from the next epoch on. At the start of the job all servers are
needed, because one that doesn't answer may start later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Literal

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.collectives.communicator import Communicator
from kerasdist.collectives.elastic.connect import job_number
from kerasdist.collectives.elastic.groups import CannotConnect, Connected
from kerasdist.parameter_server.channel import Traffic
from kerasdist.parameter_server.client.client import ServerClient
from kerasdist.parameter_server.client.connect_servers import (
    connect_servers,
    no_servers,
)
from kerasdist.parameter_server.layout import ServerSettings
from kerasdist.parameter_server.server.registration import session_name
from kerasdist.transport.base import Aborted, Connection
from kerasdist.transport.deadline import Cancellation, Deadline, Timeouts, in_daemon
from kerasdist.transport.framing import Count
from kerasdist.transport.liveness.heartbeat import Heartbeat
from kerasdist.transport.rendezvous.dial import (
    Refused,
    hello_of,
    register,
    retry,
)
from kerasdist.transport.tls import checked_secret

# Requests about epochs, from the workers of an elastic job to its servers.
#
#     C: the first member of an epoch    W: another member    S: each server of the job
#
#     1. C -> S     READY  a question: does S live? In the first epoch repeated until
#                          all servers have answered
#     2. C -> S     BEGIN  the epoch: its members, the servers that have answered 1.,
#                          in order, and the name of its session
#     3. W -> S     ASK    a question for the servers and the session of 2., answered
#                          when S has received that
#     4. C, W -> S  connect to these servers, as in any job: `server.server`
#     5. C, W -> S  STAY   at a strategy's end: the script may create another one. The
#                          connection stays, with heartbeats, until the process ends
#
# Each request is a connection of its own: its hello, and one answer. Requests of
# earlier epochs than a job's present one at S are refused, unless that has failed.

PURPOSE = "epoch"
_Request = Literal["ready", "begin", "ask", "stay"]


@dataclasses.dataclass(frozen=True)
class EpochServers:
    """The servers of an epoch.

    Attributes:
        servers: Their indices among the job's servers, in the epoch's order.
        session: The name of the epoch's session.
    """

    servers: tuple[Count, ...]
    session: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochRequest:
    """A request about an epoch.

    Attributes:
        request: See above.
        job: The number of the strategy in the workers' scripts, see `job_number`.
        epoch: The number of the epoch.
        settings: See `agreed`.
        workers: Of BEGIN: the addresses of the members.
        seconds: Of BEGIN: how long the members may take to connect.
        layout: Of BEGIN: the servers.
    """

    request: _Request
    job: Count
    epoch: Count
    settings: dict[str, Any]
    workers: tuple[str, ...] = ()
    seconds: float = 0.0
    layout: EpochServers | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochAnswer:
    """The answer to a request; that to ASK has the servers."""

    layout: EpochServers | None = None


def agreed(settings: ServerSettings, min_workers: int) -> dict[str, Any]:
    """Return the settings that are the same on all tasks, as JSON values."""
    return {**settings.agreed(), "min_workers": min_workers}


# Seconds in which a server that lives answers.
_ANSWER_SECONDS = 3.0
_AGAIN_SECONDS = 0.05
# Of the errors of an address: it doesn't answer; another process does.
_SILENT = (OSError, EOFError)
_OTHERS = (errors.AuthenticationError, errors.ProtocolError)


def _is_dead(error: BaseException | None) -> bool:
    return isinstance(error, ConnectionRefusedError)


@dataclasses.dataclass(frozen=True)
class Search:
    """The search of one worker for the servers of one epoch.

    Attributes:
        link: The job, and its servers.
        epoch: The number of the epoch.
        first: Whether this worker has been in no epoch before, of any strategy.
        deadline: When to give up.
        stop: When another thread sets it, the search ends with `Aborted`.
    """

    link: ServerLink
    epoch: int
    first: bool
    deadline: Deadline
    stop: Cancellation

    def begin(self, workers: Sequence[str]) -> EpochServers:
        """Begin the epoch at the servers that answer, as its first member.

        Args:
            workers: The addresses of the members.

        Raises:
            CannotConnect: There is no server any more.
            StartupError: A server is missing at the start of the job, or was lost.
            Refused: The epoch isn't the present one, or the settings are others.
            Aborted: `stop` was set.
        """
        # Servers may be started later than the script's first strategy.
        at_start = self.epoch == 0 and self.first
        servers = self._all() if at_start else self._living()
        session = f"{self.link.session}.{self.epoch}.{secrets.token_hex(8)}"
        layout = EpochServers(tuple(servers), session)
        request = dataclasses.replace(
            self._question("begin"),
            workers=tuple(workers),
            seconds=self.deadline.remaining(),
            layout=layout,
        )
        self._at_once(functools.partial(self._begin_at, request=request), servers)
        return layout

    def ask(self, chief: str) -> EpochServers:
        """Ask all servers for those of the epoch; return the first answer.

        Args:
            chief: The address of the epoch's first member.

        Raises:
            CannotConnect: There is no server any more.
            WorkerLost: The epoch's first member hasn't begun the epoch.
            Refused: The epoch isn't the present one, or the settings are others.
            Aborted: `stop` was set.
        """
        servers = range(len(self.link.servers))
        done = Cancellation()
        asked = {self._ask_at(server, done, 0.0): server for server in servers}
        unreachable: dict[int, BaseException | None] = {}
        try:
            while not (self.stop.is_set() or self.deadline.expired):
                answered, _ = wait(asked, _AGAIN_SECONDS, FIRST_COMPLETED)
                for each in answered:
                    server, error = asked.pop(each), each.exception()
                    if error is None:
                        return each.result()
                    if self._is_final(error):
                        raise error
                    if not isinstance(error, Refused):
                        unreachable[server] = error
                    asked[self._ask_at(server, done, _AGAIN_SECONDS)] = server
                # Whether something listens at any server's address.
                dead = sum(map(_is_dead, unreachable.values())) == len(servers)
                if dead and not self.first:
                    raise self._none_left(unreachable)
        finally:
            done.set()
        if self.stop.is_set():
            raise Aborted
        raise errors.WorkerLost(
            *(0, chief, 0),
            f"it didn't begin epoch {self.epoch} at the servers within "
            f"{self.deadline.seconds:.3g} s",
        )

    def stay(self, heartbeat: Heartbeat) -> None:
        """Let the servers that answer stay while this process sends heartbeats.

        Args:
            heartbeat: Keeps the connections, by server.
        """
        # Not `_at_once`: at the end of the process there are no new threads.
        for server in range(len(self.link.servers)):
            # One that was lost, or is about to end, isn't needed.
            with contextlib.suppress(*_SILENT, *_OTHERS, Refused, Aborted):
                question = self._question("stay")
                line, _ = self._open(server, question, self.deadline, self.stop)
                heartbeat.add(server, line)

    # Of an epoch's first member.

    def _begin_at(self, server: int, request: EpochRequest) -> None:
        try:
            self._request(server, request)
        except _SILENT as error:
            if self.stop.is_set():
                raise Aborted from error
            raise errors.StartupError(
                f"Server {server} ({self.link.servers[server]}) was lost before epoch "
                f"{self.epoch} began: {error}."
            ) from error

    def _all(self) -> list[int]:
        """Wait until all servers have been started."""
        for server, address in enumerate(self.link.servers):
            attempt = functools.partial(self._check_ready, server)
            try:
                retry(*(attempt, self.deadline, server, address, self.stop), "Server")
            except errors.StartupError as error:
                # It has the index of a server, not the rank of a worker.
                error.missing = {}
                raise
        return list(range(len(self.link.servers)))

    def _check_ready(self, server: int) -> None:
        try:
            self._request(server, self._question("ready"))
        except Refused as refused:
            if refused.refusal.final:
                raise
            raise OSError(str(refused)) from refused

    def _living(self) -> list[int]:
        """Return the servers that answer; at least one.

        Raises:
            CannotConnect: There is none.
        """

        def ask(server: int) -> BaseException | None:
            try:
                self._request(server, self._question("ready"))
            except (*_SILENT, *_OTHERS) as error:
                return error
            return None

        servers = range(len(self.link.servers))
        # A worker that was in no epoch yet may have been started before the servers.
        patience = Deadline(self.deadline.remaining() / 2 if self.first else 0.0)
        while not self.stop.is_set():
            found = dict(zip(servers, self._at_once(ask, servers), strict=True))
            living = [server for server, error in found.items() if error is None]
            if len(living) == len(servers) or (living and patience.expired):
                return living
            dead = all(map(_is_dead, found.values()))
            if (dead and patience.expired) or self.deadline.expired:
                raise self._none_left(found)
            self.stop.wait(_AGAIN_SECONDS)
        raise Aborted

    def _none_left(self, found: dict[int, BaseException | None]) -> Exception:
        server, error = max(found.items())
        reason = str(error or "it doesn't answer").rstrip(".")
        if len(found) > 1:
            reason = f"no server is left; {reason}"
        lost = errors.ServerLost(server, self.link.servers[server], 0, reason, False)
        # At the start the servers may be started later.
        return lost if self.first else CannotConnect(lost)

    # Of the other members.

    def _ask_at(
        self, server: int, done: Cancellation, pause: float
    ) -> Future[EpochServers]:
        """Ask one server, after a pause."""

        def ask() -> EpochServers:
            done.wait(pause)
            question = self._question("ask")
            connection, answer = self._open(server, question, self.deadline, done)
            connection.close()
            return answer.layout or EpochServers((), "")

        return in_daemon("kerasdist-epoch", ask)

    def _is_final(self, error: BaseException) -> bool:
        """Return whether a server that is asked again gives no other answer."""
        if isinstance(error, Refused):
            return self.epoch > 0 or error.refusal.final
        if isinstance(error, _OTHERS):
            return self.epoch == 0
        return not isinstance(error, _SILENT)

    # Requests.

    def _question(self, request: _Request) -> EpochRequest:
        link = self.link
        return EpochRequest(
            request=request, job=link.job, epoch=self.epoch, settings=link.agreed
        )

    def _request(self, server: int, request: EpochRequest) -> None:
        limit = Deadline(min(self.deadline.remaining(), _ANSWER_SECONDS))
        self._open(server, request, limit, self.stop)[0].close()

    def _open(
        self,
        server: int,
        request: EpochRequest,
        deadline: Deadline,
        stop: Cancellation,
    ) -> tuple[Connection, EpochAnswer]:
        link = self.link
        hello = hello_of(link.session, PURPOSE, link.rank, request)
        return register(
            *(link.servers[server], link.secret, hello, EpochAnswer), *(deadline, stop)
        )

    def _at_once(
        self, function: Callable[[int], Any], servers: Sequence[int]
    ) -> list[Any]:
        with ThreadPoolExecutor(len(servers), "kerasdist-epoch") as pool:
            return list(pool.map(function, servers))


# Of the time for connecting.
_LEAST_SECONDS = 0.1
# By the servers' addresses: they stay for another strategy of this process.
_stays: dict[tuple[str, ...], Heartbeat] = {}
# A forked child isn't the worker.
os.register_at_fork(after_in_child=_stays.clear)


class ServerGroup:
    """The members of an epoch, connected by servers; see `Connected`.

    Args:
        client: This worker's connection to the servers.
        servers: The names of the servers.
    """

    def __init__(self, client: ServerClient, servers: tuple[str, ...]) -> None:
        self.client = client
        self.servers = servers
        self.communicator: Communicator = client.communicator
        self.transport = client.connections.transports[0]
        self.replicas = client.replicas
        self.announcements = client.announcements

    @property
    def failure(self) -> errors.CollectiveError | None:
        """See `Connected.failure`."""
        return self.client.failure

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


class ServerLink:
    """Connects the members of each epoch by servers; see `Link`.

    Args:
        cluster: The job, with this worker's rank at the start.
        settings: The job's settings.
        min_workers: The smallest number of workers that continue.
        stay: Whether servers stay after `leave` until this process ends, for another
            strategy.
        transport: See `connect_servers`.

    Attributes:
        rank: This worker's rank at the start.
        servers: The addresses of the job's servers.
        session: The name of the servers' session.
        secret: The job's secret.
        agreed: The settings that servers compare, see `agreed`.
        job: See `EpochRequest`.
        traffic: Counts the messages with all servers, in all epochs.

    Raises:
        ClusterError: There is no secret where one is needed, or no server.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: ServerSettings,
        min_workers: int,
        *,
        stay: bool = False,
        transport: str = "auto",
    ) -> None:
        if not cluster.servers:
            raise no_servers(cluster.size, "kerasdist run --elastic")
        self.rank = cluster.rank or 0
        self.servers = cluster.servers
        self.session = session_name(cluster)
        self.secret = checked_secret((*cluster.workers, *cluster.servers), os.environ)
        self.agreed = agreed(settings, min_workers)
        self._settings = settings
        self._transport = transport
        self._stay = stay
        self.job = 0
        self._is_first = cluster.servers not in _stays
        self.traffic = Traffic()

    def connect(
        self,
        cluster: Cluster,
        *,
        name: str,
        timeouts: Timeouts,
        replicas: int,
        watch: Callable[[errors.CollectiveError], None],
        stop: Cancellation,
    ) -> Connected:
        """See `Link.connect`; the session's name is the first member's choice."""
        deadline = Deadline(timeouts.startup)
        self.job = job_number(name)
        epoch = int(name.rpartition(".")[2])
        search = Search(self, epoch, self._is_first, deadline, stop)
        try:
            if cluster.rank == 0:
                layout = search.begin(cluster.workers)
            else:
                layout = search.ask(cluster.workers[0])
        except Refused as refused:
            raise refused.to_startup_error() from refused

        def failed(error: errors.CollectiveError) -> None:
            if isinstance(error, errors.ServerLost):
                index = layout.servers[error.index]
                error = errors.ServerLost(
                    *(index, error.address, error.step, error.reason),
                    error.held_weights,
                )
            watch(error)

        servers = tuple(self.servers[index] for index in layout.servers)
        seconds = max(deadline.remaining(), _LEAST_SECONDS)
        try:
            client = connect_servers(
                dataclasses.replace(cluster, servers=servers),
                self._settings,
                timeouts=dataclasses.replace(timeouts, startup=seconds),
                replicas=replicas,
                transport=self._transport,
                on_failure=failed,
                session=layout.session,
                stop=stop,
                traffic=self.traffic,
            )
        except errors.StartupError as error:
            for rank, reason in sorted(error.missing.items()):
                if rank < cluster.size:
                    lost = errors.WorkerLost(rank, cluster.workers[rank], 0, reason)
                    raise lost from error
            raise
        self._is_first = False
        names = [f"server {index} ({self.servers[index]})" for index in layout.servers]
        return ServerGroup(client, tuple(names))

    def leave(self, group: Connected, error: BaseException | None) -> None:
        """See `Link.leave`."""
        if isinstance(group, ServerGroup) and group.failure is None:
            if self._stay and error is None:
                self._let_servers_stay(group.client.timeouts)
            group.client.close(error)

    def _let_servers_stay(self, timeouts: Timeouts) -> None:
        heartbeat = _stays.get(self.servers)
        if heartbeat is None:
            try:
                # A lost server shows on the connections of an epoch.
                heartbeat = Heartbeat(
                    "kerasdist-servers stay",
                    timeouts,
                    on_frame=lambda key, frame: None,
                    on_end=lambda key, reason: None,
                )
            except RuntimeError:
                return  # the interpreter is ending: no strategy follows
            _stays[self.servers] = heartbeat
        deadline = Deadline(_ANSWER_SECONDS)
        Search(self, 0, self._is_first, deadline, Cancellation()).stay(heartbeat)
