"""A worker's connection to one server: the contract, and its requests.

A request is sent, its reply received; if the connection is lost in between and the
server may be restarted from its snapshot, the worker connects and sends the request
again, for `restart_timeout` seconds.
"""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kerasdist import errors
from kerasdist.collectives.failures import copy_to_raise
from kerasdist.ps.channel.channel import Channel, ChannelEnded, ChannelSilent, Message
from kerasdist.ps.client.server_communicator import Build, ServerJob
from kerasdist.ps.server.handler import MOST_BYTES, Goodbye
from kerasdist.transport.base import Aborted
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.liveness.failure_protocol import decode
from kerasdist.transport.tracing import SpanTimer
from kerasdist.transport.wire.framing import Call, FrameType

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roster:
    """The reply of a server to a worker that it admits.

    Attributes:
        replicas: Each worker's number of replicas, by rank.
        met: Number of the last collective in which this worker doesn't take part.
        joined: Whether the job had begun without it.
        joining: Whether the others don't wait for it yet, see
            `kerasdist.ps.server.collectives`.
        resumed: Whether the server continues from a snapshot.
        seed: Random; the same for all workers, and after the server's restart.
    """

    replicas: tuple[int, ...]
    met: int
    joined: bool
    joining: bool = False
    resumed: bool = False
    seed: int = 0


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
