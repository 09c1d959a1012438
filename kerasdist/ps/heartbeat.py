"""Who is alive: the control connections of a worker, or of a server.

    c: a worker     s: a server     one control connection for each pair of them

    1. both ways, every `heartbeat_interval`: HEARTBEAT
    2. c -> s   GOODBYE   I leave; my script ended well, or with this error
    3. s -> c   EVENT     a worker was lost, has joined, has finished
    4. s -> c   FAILURE   the job's failure
    5. c -> s   NOTICE    an announcement, which the server passes on to other workers
    6. a connection that ends, or is silent for `heartbeat` seconds: the other side is
       lost, and is told so, if it can still hear it

One thread watches all connections of a process. Requests go through other connections,
so neither a long one nor a busy process is taken for a lost one.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Hashable

from kerasdist.errors import ProtocolError
from kerasdist.transport.connection import Connection
from kerasdist.transport.liveness.control_connection import ControlConnection
from kerasdist.transport.log import background_log
from kerasdist.transport.timeouts import Timeouts
from kerasdist.transport.wire.framing import Call, FrameType

__all__ = ["Heartbeat"]

_FLUSH_SECONDS = 1.0
_LONGEST_POLL = 3600.0
_NO_CALL = Call(0)


class Heartbeat:
    """Watches control connections from a thread of its own.

    Args:
        name: Whose connections; for the thread's name.
        timeouts: `heartbeat` is used.
        on_frame: Called with a key, a frame's type and its payload.
        on_end: Called once with a key and what was seen when a connection has ended;
            returns a frame to send as the last word, if it can still be heard, or None.
            Both are called from the watch's thread, without any lock.
    """

    def __init__(
        self,
        name: str,
        timeouts: Timeouts,
        on_frame: Callable[[Hashable, FrameType, bytes], None],
        on_end: Callable[[Hashable, str], tuple[FrameType, bytes] | None],
    ) -> None:
        self._timeouts = timeouts
        self._on_frame = on_frame
        self._on_end = on_end
        self._lock = threading.Lock()
        self._lines: dict[Hashable, ControlConnection] = {}
        self._ending = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(
            target=self._run, name=f"kerasdist-watch {name}", daemon=True
        )
        self._thread.start()

    def add(self, key: Hashable, connection: Connection) -> None:
        """Watch a connection, owned from now on."""
        with self._lock:
            if self._ending:
                connection.close()
                return
            old = self._lines.get(key)
            self._lines[key] = ControlConnection(connection, time.monotonic())
            if old is not None:
                old.close()
        self._nudge()

    def post(self, key: Hashable, kind: FrameType, payload: bytes) -> None:
        """Send a frame soon; to nobody if the connection has ended."""
        with self._lock:
            line = self._lines.get(key)
            if line is not None:
                line.post(kind, payload, _NO_CALL)
                line.flush()
        self._nudge()

    def heard(self, key: Hashable) -> float | None:
        """When something was last heard on a connection (monotonic); None: no such."""
        with self._lock:
            line = self._lines.get(key)
            return None if line is None else line.heard

    def drop(self, key: Hashable) -> None:
        """Watch a connection no longer: send what must still go, and close it."""
        with self._lock:
            line = self._lines.pop(key, None)
            if line is not None:
                line.flush()
                line.close()
        self._nudge()

    def close(self) -> None:
        """Close all connections and end the thread. Can be called twice."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
        self._nudge()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _FLUSH_SECONDS)
        with self._lock:
            for line in self._lines.values():
                line.close()
            self._lines.clear()
            self._wake.close()
            self._woken.close()
        background_log.flush(_FLUSH_SECONDS)

    def _nudge(self) -> None:
        # Full: it wakes up anyhow. Closed: it has ended.
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            # Nobody would be missed any more: end what can't be watched.
            _log_failure()
            with self._lock:
                lines, self._lines = self._lines, {}
            for key, line in lines.items():
                line.close()
                self._on_end(key, f"watching it failed ({type(error).__name__})")

    def _watch(self) -> None:
        interval = self._timeouts.heartbeat_interval
        now = due = ticked = time.monotonic()
        while True:
            if now >= due:
                with self._lock:
                    for line in self._lines.values():
                        line.post(FrameType.HEARTBEAT, b"", _NO_CALL)
                due = now + interval
            if not self._wait(due - now):
                return
            now = time.monotonic()
            # A process that was frozen itself must not blame the others for it: it
            # first reads what they have sent in the meantime.
            if now - ticked > 2 * interval:
                with self._lock:
                    for line in self._lines.values():
                        line.heard = now
            ticked = now
            with self._lock:
                lines = list(self._lines.items())
            for key, line in lines:
                self._read_frame(key, line, now)

    def _wait(self, seconds: float) -> bool:
        poll = select.poll()
        with self._lock:
            if self._woken.fileno() < 0:
                return False
            poll.register(self._woken, select.POLLIN)
            for line in self._lines.values():
                line.flush()
                mask = select.POLLIN | (select.POLLOUT if line.waiting else 0)
                poll.register(line.sock, mask)
                silent = line.heard + self._timeouts.heartbeat - time.monotonic()
                seconds = min(seconds, silent)
            if self._ending:
                return self._flush_all()
        poll.poll(int(max(0.0, min(seconds, _LONGEST_POLL)) * 1000) + 1)
        with contextlib.suppress(OSError):  # something else woke us
            self._woken.recv(4096)
        return True

    def _flush_all(self) -> bool:
        """Give what must still go out a last chance to go; False."""
        until = time.monotonic() + _FLUSH_SECONDS
        while time.monotonic() < until:
            poll = select.poll()
            waiting = [line for line in self._lines.values() if line.waiting]
            for line in waiting:
                line.flush()
                poll.register(line.sock, select.POLLOUT)
            if not waiting:
                break
            poll.poll(10)
        return False

    def _read_frame(self, key: Hashable, line: ControlConnection, now: float) -> None:
        reason = None
        try:
            with self._lock:
                if self._lines.get(key) is not line:
                    return
                frames = line.frames()
            for kind, _, payload in frames:
                line.heard = now
                if kind is not FrameType.HEARTBEAT:
                    self._tell(key, kind, payload)
        except (EOFError, ProtocolError) as error:
            seen = str(error) or "as when a process is killed"
            reason = f"its connection ended ({seen.rstrip('.')})"
        if reason is None and now - line.heard > self._timeouts.heartbeat:
            reason = (
                f"nothing was heard of it for {now - line.heard:.1f} s (is it stopped, "
                "or its machine or network gone?)"
            )
        if reason is None:
            return
        with self._lock:
            if self._lines.get(key) is not line:
                return
            del self._lines[key]
        try:
            last = self._on_end(key, reason)
            if last is not None:
                line.post(*last, _NO_CALL)
                line.flush()
        finally:
            line.close()

    def _tell(self, key: Hashable, kind: FrameType, payload: bytes) -> None:
        try:
            self._on_frame(key, kind, payload)
        except ProtocolError as error:
            raise EOFError(f"it broke the protocol: {error}") from error
        except Exception as error:
            # Without this thread there are no heartbeats: all would be taken for lost.
            _log_failure()
            raise EOFError(f"{type(error).__name__}: {error}") from error


def _log_failure() -> None:
    message = "kerasdist: watching a connection failed"
    background_log.log(logging.ERROR, message, exc_info=True)
