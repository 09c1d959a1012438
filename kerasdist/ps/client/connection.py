"""A worker's connection to one server: the contract, and how a request is made.

A request goes out, its answer comes back; if the connection is lost in between and the
server may come back from its snapshot, the worker connects and asks again, for
`restart_timeout` seconds.
"""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from kerasdist import errors
from kerasdist.collectives.failures import copy_to_raise
from kerasdist.ps.channel.channel import Channel, ChannelEnded, ChannelSilent, Message
from kerasdist.ps.server.handler import MOST_BYTES, Goodbye
from kerasdist.transport.base import Aborted
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.liveness.failure_protocol import decode
from kerasdist.transport.timeouts import Timeouts
from kerasdist.transport.tracing import Laps, Recorder
from kerasdist.transport.wire.framing import FrameType

__all__ = [
    "GRACE_SECONDS",
    "JOIN_SECONDS",
    "Build",
    "Job",
    "Roster",
    "ServerConnection",
]

# How much longer than a server its workers wait, to get the server's reasons.
GRACE_SECONDS = 8.0
# How long a thread of a connection may take to end.
JOIN_SECONDS = 10.0

# Makes a request, with arrays placed in the channel.
Build = Callable[[Channel], Message]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roster:
    """What a server tells a worker that it lets in.

    Attributes:
        replicas: Each worker's number of replicas, by rank.
        met: Number of the last collective in which this worker needn't take part.
        joined: Whether the job had begun without it.
        joining: Whether the others don't wait for it yet, see
            `kerasdist.ps.server.join`.
        resumed: Whether the server goes on from a snapshot.
        seed: Random; the same for all workers, and after the server's restart.
    """

    replicas: tuple[int, ...]
    met: int
    joined: bool
    joining: bool = False
    resumed: bool = False
    seed: int = 0


class Job(abc.ABC):
    """What a connection needs of its worker.

    Attributes:
        recorder: Who is told of packing, sending and waiting, if anybody is.
    """

    recorder: Recorder | None = None

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


class ServerConnection(abc.ABC):
    """One server, as a worker sees it.

    Attributes:
        index: Index of the server.
        generation: How often the server has come back. What is known of the server's
            versions is known of one generation only.
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
                        laps.end("wait", what=str(self), until=channel.answered)
                        size = sum(array.nbytes for array in answer.arrays)
                        laps.end("receive", size, str(self))
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
                        errors.CollectiveError(f"{self} broke the protocol: {error}")
                    ) from error
                break
        if answer.frame is FrameType.FAILURE:
            text = str(answer.meta.get("failure", ""))
            raise copy_to_raise(self._job.fail(decode(text)[0]))
        return answer

    @abc.abstractmethod
    def ended(self, reason: str) -> None:
        """The control connection has ended; from the watch's thread."""

    @abc.abstractmethod
    def leave(self, goodbye: Goodbye) -> None:
        """Say goodbye."""

    @abc.abstractmethod
    def abort(self) -> None:
        """End every wait. Safe from any thread."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what is held. Can be called twice."""
