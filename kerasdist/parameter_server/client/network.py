"""A worker's connection to one server over the network.

The docstring of `kerasdist.parameter_server.server.server` has a diagram of how it is
made. When it is lost, and the server may be restarted from its snapshot, it is made
again.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kerasdist import errors
from kerasdist.collectives.communicator import copy_to_raise
from kerasdist.parameter_server.channel import (
    Channel,
    ChannelEnded,
    ChannelSilent,
    Message,
)
from kerasdist.parameter_server.client.server_communicator import Build, ServerJob
from kerasdist.parameter_server.layout import ServerSettings
from kerasdist.parameter_server.membership import (
    Goodbye,
    ServerHello,
    ServerRoster,
    WorkerRecord,
)
from kerasdist.parameter_server.server.handler import MOST_BYTES
from kerasdist.parameter_server.server.registration import PURPOSE
from kerasdist.parameter_server.socket_channel import SocketChannel
from kerasdist.transport.base import Aborted, Connection
from kerasdist.transport.deadline import Cancellation, Deadline, Timeouts
from kerasdist.transport.framing import Call, FrameType, to_object
from kerasdist.transport.liveness.failure_protocol import decode
from kerasdist.transport.liveness.heartbeat import Heartbeat
from kerasdist.transport.rendezvous.dial import (
    Refused,
    dial_tcp,
    dial_unix,
    register,
    retry,
)
from kerasdist.transport.rendezvous.waiting_notice import Absent, Sight
from kerasdist.transport.tracing import SpanTimer

# A worker's connection to one server: the contract, and its requests.
#
# A request is sent, its reply received; if the connection is lost in between and the
# server may be restarted from its snapshot, the worker connects and sends the request
# again, for `restart_timeout` seconds.

# All connections of a worker to its servers, used as one.


class ServerConnections:
    """The connections, by server. They are closed with this object.

    Args:
        check: Raises the error that ended this worker's part, if there is one.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._every: list[ServerConnection] = []
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._every)

    def __getitem__(self, server: int) -> ServerConnection:
        return self._every[server]

    def add(self, connection: ServerConnection) -> None:
        """Add the connection to the next server."""
        self._every.append(connection)

    def start(self) -> None:
        """Begin, when all connections have been added."""
        if len(self._every) > 1:
            self._pool = ThreadPoolExecutor(
                len(self._every) - 1, thread_name_prefix="kerasdist-client"
            )

    def request_all(self, builds: Sequence[Build | None]) -> list[Message]:
        """See `ServerJob.request_all`."""
        nothing = Message(FrameType.REPLY, Call(0), {}, ())
        used = [i for i, build in enumerate(builds) if build is not None]
        replies = [nothing] * len(builds)

        def request(index: int) -> Message:
            build = builds[index]
            return nothing if build is None else self._every[index].request(build)

        if len(used) == 1 or self._pool is None:
            for index in used:
                replies[index] = request(index)
            return replies
        try:
            futures = {index: self._pool.submit(request, index) for index in used[1:]}
        except RuntimeError:  # closed by another thread just now
            self._check()
            raise
        first: BaseException | None = None
        try:
            replies[used[0]] = request(used[0])
        except Exception as error:
            first = error
        for index, future in futures.items():
            try:
                replies[index] = future.result()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
        return replies

    @property
    def transports(self) -> list[str]:
        """The transport of each server: "tcp", "shared_memory" or "memory"."""
        return [connection.kind for connection in self._every]

    @property
    def bytes_sent(self) -> int:
        """Bytes of all requests to all servers, those in shared memory too."""
        return sum(connection.bytes_sent for connection in self._every)

    @property
    def bytes_received(self) -> int:
        """Bytes of all replies of all servers."""
        return sum(connection.bytes_received for connection in self._every)

    def ended(self, server: Hashable, reason: str) -> None:
        """Handle the end of a server's control connection."""
        for connection in self._every:
            if connection.index == server:
                connection.ended(reason)

    def send_goodbye(self, goodbye: Goodbye) -> None:
        """Send all servers a goodbye."""
        for connection in self._every:
            connection.send_goodbye(goodbye)

    def abort(self) -> None:
        """End every wait. Safe from any thread."""
        for connection in self._every:
            connection.abort()

    def close(self) -> None:
        """Release sockets and threads. Can be called twice."""
        for connection in self._every:
            connection.close()
        if self._pool is not None:
            self._pool.shutdown()


# Seconds that workers wait longer than a server, to get the server's reasons.
GRACE_SECONDS = 8.0
# Seconds that a thread of a connection may take to end.
JOIN_SECONDS = 10.0


class ServerConnection(abc.ABC):
    """One server, as a worker sees it.

    Attributes:
        index: Index of the server.
        generation: Number of the server's restarts. Versions of its tables are only
            valid in one generation.
    """

    def __init__(self, job: ServerJob, timeouts: Timeouts) -> None:
        self.index = 0
        self.generation = 0
        self._job = job
        self._timeouts = timeouts
        self._lock = threading.RLock()
        self._sent = self._received = 0

    @abc.abstractmethod
    def _current(self) -> Channel:
        """Return the connected channel."""

    @abc.abstractmethod
    def _again(self, error: Exception) -> None:
        """Connect again after an error, or raise its consequence."""

    @property
    def kind(self) -> str:
        """The transport of the server: "tcp", "shared_memory" or "memory"."""
        return self._current().kind

    @property
    def bytes_sent(self) -> int:
        """Bytes of all requests."""
        return self._sent + self._current().bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of all replies."""
        return self._received + self._current().bytes_received

    def request(self, build: Build) -> Message:
        """Send a request; return the reply, valid until the next request.

        Args:
            build: Makes the request; called again if the server was restarted.

        Raises:
            CollectiveError: The worker's failure.
        """
        with self._lock:
            while True:
                deadline = Deadline(self._timeouts.collective + GRACE_SECONDS)
                self._job.check()
                channel = self._current()
                recorder = self._job.recorder
                timer = None if recorder is None else SpanTimer(recorder)
                try:
                    request = build(channel)
                    if timer is not None:
                        size = sum(array.nbytes for array in request.arrays)
                        timer.end("pack", size)
                    channel.send(request, deadline)
                    if timer is not None:
                        timer.end("send", size, str(self))
                    answer = channel.receive(deadline, MOST_BYTES)
                    if timer is not None:
                        timer.end("wait", what=self, until=channel.answered)
                        size = sum(array.nbytes for array in answer.arrays)
                        timer.end("receive", size, str(self))
                except (ChannelEnded, Aborted) as error:
                    self._again(error)
                    continue
                except ChannelSilent as error:
                    raise self._job.fail(
                        errors.CollectiveTimeout(
                            f"{self} didn't reply within {deadline.seconds:g} s, "
                            "although it is alive. Is it overloaded? Give it more time "
                            "with `timeout=`, or use more servers."
                        )
                    ) from error
                except errors.ProtocolError as error:
                    raise self._job.fail(
                        errors.CollectiveError(f"{self} violated the protocol: {error}")
                    ) from error
                break
        if answer.frame is FrameType.FAILURE:
            text = str(answer.meta.get("failure", ""))
            raise copy_to_raise(self._job.fail(decode(text)[0]))
        return answer

    @abc.abstractmethod
    def ended(self, reason: str) -> None:
        """Handle the end of the control connection, in the heartbeat's thread."""

    @abc.abstractmethod
    def send_goodbye(self, goodbye: Goodbye) -> None:
        """Send a goodbye."""

    @abc.abstractmethod
    def abort(self) -> None:
        """End every wait. Safe from any thread."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release sockets and threads. Can be called twice."""


_Result = TypeVar("_Result")
# Seconds that a broken connection waits for a report on the control connection.
_REPORT_SECONDS = 1.0


class NetworkConnection(ServerConnection):
    """A server over the network.

    Args:
        index: Index of the server.
        address: Its address.
        worker: This worker.
        host: The identity of this worker's host, see `host_key`.
        session: The name of the servers' session.
        secret: The job's secret.
        settings: The job's settings.
        timeouts: The time limit of each phase.
        heartbeat: Watches the control connections of this worker.
        job: This worker's part in the job.
        transport: "auto" or "tcp".
        stop: When it is set, by `abort` or another thread, waits for the server end.
    """

    def __init__(
        self,
        index: int,
        address: str,
        worker: WorkerRecord,
        host: str,
        session: str,
        secret: bytes,
        settings: ServerSettings,
        timeouts: Timeouts,
        heartbeat: Heartbeat,
        job: ServerJob,
        transport: str,
        stop: Cancellation | None = None,
    ) -> None:
        super().__init__(job, timeouts)
        self.index = index
        self.address = address
        self._hello = ServerHello(
            server=index,
            incarnation=worker.incarnation,
            replicas=worker.replicas,
            settings=settings.agreed(),
        )
        self._rank = worker.rank
        self._host = host
        self._session = session
        self._secret = secret
        self._settings = settings
        self._heartbeat = heartbeat
        self._transport = transport
        self._channel: SocketChannel | None = None
        self._reason = ""
        self._stop = stop or Cancellation()
        self._reviver: threading.Thread | None = None
        # Why it couldn't be reached; empty if it could.
        self.unreachable = ""

    def __str__(self) -> str:
        """Return its name, for instance `server 1 (10.0.0.9:2222)`."""
        return f"server {self.index} ({self.address})"

    def _current(self) -> Channel:
        if self._channel is None:
            raise errors.TransportClosed(f"There is no connection to {self}.")
        return self._channel

    def open(
        self,
        met: int | None = None,
        *,
        join_barrier: bool = False,
        joining: bool | None = None,
    ) -> ServerRoster:
        """Connect at the start of the job, or join it later.

        Args:
            met: `ServerRoster.met` of another server, or None.
            join_barrier: Whether to join at an epoch's end, see
                `parameter_server.server.collectives`.
            joining: `ServerRoster.joining` of another server, or None.

        Raises:
            StartupError: The server is missing, refused this worker, or not all
                workers connected.
            AuthenticationError: The server doesn't hold the same secret.
            ProtocolError: The process at the address isn't kerasdist.
        """
        hello = dataclasses.replace(
            self._hello, met=met, join_barrier=join_barrier, joining=joining
        )
        return self._connect(Deadline(self._timeouts.startup), hello)

    def _connect(self, deadline: Deadline, hello: ServerHello) -> ServerRoster:
        secret, stop = self._secret, self._stop
        connected = threading.Event()

        def look() -> Sight | None:
            if not connected.is_set():
                return None
            why = f"server {self.index} waits for them, see its output"
            return Sight([Absent("other workers", "", why)], f"server {self.index}")

        def enrol() -> tuple[Connection, ServerRoster]:
            return register(
                *(self.address, secret, self._addressed(hello), ServerRoster),
                *(deadline, stop, GRACE_SECONDS, connected),
            )

        control, roster = self._retry(enrol, deadline, look)
        shared = self._transport == "auto" and roster.host == self._host
        data = self._addressed(dataclasses.replace(hello, line="data", shared=shared))

        def dial() -> Connection:
            if shared:
                name = roster.unix_name
                return dial_unix(name, secret, data, deadline, self.address, stop)
            return dial_tcp(self.address, secret, data, deadline, stop)

        try:
            channel = self._retry(dial, deadline)
        except BaseException:
            control.close()
            raise
        self._keep_counts()
        self._channel = SocketChannel(channel, shared=shared)
        self._reason = ""
        self._heartbeat.add(self.index, control)
        return roster

    def _addressed(self, hello: ServerHello) -> dict[str, Any]:
        return {
            "session": self._session,
            "purpose": PURPOSE,
            "rank": self._rank,
            **to_object(hello),
        }

    def _retry(
        self,
        attempt: Callable[[], _Result],
        deadline: Deadline,
        connected: Callable[[], Sight | None] | None = None,
    ) -> _Result:
        """Try until it works."""
        try:
            found = retry(
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
        """See `ServerConnection.ended`."""
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
                return  # the next request raises it

    def _again(self, error: Exception) -> None:
        # If it broke because the job has failed, a report follows.
        failure = self._job.await_failure(0.0 if self._reason else _REPORT_SECONDS)
        if failure is not None:
            raise copy_to_raise(failure) from error
        self._job.check()
        reason = self._reason or f"{error}".rstrip(".") or "its connection ended"
        if not self._settings.restartable:
            raise self._lost(reason) from error
        self._heartbeat.drop(self.index)
        deadline = Deadline(self._settings.restart_timeout)
        while True:
            try:
                progress = self._job.progress()
                self._connect(
                    deadline, dataclasses.replace(self._hello, resume=progress)
                )
                break
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
                    self._settings.hold_weights,
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
        if self._channel is not None:
            self._channel.abort()

    def close(self) -> None:
        """See `ServerConnection.close`."""
        self.abort()
        reviver = self._reviver
        if reviver is not None and reviver is not threading.current_thread():
            reviver.join(JOIN_SECONDS)
        if self._channel is not None:
            self._channel.close()
