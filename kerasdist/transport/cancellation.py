"""An event that also ends waits on sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Cancellation(threading.Event):
    """An event; when it is set, sockets that are bound to it are shut down."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._bound: set[socket.socket] = set()

    def set(self) -> None:
        """Set the event for good. A thread that waits on a bound socket returns."""
        super().set()
        with self._lock:
            for sock in self._bound:
                # Not connected yet, or no more: then no thread waits on it for long.
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def bound(self, sock: socket.socket) -> Iterator[None]:
        """Let `set` shut the socket down, inside the block.

        Raises:
            ConnectionAbortedError: The event is set already.
        """
        with self._lock:
            if self.is_set():
                raise ConnectionAbortedError("it was cancelled")
            self._bound.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._bound.discard(sock)
