"""A worker's connection to a server in its own process."""

from __future__ import annotations

import threading

from kerasdist import errors
from kerasdist.ps.channel.channel import Channel, memory_pair
from kerasdist.ps.client.connection import JOIN_SECONDS, Job, ServerConnection
from kerasdist.ps.server.handler import Goodbye, RequestHandler
from kerasdist.ps.server.membership import WorkerRecord
from kerasdist.transport.timeouts import Timeouts

__all__ = ["InProcessConnection"]


class InProcessConnection(ServerConnection):
    """The server of a worker alone, in its own process.

    Args:
        desk: The server.
        person: This worker.
        timeouts: How long each phase may take.
        job: This worker's part in the job.
    """

    def __init__(
        self, desk: RequestHandler, person: WorkerRecord, timeouts: Timeouts, job: Job
    ) -> None:
        super().__init__(job, timeouts)
        self._desk = desk
        self._person = person
        self._channel, theirs = memory_pair()
        desk.crew.enter(person, None)
        if desk.keeper is not None:
            desk.keeper.start()
        self._thread = threading.Thread(
            target=desk.serve,
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

    def ended(self, reason: str) -> None:
        """See `ServerConnection.ended`: there is no such connection."""

    def leave(self, farewell: Goodbye) -> None:
        """See `ServerConnection.leave`."""
        self._desk.leave(self._person, farewell)

    def abort(self) -> None:
        """See `ServerConnection.abort`."""
        self._channel.abort()

    def close(self) -> None:
        """See `ServerConnection.close`."""
        self.abort()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
        self._desk.close()
