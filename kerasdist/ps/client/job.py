"""A worker's part in a job, as its connections, tables and communicator see it."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.ps.channel.channel import Channel, Message
from kerasdist.ps.progress import Progress
from kerasdist.ps.settings import ServerSettings
from kerasdist.transport.base import Peer
from kerasdist.transport.timeouts import Timeouts
from kerasdist.transport.tracing import Recorder
from kerasdist.transport.wire.framing import Call

# Makes a request, with arrays placed in the channel.
Build = Callable[[Channel], Message]


class Job(abc.ABC):
    """A worker's part in a job, implemented by `ServerClient`.

    Attributes:
        step: The last step, for messages.
        recorder: Gets spans of packing, sending and waiting; or None.
        use: Number of the strategy that uses it, from 1.
    """

    cluster: Cluster
    settings: ServerSettings
    timeouts: Timeouts
    rank: int
    peers: tuple[Peer, ...]
    step: int
    recorder: Recorder | None = None
    use: int = 1

    @property
    @abc.abstractmethod
    def servers(self) -> int:
        """Number of servers."""

    @property
    @abc.abstractmethod
    def failure(self) -> errors.CollectiveError | None:
        """The error that ended this worker's part in the job, or None."""

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Whether it was closed by its user."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise the error that ended this worker's part, if there is one."""

    @abc.abstractmethod
    def fail(self, error: errors.CollectiveError) -> errors.CollectiveError:
        """End all waits of this worker; return its first failure."""

    @abc.abstractmethod
    def await_failure(self, seconds: float) -> errors.CollectiveError | None:
        """Wait a moment for a failure."""

    @abc.abstractmethod
    def progress(self) -> Progress:
        """Return this worker's progress, for a restarted server."""

    @abc.abstractmethod
    def calling(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Allow one call at a time; an interrupted one ends this worker's part."""

    @abc.abstractmethod
    def request_all(self, builds: Sequence[Build | None]) -> list[Message]:
        """Send requests to all servers at once; return their replies, by server.

        Args:
            builds: A request for each server; None: nothing for this one, whose reply
                is then without arrays.

        Raises:
            CollectiveError: This worker's failure.
        """

    @abc.abstractmethod
    def generation(self, server: int) -> int:
        """Return the number of a server's restarts from a snapshot."""

    @abc.abstractmethod
    def note_met(self, call: Call, answers: Sequence[Message]) -> None:
        """Set the clocks at the end of a collective: they are equal again."""

    @abc.abstractmethod
    def close(self, error: BaseException | None = None) -> None:
        """Leave the job; release sockets, threads and memory. Can be called twice.

        Args:
            error: The error that ended this worker's script, if there was one: in
                "sync" the others then fail at once, in "async" they continue.
        """
