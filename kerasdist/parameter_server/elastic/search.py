"""The search of an epoch's members for the servers of the epoch.

The first member of an epoch decides which servers it has: those that answer. So the
servers need no agreement, and one that was started again serves from the next epoch on.
At the start of the job all servers are needed, because one that doesn't answer may
start later.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kerasdist import errors
from kerasdist.collectives.elastic.groups import CannotConnect
from kerasdist.parameter_server.layout import ServerSettings
from kerasdist.transport.base import Aborted, Connection
from kerasdist.transport.deadline import Cancellation, Deadline
from kerasdist.transport.framing import FrameType, unexpected
from kerasdist.transport.rendezvous.dial import dial_tcp, retry

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
#
# Each request is a connection of its own: its hello, and one answer. Requests of
# earlier epochs than the present one of S are refused, unless that has failed.

PURPOSE = "epoch"
READY, BEGIN, ASK = "ready", "begin", "ask"
_REQUEST_SECONDS = 5.0


class Refused(Exception):
    """A server has refused a request.

    Args:
        message: The reason.
        final: Whether it will refuse it later, too.
    """

    def __init__(self, message: str, *, final: bool = True) -> None:
        super().__init__(message)
        self.final = final


@dataclasses.dataclass(frozen=True)
class EpochServers:
    """The servers of an epoch.

    Attributes:
        servers: Their indices among the job's servers, in the epoch's order.
        session: The name of the epoch's session.
    """

    servers: tuple[int, ...]
    session: str

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {"servers": list(self.servers), "session": self.session}

    @classmethod
    def from_json(cls, value: dict[str, Any], count: int) -> EpochServers:
        """Return the layout that `to_json` wrote.

        Args:
            value: The JSON object.
            count: The number of the job's servers.

        Raises:
            ProtocolError: It isn't one.
        """
        servers, session = value.get("servers"), value.get("session")
        if (
            not isinstance(session, str)
            or not isinstance(servers, list)
            or not 0 < len(servers) == len(set(map(str, servers)))
            or not all(type(each) is int and 0 <= each < count for each in servers)
        ):
            raise errors.ProtocolError(
                f"The servers of an epoch are damaged. Received: {value!r:.500}."
            )
        return cls(tuple(servers), session)


def agreed(settings: ServerSettings, min_workers: int) -> dict[str, Any]:
    """Return the settings that are the same on all tasks, as JSON values."""
    return {**settings.agreed(), "min_workers": min_workers}


def request(
    address: str,
    secret: bytes,
    hello: dict[str, Any],
    deadline: Deadline,
    stop: Cancellation | None = None,
) -> dict[str, Any]:
    """Send a server a request; return its answer.

    Args:
        address: The server's address.
        secret: The job's secret.
        hello: The request.
        deadline: When to give up.
        stop: When this is set, by any thread, the call ends with an error at once.

    Raises:
        Refused: The server has refused it.
        OSError, EOFError: The server can't be reached now, or hasn't answered.
        AuthenticationError, ProtocolError: See `dial_tcp`.
    """
    stop = stop or Cancellation()
    with (
        dial_tcp(address, secret, hello, deadline, stop) as connection,
        stop.bound(connection.sock),
    ):
        kind, value = connection.read_json(deadline)
    if kind is FrameType.REFUSAL:
        raise Refused(str(value.get("message")), final=value.get("final") is True)
    if kind is not FrameType.ROSTER:
        raise unexpected(kind)
    return value


def answer(connection: Connection, value: dict[str, Any]) -> None:
    """Answer a request, and close its connection."""
    _finish(connection, FrameType.ROSTER, value)


def refuse(connection: Connection, message: str, *, final: bool = True) -> None:
    """Refuse a request, and close its connection; see `Refused`."""
    _finish(connection, FrameType.REFUSAL, {"message": message, "final": final})


def _finish(connection: Connection, kind: FrameType, value: dict[str, Any]) -> None:
    with connection:
        try:
            connection.write_json(kind, value, Deadline(_REQUEST_SECONDS))
        except OSError:
            return  # the sender has ended, or waits no longer


def names(servers: Sequence[int], addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the names of servers in messages."""
    return tuple(f"server {index} ({addresses[index]})" for index in servers)


# Seconds in which a server that lives answers.
_ANSWER_SECONDS = 3.0
_AGAIN_SECONDS = 0.05
# Of the errors of an address: it doesn't answer; another process does.
_SILENT = (OSError, EOFError)
_OTHERS = (errors.AuthenticationError, errors.ProtocolError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """The search of one worker for the servers of one epoch.

    Attributes:
        rank: This worker's rank at the start.
        servers: The addresses of the job's servers.
        session: The name of the servers' session.
        secret: The job's secret.
        agreed: The settings that servers compare, see `requests.agreed`.
        epoch: The number of the epoch.
        first: Whether this worker has been in no epoch before.
        deadline: When to give up.
        stop: When another thread sets it, the search ends with `Aborted`.
    """

    rank: int
    servers: tuple[str, ...]
    session: str
    secret: bytes
    agreed: dict[str, Any]
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
        servers = self._all() if self.epoch == 0 else self._living()
        session = f"{self.session}.{self.epoch}.{secrets.token_hex(8)}"
        layout = EpochServers(tuple(servers), session)
        begin = functools.partial(
            self._begin_at,
            hello=self._hello(
                BEGIN,
                workers=list(workers),
                seconds=self.deadline.remaining(),
                layout=layout.to_json(),
            ),
        )
        self._at_once(begin, servers)
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
        answers = _Answers()
        done = Cancellation()
        servers = range(len(self.servers))
        for server in servers:
            threading.Thread(
                target=self._ask_one,
                args=(server, answers, done),
                name="kerasdist-epoch",
                daemon=True,
            ).start()
        try:
            while not (answers.wait() or self.stop.is_set() or self.deadline.expired):
                if not self.first and answers.all_dead(len(servers)):
                    raise self._none_left(answers.unreachable)
        finally:
            done.set()
        if self.stop.is_set():
            raise Aborted
        if answers.layout is not None:
            return answers.layout
        if answers.error is not None:
            raise answers.error
        raise errors.WorkerLost(
            *(0, chief, 0),
            f"it didn't begin epoch {self.epoch} at the servers within "
            f"{self.deadline.seconds:.3g} s",
        )

    # Of an epoch's first member.

    def _begin_at(self, server: int, hello: dict[str, Any]) -> None:
        try:
            self._request(server, hello)
        except _SILENT as error:
            if self.stop.is_set():
                raise Aborted from error
            raise errors.StartupError(
                f"Server {server} ({self.servers[server]}) was lost before epoch "
                f"{self.epoch} began: {error}."
            ) from error

    def _all(self) -> list[int]:
        """Wait until all servers have been started."""
        for server, address in enumerate(self.servers):
            attempt = functools.partial(self._is_ready, server)
            try:
                found = retry(
                    *(attempt, self.deadline, server, address, self.stop), "Server"
                )
            except errors.StartupError as error:
                # It has the index of a server, not the rank of a worker.
                error.missing = {}
                raise
            if found is None:
                raise Aborted
        return list(range(len(self.servers)))

    def _is_ready(self, server: int) -> bool:
        try:
            self._request(server, self._hello(READY))
        except Refused as refused:
            if refused.final:
                raise
            raise OSError(str(refused)) from refused
        return True

    def _living(self) -> list[int]:
        """Return the servers that answer; at least one.

        Raises:
            CannotConnect: There is none.
        """
        hello = self._hello(READY)

        def ask(server: int) -> BaseException | None:
            try:
                self._request(server, hello)
            except (*_SILENT, *_OTHERS) as error:
                return error
            return None

        servers = range(len(self.servers))
        # A worker that was in no epoch yet may have been started before the servers.
        patience = Deadline(self.deadline.remaining() / 2 if self.first else 0.0)
        while not self.stop.is_set():
            found = dict(zip(servers, self._at_once(ask, servers), strict=True))
            living = [server for server, error in found.items() if error is None]
            if len(living) == len(servers) or (living and patience.expired):
                return living
            dead = all(isinstance(e, ConnectionRefusedError) for e in found.values())
            if (dead and patience.expired) or self.deadline.expired:
                raise self._none_left(found)
            self.stop.wait(_AGAIN_SECONDS)
        raise Aborted

    def _none_left(self, found: dict[int, BaseException | None]) -> Exception:
        server, error = max(found.items())
        reason = str(error or "it doesn't answer").rstrip(".")
        if len(found) > 1:
            reason = f"no server is left; {reason}"
        lost = errors.ServerLost(server, self.servers[server], 0, reason, False)
        # At the start the servers may be started later.
        return lost if self.first else CannotConnect(lost)

    # Of the other members.

    def _ask_one(self, server: int, answers: _Answers, done: Cancellation) -> None:
        """Ask one server until it answers."""
        hello = self._hello(ASK)
        while not (done.is_set() or self.deadline.expired):
            try:
                value = request(
                    *(self.servers[server], self.secret, hello, self.deadline, done)
                )
                layout = EpochServers.from_json(value, len(self.servers))
                answers.take(server, layout=layout)
                return
            except _SILENT as error:
                answers.take(server, unreachable=error)
            except _OTHERS as error:
                if self.epoch == 0:
                    answers.take(server, error=error)
                    return
                answers.take(server, unreachable=error)
            except Refused as error:
                if self.epoch > 0 or error.final:
                    answers.take(server, error=error)
                    return
            done.wait(_AGAIN_SECONDS)

    # Requests.

    def _hello(self, what: str, **more: Any) -> dict[str, Any]:
        return {
            "session": self.session,
            "purpose": PURPOSE,
            "rank": self.rank,
            "request": what,
            "epoch": self.epoch,
            "settings": self.agreed,
            **more,
        }

    def _request(self, server: int, hello: dict[str, Any]) -> dict[str, Any]:
        limit = Deadline(min(self.deadline.remaining(), _ANSWER_SECONDS))
        return request(self.servers[server], self.secret, hello, limit, self.stop)

    def _at_once(
        self, function: Callable[[int], Any], servers: Iterable[int]
    ) -> list[Any]:
        servers = list(servers)
        with ThreadPoolExecutor(len(servers), "kerasdist-epoch") as pool:
            return list(pool.map(function, servers))


class _Answers:
    """The answers of several servers to one question."""

    def __init__(self) -> None:
        self.layout: EpochServers | None = None
        self.error: Exception | None = None
        self.unreachable: dict[int, BaseException | None] = {}
        self._changed = threading.Condition()

    def take(
        self,
        server: int,
        *,
        layout: EpochServers | None = None,
        error: Exception | None = None,
        unreachable: BaseException | None = None,
    ) -> None:
        """Note a server's answer, or why there is none yet."""
        with self._changed:
            self.layout = self.layout or layout
            self.error = self.error or error
            self.unreachable[server] = unreachable
            self._changed.notify_all()

    def wait(self) -> bool:
        """Wait for news for a moment; return whether there is an answer."""
        with self._changed:
            self._changed.wait_for(self._is_answered, _AGAIN_SECONDS)
            return self._is_answered()

    def _is_answered(self) -> bool:
        return self.layout is not None or self.error is not None

    def all_dead(self, servers: int) -> bool:
        """Return whether nothing listens at any server's address."""
        with self._changed:
            found = list(self.unreachable.values())
        return len(found) == servers and all(
            isinstance(error, ConnectionRefusedError) for error in found
        )
