"""Heartbeats on control connections: one thread per process and role.

    1. both ways, every `heartbeat_interval`: HEARTBEAT
    2. a connection that ends, or is silent for `heartbeat` seconds: the other side is
       lost; `on_end` may post a last frame to it, since it may be frozen and wake up

The failure detector of a ring, the servers and their workers are the users. Data are
sent on other connections, so neither a long transfer nor a busy process is taken for a
lost one. The thread never calls into TensorFlow, so a long step can't stop it.
"""

from __future__ import annotations

import contextlib
import logging
import math
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

__all__ = ["Frame", "Heartbeat"]

_FLUSH_SECONDS = 1.0
_LONGEST_POLL = 3600.0
_NO_CALL = Call(0)

Frame = tuple[FrameType, Call, bytes]


class Heartbeat:
    """Watches control connections from a thread of its own.

    Args:
        name: The thread's.
        timeouts: `heartbeat` is used.
        on_frame: Called with a key and a frame: its type, header and payload.
        on_end: Called once with a key and the reason when a connection has ended. A
            frame that it posts to that key is the last that is sent there.
        beat: Returns payload and header of a heartbeat; by default they are empty.
        tick: Called after each look at the connections, with the time; returns when
            it must be called again at the latest (monotonic).
        on_crash: Called when the thread has failed; by default all connections end.

    All are called from the thread, without any lock.
    """

    def __init__(
        self,
        name: str,
        timeouts: Timeouts,
        on_frame: Callable[[Hashable, Frame], None],
        on_end: Callable[[Hashable, str], None],
        *,
        beat: Callable[[], tuple[bytes, Call]] = lambda: (b"", _NO_CALL),
        tick: Callable[[float], float] = lambda now: math.inf,
        on_crash: Callable[[Exception], None] | None = None,
    ) -> None:
        self._timeouts = timeouts
        self._on_frame = on_frame
        self._on_end = on_end
        self._beat = beat
        self._tick = tick
        self._on_crash = on_crash or self._end_all
        self._lock = threading.Lock()
        self._connections: dict[Hashable, ControlConnection] = {}
        self._ending = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, key: Hashable, connection: Connection) -> None:
        """Watch a connection, owned from now on."""
        with self._lock:
            if self._ending:
                connection.close()
                return
            old = self._connections.get(key)
            self._connections[key] = ControlConnection(connection, time.monotonic())
            if old is not None:
                old.close()
        self.wake()

    def post(
        self, key: Hashable, kind: FrameType, payload: bytes, call: Call = _NO_CALL
    ) -> None:
        """Send a frame soon; nothing happens if the connection has ended."""
        with self._lock:
            control = self._connections.get(key)
            if control is not None:
                control.post(kind, payload, call)
                control.flush()
        self.wake()

    def broadcast(
        self, kind: FrameType, payload: bytes, call: Call, skip: Hashable = None
    ) -> None:
        """Send a frame on all connections soon, but for one."""
        with self._lock:
            for key, control in self._connections.items():
                if key != skip:
                    control.post(kind, payload, call)
                    control.flush()
        self.wake()

    def last_received(self, key: Hashable) -> float | None:
        """Return when a connection's last frame arrived (monotonic); None: no such."""
        with self._lock:
            control = self._connections.get(key)
            return None if control is None else control.received

    def drop(self, key: Hashable) -> None:
        """Stop watching a connection: send what is still queued, and close it."""
        with self._lock:
            control = self._connections.pop(key, None)
            if control is not None:
                control.flush()
                control.close()
        self.wake()

    def wake(self) -> None:
        """Wake the thread, which then handles all connections."""
        # Full: it wakes up anyhow. Closed: it has ended.
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def close(self) -> None:
        """Close all connections and end the thread. Can be called twice."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _FLUSH_SECONDS)
        with self._lock:
            for control in self._connections.values():
                control.close()
            self._connections.clear()
            self._wake.close()
            self._woken.close()
        background_log.flush(_FLUSH_SECONDS)

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            # Without this thread a lost process would go unnoticed.
            _log_failure()
            self._on_crash(error)

    def _end_all(self, error: Exception) -> None:
        with self._lock:
            ended, self._connections = self._connections, {}
        for key, control in ended.items():
            control.close()
            self._on_end(key, f"watching it failed ({type(error).__name__})")

    def _loop(self) -> None:
        interval = self._timeouts.heartbeat_interval
        now = due = ticked = time.monotonic()
        following = math.inf
        while True:
            if now >= due:
                self.broadcast(FrameType.HEARTBEAT, *self._beat())
                due = now + interval
            if not self._wait(min(due, following) - now):
                return
            now = time.monotonic()
            with self._lock:
                controls = list(self._connections.items())
            # A process that was frozen itself must not take the others for lost: it
            # first reads their frames of the meantime.
            if now - ticked > 2 * interval:
                for _, control in controls:
                    control.received = now
            ticked = now
            for key, control in controls:
                self._read(key, control, now)
            following = self._tick(now)

    def _wait(self, seconds: float) -> bool:
        """Wait for events; return False when the thread is to end."""
        poll = select.poll()
        with self._lock:
            if self._woken.fileno() < 0:
                return False  # `close` didn't wait any longer for this thread
            ending = self._ending
            poll.register(self._woken, select.POLLIN)
            for control in self._connections.values():
                control.flush()
                mask = select.POLLIN | (select.POLLOUT if control.waiting else 0)
                poll.register(control.sock, mask)
                silent = control.received + self._timeouts.heartbeat - time.monotonic()
                seconds = min(seconds, silent)
        if ending:
            self._flush_all(time.monotonic() + _FLUSH_SECONDS)
            return False
        poll.poll(int(max(0.0, min(seconds, _LONGEST_POLL)) * 1000) + 1)
        with contextlib.suppress(OSError):  # something else woke us
            self._woken.recv(4096)
        return True

    def _flush_all(self, until: float) -> None:
        """Try to send all queued frames, until a moment."""
        while time.monotonic() < until:
            poll = select.poll()
            with self._lock:
                waiting = [c for c in self._connections.values() if c.waiting]
                for control in waiting:
                    control.flush()
                    poll.register(control.sock, select.POLLOUT)
            if not waiting:
                return
            poll.poll(10)

    def _read(self, key: Hashable, control: ControlConnection, now: float) -> None:
        reason = None
        try:
            with self._lock:
                if self._connections.get(key) is not control:
                    return
                frames = control.frames()
            for frame in frames:
                control.received = now
                self._handle(key, frame)
        except (EOFError, ProtocolError) as error:
            seen = str(error) or "as when a process is killed"
            reason = f"its connection ended ({seen.rstrip('.')})"
        silent = now - control.received
        if reason is None and silent > self._timeouts.heartbeat:
            reason = (
                f"nothing was received from it for {silent:.1f} s (is it "
                "stopped, or its machine or network down?)"
            )
        if reason is None:
            return
        try:
            self._on_end(key, reason)
        finally:
            with self._lock:
                if self._connections.get(key) is control:
                    del self._connections[key]
                control.flush()
                control.close()

    def _handle(self, key: Hashable, frame: Frame) -> None:
        try:
            self._on_frame(key, frame)
        except ProtocolError as error:
            raise EOFError(f"it violated the protocol: {error}") from error
        except Exception as error:
            # Without this thread there are no heartbeats: all would be taken for lost.
            _log_failure()
            raise EOFError(f"{type(error).__name__}: {error}") from error


def _log_failure() -> None:
    message = "kerasdist: watching a connection failed"
    background_log.log(logging.ERROR, message, exc_info=True)
