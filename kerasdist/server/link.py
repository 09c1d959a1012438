"""A worker's connection to one server, over the network or inside the process.

`kerasdist.server.service` draws how a connection is made. A request goes out, its
answer comes back; if the connection is lost in between and the server may come back
from its snapshot, the link connects and asks again, for `restart_timeout` seconds.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import threading
from collections.abc import Callable
from typing import Any

from kerasdist import errors
from kerasdist.collectives.explain import fresh
from kerasdist.server.channel import (
    Channel,
    ChannelEnded,
    ChannelSilent,
    Message,
    memory_pair,
)
from kerasdist.server.crew import Person
from kerasdist.server.desk import MOST_BYTES, Desk, Farewell
from kerasdist.server.service import PURPOSE
from kerasdist.server.settings import ServerSettings
from kerasdist.server.watch import Watch
from kerasdist.server.wire import SocketChannel
from kerasdist.transport.base import Aborted
from kerasdist.transport.control import read_json
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.dialing import dial_tcp, dial_unix, retry
from kerasdist.transport.failures import decode
from kerasdist.transport.framing import FrameType
from kerasdist.transport.timeouts import Timeouts

__all__ = ["Build", "Job", "Link", "LocalLink", "NetworkLink", "Roster"]

# How much longer than a server its workers wait, to get the server's reasons.
_GRACE_SECONDS = 8.0
# How long a broken connection waits for what the control connection says.
_VERDICT_SECONDS = 1.0
_JOIN_SECONDS = 10.0

# Makes a request, with arrays placed in the channel.
Build = Callable[[Channel], Message]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roster:
    """What a server tells a worker that it lets in.

    Attributes:
        replicas: Each worker's number of replicas, by rank.
        met: Number of the last collective that this worker needn't come to.
        joined: Whether the job had begun without it.
    """

    replicas: tuple[int, ...]
    met: int
    joined: bool


class Job(abc.ABC):
    """What a link asks of its worker."""

    @property
    @abc.abstractmethod
    def failure(self) -> errors.CollectiveError | None:
        """What has ended this worker's part in the job, or None."""

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Whether it was closed by its user."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise what has ended this worker's part, if something has."""

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """The last step, for messages."""

    @abc.abstractmethod
    def fail(self, error: errors.CollectiveError) -> errors.CollectiveError:
        """End all waits of this worker; return its first failure."""

    @abc.abstractmethod
    def await_failure(self, seconds: float) -> errors.CollectiveError | None:
        """Wait a moment for a failure."""

    @abc.abstractmethod
    def resume(self) -> dict[str, Any]:
        """What this worker has done, for a server that comes back."""


class Link(abc.ABC):
    """One server, as a worker sees it.

    Attributes:
        generation: How often the server has come back. What is known of the server's
            versions is known of one generation only.
    """

    def __init__(self, job: Job, timeouts: Timeouts) -> None:
        self.generation = 0
        self._job = job
        self._timeouts = timeouts
        self._lock = threading.RLock()
        self._sent = self._received = 0

    @abc.abstractmethod
    def _current(self) -> Channel:
        """The channel; connected."""

    @abc.abstractmethod
    def _again(self, error: Exception) -> None:
        """Connect again after what was seen, or raise what it means."""

    @property
    def kind(self) -> str:
        """How the server is reached: "tcp", "shared_memory" or "memory"."""
        return self._current().kind

    @property
    def bytes_sent(self) -> int:
        """Bytes of all requests."""
        return self._sent + self._current().bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of all answers."""
        return self._received + self._current().bytes_received

    def request(self, build: Build) -> Message:
        """Ask, and return the answer; its arrays are valid until the next request.

        Args:
            build: Makes the request; called again if the server has come back.

        Raises:
            CollectiveError: The worker's failure.
        """
        with self._lock:
            while True:
                deadline = Deadline(self._timeouts.collective + _GRACE_SECONDS)
                self._job.check()
                channel = self._current()
                try:
                    channel.send(build(channel), deadline)
                    answer = channel.receive(deadline, MOST_BYTES)
                except (ChannelEnded, Aborted) as error:
                    self._again(error)
                    continue
                except ChannelSilent as error:
                    raise self._job.fail(
                        errors.CollectiveTimeout(
                            f"{self} didn't answer within {deadline.seconds:g} s, "
                            "although it is alive. Is it overloaded? Give it more time "
                            "with `timeout=`, or use more servers."
                        )
                    ) from error
                except errors.ProtocolError as error:
                    raise self._job.fail(
                        errors.CollectiveError(f"{self} sent nonsense: {error}")
                    ) from error
                break
        if answer.frame is FrameType.FAILURE:
            text = str(answer.meta.get("failure", ""))
            raise fresh(self._job.fail(decode(text.encode())[0]))
        return answer

    @abc.abstractmethod
    def leave(self, farewell: Farewell) -> None:
        """Say goodbye."""

    @abc.abstractmethod
    def abort(self) -> None:
        """End every wait. Safe from any thread."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what is held. Can be called twice."""


class NetworkLink(Link):
    """A server over the network.

    Args:
        index: Index of the server.
        address: Its address.
        person: This worker.
        host: What this worker shares with others on its host.
        session: What the servers' session is called.
        secret: The job's secret.
        settings: What the job was asked for.
        timeouts: How long each phase may take.
        watch: Watches the control connections of this worker.
        job: This worker's part in the job.
        transport: "auto" or "tcp".
    """

    def __init__(
        self,
        index: int,
        address: str,
        person: Person,
        host: str,
        session: str,
        secret: bytes,
        settings: ServerSettings,
        timeouts: Timeouts,
        watch: Watch,
        job: Job,
        transport: str,
    ) -> None:
        super().__init__(job, timeouts)
        self.index = index
        self.address = address
        self._person = person
        self._host = host
        self._session = session
        self._secret = secret
        self._settings = settings
        self._watch = watch
        self._transport = transport
        self._channel: SocketChannel | None = None
        self._reason = ""
        self._stop = threading.Event()
        self._reviver: threading.Thread | None = None

    def __str__(self) -> str:
        """For instance `server 1 (10.0.0.9:2222)`."""
        return f"server {self.index} ({self.address})"

    def _current(self) -> Channel:
        if self._channel is None:
            raise errors.TransportClosed(f"There is no connection to {self}.")
        return self._channel

    def open(self, met: int | None = None) -> Roster:
        """Come to the start of the job, or join it.

        Args:
            met: What another server has said of collectives, see `Roster`.

        Raises:
            StartupError: The server didn't come, didn't let this worker in, or not all
                workers came.
            AuthenticationError: The server doesn't hold the same secret.
            ProtocolError: What answers isn't kerasdist.
        """
        deadline = Deadline(self._timeouts.startup)
        return self._connect(deadline, {"met": met})

    def _connect(self, deadline: Deadline, more: dict[str, Any]) -> Roster:
        hello = {
            "session": self._session,
            "purpose": PURPOSE,
            "line": "control",
            "rank": self._person.rank,
            "server": self.index,
            "incarnation": self._person.incarnation,
            "replicas": self._person.replicas,
            "settings": self._settings.agreed(),
            **more,
        }

        def come() -> tuple[Any, dict[str, Any]]:
            sock = dial_tcp(self.address, self._secret, hello, deadline)
            try:
                patience = Deadline(deadline.remaining() + _GRACE_SECONDS)
                kind, answer = read_json(sock, patience)
                if kind is FrameType.REFUSAL:
                    raise errors.StartupError(str(answer.get("message")))
                if kind is not FrameType.ROSTER:
                    raise errors.ProtocolError(f"A {kind.name} frame isn't due now.")
            except BaseException:
                sock.close()
                raise
            return sock, answer

        control, answer = self._retry(come, deadline)
        try:
            shared = self._transport == "auto" and answer.get("host") == self._host
            hello = {**hello, "line": "data", "shared": shared}
            name = str(answer.get("unix_name"))

            def dial() -> Any:
                if shared:
                    return dial_unix(name, self._secret, hello, deadline, self.address)
                return dial_tcp(self.address, self._secret, hello, deadline)

            roster = Roster(
                replicas=tuple(int(n) for n in answer.get("replicas", ())),
                met=int(answer.get("met", 0)),
                joined=answer.get("joined") is True,
            )
            sock = self._retry(dial, deadline)
        except (TypeError, ValueError) as error:
            control.close()
            raise errors.ProtocolError(f"A roster is damaged: {answer!r}.") from error
        except BaseException:
            control.close()
            raise
        self._keep_counts()
        self._channel = SocketChannel(sock, shared=shared)
        self._reason = ""
        self._watch.add(self.index, control)
        return roster

    def _retry(self, attempt: Callable[[], Any], deadline: Deadline) -> Any:
        """Try until it works; messages name the server."""
        try:
            found = retry(attempt, deadline, self.index, self.address, self._stop)
        except errors.StartupError as error:
            if not error.missing or f"Rank {self.index} " not in str(error):
                raise
            why = error.missing.get(self.index, str(error))
            raise errors.StartupError(
                f"Server {self.index} ({self.address}) couldn't be reached within "
                f"{deadline.seconds:g} s: {why}. Is it running (look at its output "
                "first), and is its address right?"
            ) from error
        if found is None:
            raise Aborted
        return found

    def _keep_counts(self) -> None:
        if self._channel is not None:
            self._sent += self._channel.bytes_sent
            self._received += self._channel.bytes_received
            self._channel.close()

    # When the connection is lost.

    def ended(self, reason: str) -> None:
        """The control connection has ended; from the watch's thread."""
        self._reason = reason
        channel, generation = self._channel, self.generation
        if channel is not None:
            channel.abort()
        if self._stop.is_set() or self._job.closed:
            return
        if not self._settings.restartable:
            # At once: its part may be needed only much later.
            self._lost(reason)
        else:
            # The server waits for its workers; this one may be busy for long.
            self._reviver = threading.Thread(
                target=self._revive,
                args=(generation,),
                name=f"kerasdist-reviver {self.index}",
                daemon=True,
            )
            self._reviver.start()

    def _revive(self, generation: int) -> None:
        with self._lock:
            if self.generation != generation or self._job.failure is not None:
                return
            try:
                self._again(ChannelEnded(self._reason))
            except (errors.KerasDistError, Aborted):
                return  # the next request says so

    def _again(self, error: Exception) -> None:
        # Broken because the job has failed? Then that is on its way.
        failure = self._job.await_failure(0.0 if self._reason else _VERDICT_SECONDS)
        if failure is not None:
            raise fresh(failure) from error
        self._job.check()
        reason = self._reason or f"{error}".rstrip(".") or "its connection ended"
        if not self._settings.restartable:
            raise self._lost(reason) from error
        self._watch.drop(self.index)
        deadline = Deadline(self._settings.restart_timeout)
        while True:
            try:
                self._connect(deadline, {"resume": self._job.resume()})
                break
            except Aborted:
                self._job.check()
                raise
            except errors.KerasDistError as refused:
                raise self._lost(f"{reason}; {refused}".rstrip(".")) from refused
        self.generation += 1

    def _lost(self, reason: str) -> errors.CollectiveError:
        return fresh(
            self._job.fail(
                errors.ServerLost(self.index, self.address, self._job.step, reason)
            )
        )

    # The end.

    def leave(self, farewell: Farewell) -> None:
        """See `Link.leave`."""
        payload = json.dumps(farewell.to_json()).encode()
        self._watch.post(self.index, FrameType.GOODBYE, payload)

    def abort(self) -> None:
        """See `Link.abort`."""
        self._stop.set()
        if self._channel is not None:
            self._channel.abort()

    def close(self) -> None:
        """See `Link.close`."""
        self.abort()
        reviver = self._reviver
        if reviver is not None and reviver is not threading.current_thread():
            reviver.join(_JOIN_SECONDS)
        if self._channel is not None:
            self._channel.close()


class LocalLink(Link):
    """The server of a worker alone, in its own process.

    Args:
        desk: The server.
        person: This worker.
        timeouts: How long each phase may take.
        job: This worker's part in the job.
    """

    def __init__(
        self, desk: Desk, person: Person, timeouts: Timeouts, job: Job
    ) -> None:
        super().__init__(job, timeouts)
        self._desk = desk
        self._person = person
        self._channel, theirs = memory_pair()
        desk.crew.enter(person, None)
        if desk.keeper is not None:
            desk.keeper.start()
        self._thread = threading.Thread(
            target=desk.attend,
            args=(person, theirs),
            name="kerasdist-server",
            daemon=True,
        )
        self._thread.start()

    def __str__(self) -> str:
        """What messages call it."""
        return "the server in this process"

    def _current(self) -> Channel:
        return self._channel

    def _again(self, error: Exception) -> None:
        self._job.check()
        raise errors.TransportClosed("The server in this process was closed.")

    def leave(self, farewell: Farewell) -> None:
        """See `Link.leave`."""
        self._desk.leave(self._person, farewell)

    def abort(self) -> None:
        """See `Link.abort`."""
        self._channel.abort()

    def close(self) -> None:
        """See `Link.close`."""
        self.abort()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)
        self._desk.close()
