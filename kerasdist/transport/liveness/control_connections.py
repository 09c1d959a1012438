"""All control connections of a supervisor, and what wakes the thread that serves them.

Any thread may post and nudge; one thread waits for what comes, and sends.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping

from kerasdist.transport.connection import Connection
from kerasdist.transport.liveness.control_connection import ControlConnection
from kerasdist.transport.wire.framing import Call, FrameType

__all__ = ["ControlConnections"]

_LONGEST_POLL = 3600.0


class ControlConnections:
    """The connections, by the rank at the other end.

    Args:
        connections: By rank; owned from now on.
        lock: Held whenever something changes; may be held by the caller already.
    """

    def __init__(
        self, connections: Mapping[int, Connection], lock: threading.Condition
    ) -> None:
        now = time.monotonic()
        self._lines = {
            rank: ControlConnection(each, now) for rank, each in connections.items()
        }
        self._lock = lock
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)

    def __iter__(self) -> Iterator[tuple[int, ControlConnection]]:
        return iter(self._lines.items())

    @property
    def any_open(self) -> bool:
        """Whether more may be heard of anybody."""
        return any(line.open for line in self._lines.values())

    def post(
        self,
        kind: FrameType,
        payload: bytes,
        call: Call,
        skip: int | None = None,
        only: int | None = None,
    ) -> None:
        """Let a frame go out on all that are open, but to one rank, or only to one."""
        with self._lock:
            for rank, line in self._lines.items():
                if rank != skip and only in (None, rank) and line.open:
                    line.post(kind, payload, call)
        self.nudge()

    def nudge(self) -> None:
        """Wake the thread that waits."""
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._wake.send(b"x")

    def heard(self, now: float) -> None:
        """Count all as heard of just now."""
        for line in self._lines.values():
            line.heard = now

    def send(self) -> bool:
        """Send what the kernel takes now; False if all are closed."""
        with self._lock:
            if self._woken.fileno() < 0:
                return False
            for line in self._lines.values():
                line.flush()
        return True

    def wait(self, seconds: float) -> None:
        """Wait until something comes, can be sent, or somebody nudges."""
        poll = select.poll()
        with self._lock:
            if self._woken.fileno() < 0:
                return
            poll.register(self._woken, select.POLLIN)
            for line in self._lines.values():
                if line.open:
                    mask = select.POLLIN | (select.POLLOUT if line.waiting else 0)
                    poll.register(line.sock, mask)
        poll.poll(int(max(0.0, min(seconds, _LONGEST_POLL)) * 1000) + 1)
        with contextlib.suppress(OSError):  # something else woke us
            self._woken.recv(4096)

    def flush(self, until: float) -> None:
        """Give what must still go out a last chance to go, until a moment."""
        while time.monotonic() < until:
            poll = select.poll()
            with self._lock:
                waiting = [line for line in self._lines.values() if line.waiting]
                for line in waiting:
                    line.flush()
                    poll.register(line.sock, select.POLLOUT)
            if not waiting:
                return
            poll.poll(10)

    def close(self) -> None:
        """Close all; what has been sent still arrives."""
        for line in self._lines.values():
            line.close()
        with self._lock:
            self._wake.close()
            self._woken.close()
