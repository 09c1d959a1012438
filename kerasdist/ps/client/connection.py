"""A worker's connection to one server: the contract, and its requests.

A request is sent, its reply received; if the connection is lost in between and the
server may be restarted from its snapshot, the worker connects and sends the request
again, for `restart_timeout` seconds.
"""

from __future__ import annotations

import abc
import dataclasses
import threading

from kerasdist import errors
from kerasdist.collectives.failures import copy_to_raise
from kerasdist.ps.channel.channel import Channel, ChannelEnded, ChannelSilent, Message
from kerasdist.ps.client.job import Build, Job
from kerasdist.ps.server.handler import MOST_BYTES, Goodbye
from kerasdist.transport.base import Aborted
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.liveness.failure_protocol import decode
from kerasdist.transport.timeouts import Timeouts
from kerasdist.transport.tracing import Laps
from kerasdist.transport.wire.framing import FrameType

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
            `kerasdist.ps.server.join`.
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

    def __init__(self, job: Job, timeouts: Timeouts) -> None:
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
                laps = None if recorder is None else Laps(recorder)
                try:
                    request = build(channel)
                    if laps is not None:
                        size = sum(array.nbytes for array in request.arrays)
                        laps.end("pack", size)
                    channel.send(request, deadline)
                    if laps is not None:
                        laps.end("send", size, str(self))
                    answer = channel.receive(deadline, MOST_BYTES)
                    if laps is not None:
                        laps.end("wait", what=self, until=channel.answered)
                        size = sum(array.nbytes for array in answer.arrays)
                        laps.end("receive", size, str(self))
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
