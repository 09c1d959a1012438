"""A worker's connection to a server in its own process."""

from __future__ import annotations

import threading

from kerasdist import errors
from kerasdist.ps.channel.channel import Channel, memory_pair
from kerasdist.ps.client.connection import JOIN_SECONDS, ServerConnection
from kerasdist.ps.client.job import Job
from kerasdist.ps.membership import WorkerRecord
from kerasdist.ps.server.handler import Goodbye, RequestHandler
from kerasdist.transport.timeouts import Timeouts


class InProcessConnection(ServerConnection):
    """The server of a worker alone, in its own process.

    Args:
        handler: The server.
        worker: This worker.
        timeouts: The time limit of each phase.
        job: This worker's part in the job.
    """

    def __init__(
        self,
        handler: RequestHandler,
        worker: WorkerRecord,
        timeouts: Timeouts,
        job: Job,
    ) -> None:
        super().__init__(job, timeouts)
        self._handler = handler
        self._worker = worker
        self._channel, theirs = memory_pair()
        handler.membership.enter(worker, None)
        if handler.snapshotter is not None:
            handler.snapshotter.start()
        self._thread = threading.Thread(
            target=handler.serve,
            args=(worker, theirs),
            name="kerasdist-server",
            daemon=True,
        )
        self._thread.start()

    def __str__(self) -> str:
        """Return its name in messages."""
        return "the server in this process"

    def _current(self) -> Channel:
        return self._channel

    def _again(self, error: Exception) -> None:
        self._job.check()
        raise errors.TransportClosed("The server in this process was closed.")

    def ended(self, reason: str) -> None:
        """See `ServerConnection.ended`: there is no such connection."""

    def send_goodbye(self, goodbye: Goodbye) -> None:
        """See `ServerConnection.send_goodbye`."""
        self._handler.on_goodbye(self._worker, goodbye)

    def abort(self) -> None:
        """See `ServerConnection.abort`."""
        self._channel.abort()

    def close(self) -> None:
        """See `ServerConnection.close`."""
        self.abort()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
        self._handler.close()
