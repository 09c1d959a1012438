"""All connections of a worker to its servers, used as one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kerasdist.ps.channel.channel import Message
from kerasdist.ps.client.connection import ServerConnection
from kerasdist.ps.client.job import Build
from kerasdist.ps.server.handler import Goodbye
from kerasdist.transport.wire.framing import Call, FrameType


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
        """See `Job.request_all`."""
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
