"""A worker's part in a job, and its connections to the servers.

A request is sent, its reply received; if the connection is lost in between and the
server may be restarted from its snapshot, the worker connects and sends the request
again, for `restart_timeout` seconds.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.collectives.communicator import copy_to_raise
from kerasdist.parameter_server.channel import (
    Channel,
    ChannelEnded,
    ChannelSilent,
    Message,
    Traffic,
)
from kerasdist.parameter_server.layout import ServerSettings
from kerasdist.parameter_server.membership import Goodbye, WorkerProgress
from kerasdist.parameter_server.server.handler import MOST_BYTES, Met
from kerasdist.transport.base import Aborted, Peer
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.framing import Call, FrameType
from kerasdist.transport.liveness.failure_protocol import Supervisor, decode, encode
from kerasdist.transport.tracing import Recorder, SpanTimer

# Makes a request, with arrays placed in the channel.
Build = Callable[[Channel], Message]
# How long one thread waits, in seconds, for another that reports a failure.
_REPORTING_SECONDS = 5.0


class ServerJob(Supervisor):
    """A worker's part in a job, as its connections, tables and communicator see it.

    It is also the communicator's failure detector (`Supervisor`): servers detect the
    failures of others, and name late ranks themselves.

    Args:
        cluster: The cluster with this worker's rank.
        settings: The job's settings.
        timeouts: The time limit of each phase.
        on_failure: See `connect_servers`.
        traffic: See `connect_servers`.

    Attributes:
        connections: The connections to the servers.
        traffic: Counts the requests to all servers, and their replies.
        clocks: This worker's clock in each table, by the table's number.
        joining: Whether the others don't wait for it yet, see
            `kerasdist.parameter_server.server.collectives`.
        recorder: Gets spans of packing, sending and waiting; or None.
        use: Number of the newest strategy that uses it, from 1.
        closed: Whether `close` was called.
        call: See `Supervisor`.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: ServerSettings,
        timeouts: Timeouts,
        on_failure: Callable[[errors.CollectiveError], None] | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__()
        self.cluster = cluster
        self.settings = settings
        self.timeouts = timeouts
        self.rank = cluster.rank or 0
        addresses = cluster.workers or ("this process",)
        self.peers = tuple(Peer(r, address) for r, address in enumerate(addresses))
        self.traffic = traffic or Traffic()
        self.clocks: dict[int, int] = {}
        # By dataset: the epoch, and this worker's last claims in it.
        self._claims: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.joining = False
        self.recorder: Recorder | None = None
        self.use = 1
        self._uses = {1}
        self._on_failure = on_failure
        self._changed = threading.Condition()
        # The same while a thread reports it.
        self._failing: errors.CollectiveError | None = None
        self.closed = False
        self._met = 0
        self._calls = threading.RLock()
        self.connections = ServerConnections(self.check)

    def progress(self) -> WorkerProgress:
        """Return this worker's progress, for a restarted server."""
        return WorkerProgress(
            met=self._met,
            clocks=dict(self.clocks),
            # Not the dictionary itself: another thread may claim from another server.
            claims=dict(self._claims),
            joining=self.joining,
        )

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len(self.connections)

    @property
    def step(self) -> int:
        """The step that messages name."""
        return max([self._step, *self.clocks.values()])

    @step.setter
    def step(self, value: int) -> None:
        self._step = value

    def check(self) -> None:
        """Raise the error that ended this worker's part, if there is one."""
        if self._failure is not None:
            raise copy_to_raise(self._failure)
        if self.closed or not self._uses:
            raise errors.TransportClosed(
                "The connection to the parameter servers is closed. Create a new "
                "strategy to continue."
            )

    @contextlib.contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Allow one call at a time; an interrupted one ends this worker's part."""
        with self._calls:
            self.check()
            try:
                yield
            except (errors.KerasDistError, ValueError, TypeError):
                raise
            except BaseException as error:
                # Ctrl-C during a message, or a bug.
                here = self.peers[self.rank]
                reason = f"it left {what} with {type(error).__name__}: {error}"
                self.fail(
                    errors.WorkerLost(
                        *(here.rank, here.address, self.step, reason.rstrip(". \n")),
                        others_go_on=self.settings.mode == "async",
                    )
                )
                raise

    def note_met(self, call: Call, answers: Sequence[Met]) -> None:
        """Set the clocks at the end of a collective: they are equal again."""
        self._met = max(self._met, call.sequence)
        for answer in answers:
            for number, clock in answer.clocks.items():
                if number in self.clocks:
                    self.clocks[number] = max(self.clocks[number], clock)

    def await_failure(self, seconds: float) -> errors.CollectiveError | None:
        """Wait a moment for a failure; return it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or self.closed, seconds
            )
            return self._failure

    def fail(self, error: errors.CollectiveError) -> errors.CollectiveError:
        """End all waits of this worker, inform the servers; return the first failure.

        Safe from any thread.
        """
        if isinstance(error, errors.WorkerLost) and self.settings.mode == "sync":
            # A server that hasn't summed anything doesn't know the step.
            step = max(error.step, self.step)
            error = errors.WorkerLost(error.rank, error.host, step, error.reason)
        with self._changed:
            if self._failing is not None:
                self._changed.wait_for(
                    lambda: self._failure is not None, _REPORTING_SECONDS
                )
                return self._failure or self._failing
            self._failing = error
        # First the launcher and the servers: once the failure is set another thread may
        # end the process, and a server that doesn't know why would name this worker.
        try:
            if self._on_failure is not None:
                self._on_failure(error)
            here = self.peers[self.rank]
            why = f"{type(error).__name__}: {error}"[:300].rstrip(". ")
            reason = f"it gave up at step {self.step} ({why})"
            if isinstance(error, errors.WorkerLost) and error.rank == here.rank:
                reason = error.reason[:1000]
            self.connections.send_goodbye(
                Goodbye(reason=reason, failed=True, cause=encode(error).decode())
            )
        finally:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self.connections.abort()
        return error

    def abandon(self, error: errors.CollectiveError) -> None:
        """End all waits of this worker at once; servers aren't informed. Doesn't wait.

        Args:
            error: The failure from now on, if there is none yet.
        """
        with self._changed:
            self._failing = self._failing or error
            self._failure = self._failure or self._failing
            self._changed.notify_all()
        self.connections.abort()

    def report(
        self, error: errors.CollectiveError, *, wait: bool = True
    ) -> errors.CollectiveError:
        """See `Supervisor.report`."""
        return self.fail(error)


class ServerConnections(list["ServerConnection"]):
    """The connections, by server. They are closed with this object.

    Args:
        check: Raises the error that ended this worker's part, if there is one.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check
        self._pool: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Begin, when all connections have been added."""
        if len(self) > 1:
            self._pool = ThreadPoolExecutor(
                len(self) - 1, thread_name_prefix="kerasdist-client"
            )

    def request_all(self, builds: Sequence[Build]) -> list[Message]:
        """Send requests to servers at once; return their replies, by server.

        Args:
            builds: A request for each of the first servers, or for all.

        Raises:
            CollectiveError: This worker's failure.
        """
        # This thread makes the first request itself, the pool's threads the others.
        results: list[Callable[[], Message]] = [
            functools.partial(connection.request, build)
            for connection, build in zip(self, builds, strict=False)
        ]
        if len(results) > 1 and self._pool is not None:
            try:
                results[1:] = [self._pool.submit(each).result for each in results[1:]]
            except RuntimeError:  # closed by another thread just now
                self._check()
                raise
        replies: list[Message] = []
        first: BaseException | None = None
        for result in results:
            try:
                replies.append(result())
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
        return replies

    @property
    def transports(self) -> list[str]:
        """The transport of each server: "tcp" or "shared_memory"."""
        return [connection.kind for connection in self]

    def ended(self, server: Hashable, reason: str) -> None:
        """Handle the end of a server's control connection."""
        for connection in self:
            if connection.index == server:
                connection.ended(reason)

    def send_goodbye(self, goodbye: Goodbye) -> None:
        """Send all servers a goodbye."""
        for connection in self:
            connection.send_goodbye(goodbye)

    def abort(self) -> None:
        """End every wait. Safe from any thread."""
        for connection in self:
            connection.abort()

    def close(self) -> None:
        """Release sockets and threads. Can be called twice."""
        for connection in self:
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

    def __init__(self, job: ServerJob) -> None:
        self.index = 0
        self.generation = 0
        self._job = job
        self._lock = threading.RLock()
        self._channel: Channel | None = None

    def _current(self) -> Channel:
        """Return the connected channel."""
        if self._channel is None:
            raise errors.TransportClosed(f"There is no connection to {self}.")
        return self._channel

    @abc.abstractmethod
    def _again(self, error: Exception) -> None:
        """Connect again after an error, or raise its consequence."""

    @property
    def kind(self) -> str:
        """The transport of the server: "tcp" or "shared_memory"."""
        return self._current().kind

    def request(self, build: Build) -> Message:
        """Send a request; return the reply, valid until the next request.

        Args:
            build: Makes the request; called again if the server was restarted.

        Raises:
            CollectiveError: The worker's failure.
        """
        with self._lock:
            while True:
                deadline = Deadline(self._job.timeouts.collective + GRACE_SECONDS)
                self._job.check()
                channel = self._current()
                timer = SpanTimer(self._job.recorder)
                try:
                    request = build(channel)
                    timer.end("pack", request.nbytes)
                    channel.send(request, deadline)
                    timer.end("send", request.nbytes, str(self))
                    answer = channel.receive(deadline, MOST_BYTES)
                    timer.end("wait", what=self, until=channel.answered)
                    timer.end("receive", answer.nbytes, str(self))
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

    def abort(self) -> None:
        """End every wait. Safe from any thread."""
        if self._channel is not None:
            self._channel.abort()

    @abc.abstractmethod
    def close(self) -> None:
        """Release sockets and threads. Can be called twice."""
