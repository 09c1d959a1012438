"""The calls of a worker to all servers of its job, for tables and collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.ps.channel.channel import Message
from kerasdist.ps.client.connection import Build
from kerasdist.ps.settings import ServerSettings
from kerasdist.transport.base import Peer
from kerasdist.transport.timeouts import Timeouts
from kerasdist.transport.tracing import Recorder
from kerasdist.transport.wire.framing import Call

__all__ = ["ServerCalls"]


class ServerCalls(Protocol):
    """A worker's calls to its servers, implemented by `ServerClient`.

    Attributes:
        step: The last step, for messages.
        recorder: Gets spans of packing, sending and waiting; or None.
    """

    cluster: Cluster
    settings: ServerSettings
    timeouts: Timeouts
    rank: int
    peers: tuple[Peer, ...]
    recorder: Recorder | None

    @property
    def servers(self) -> int:
        """Number of servers."""

    @property
    def step(self) -> int:
        """The last step, for messages."""

    @step.setter
    def step(self, value: int) -> None: ...

    @property
    def failure(self) -> errors.CollectiveError | None:
        """The error that ended this worker's part in the job, or None."""

    def calling(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Allow one thread at a time to send the block's requests."""

    def request_all(self, builds: Sequence[Build | None]) -> list[Message]:
        """Send a request to each server; return the replies."""

    def generation(self, server: int) -> int:
        """Return the number of the server's restarts."""

    def note_met(self, call: Call, answers: Sequence[Message]) -> None:
        """Note the clocks in the servers' replies to a collective."""

    def fail(self, error: errors.CollectiveError) -> errors.CollectiveError:
        """End all waits of this worker; return its first failure."""

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job."""
