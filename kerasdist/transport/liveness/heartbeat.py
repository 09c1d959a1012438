"""Heartbeats on control connections: one thread per process and role.

    1. both ways, every `heartbeat_interval`: HEARTBEAT
    2. a connection that ends, or is silent for `heartbeat` seconds: the other side is
       lost; `on_end` may post a last frame to it, since it may be frozen and wake up

The failure detector of a ring, the servers and their workers are the users; and the
members of an elastic job, with a time-out without end. Data are sent on other
connections, so neither a long transfer nor a busy process is taken for a lost one. The
thread never calls into TensorFlow, so a long step can't stop it.
It looks only at connections that are ready, and at all of them only when one may have
been silent for too long.
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
from kerasdist.transport import log
from kerasdist.transport.base import Connection
from kerasdist.transport.deadline import Timeouts, daemon
from kerasdist.transport.framing import (
    HEADER_BYTES,
    MAX_CONTROL,
    Call,
    FrameType,
    pack_header,
    unpack_header,
)
from kerasdist.transport.handshake import TAG_BYTES
from kerasdist.transport.tls import holds_bytes

# A non-blocking control connection, with its partly received and queued frames.


class ControlConnection:
    """A control connection that never blocks. Not safe for several threads.

    Args:
        connection: The connection; owned from now on.
        now: The time, on the monotonic clock.

    Attributes:
        sock: The socket.
        received: When the last frame was received.
    """

    def __init__(self, connection: Connection, now: float) -> None:
        connection.sock.setblocking(False)
        self.sock = connection.sock
        self._auth = connection.auth
        self.received = now
        self._inbox = bytearray()
        self._outbox = bytearray()

    @property
    def waiting(self) -> bool:
        """Whether there are queued bytes."""
        return bool(self._outbox)

    def post(self, kind: FrameType, payload: bytes, call: Call) -> None:
        """Queue a frame; `flush` sends it."""
        frame = pack_header(kind, len(payload), call) + payload
        self._outbox += frame + self._auth.sign(frame)

    def flush(self) -> None:
        """Send as much as the kernel takes now. A broken connection takes all."""
        while self._outbox:
            try:
                sent = self.sock.send(self._outbox)
            except BlockingIOError:
                return
            except OSError:  # `frames` raises it
                self._outbox.clear()
                return
            del self._outbox[:sent]

    def frames(self) -> list[tuple[FrameType, Call, bytes]]:
        """Return the frames that were received completely.

        Raises:
            EOFError: The connection is closed; the text has the reason, if known.
            ProtocolError: The bytes aren't a frame, or it isn't authentic.
        """
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(error.strerror or "") from error
        if not data:
            raise EOFError
        self._inbox += data
        frames = []
        while len(self._inbox) >= HEADER_BYTES:
            kind, length, call = unpack_header(self._inbox[:HEADER_BYTES])
            if length > MAX_CONTROL:
                raise ProtocolError(
                    f"A {kind.name} frame is too long. Received: {length} bytes, "
                    f"expected at most {MAX_CONTROL}."
                )
            end = HEADER_BYTES + length
            if len(self._inbox) < end + TAG_BYTES:
                break
            frame = bytes(self._inbox[:end])
            self._auth.check(self._inbox[end : end + TAG_BYTES], frame)
            frames.append((kind, call, frame[HEADER_BYTES:]))
            del self._inbox[: end + TAG_BYTES]
        return frames

    def close(self) -> None:
        """Close the connection; sent frames still arrive."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
            # Closing a socket that holds unread bytes resets the connection, and
            # that could overtake the last frame sent.
            while self.sock.recv(1 << 16):
                pass
        except OSError:  # nothing more to read now, or it is broken
            pass
        self.sock.close()


_FLUSH_SECONDS = 1.0
_LONGEST_POLL = 3600.0
# With more connections than these the frames of some milliseconds are read together:
# a wake-up of the thread costs several times what a frame does.
_MANY, _GATHERING_MS = 64, 25
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
        beat: Returns payload and header of a heartbeat. By default they are empty, and
            `on_frame` doesn't get heartbeats.
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
        beat: Callable[[], tuple[bytes, Call]] | None = None,
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
        # The same by descriptor; and the descriptors of those with queued bytes.
        self._watched: dict[int, tuple[Hashable, ControlConnection]] = {}
        self._blocked: set[int] = set()
        # No connection is silent for too long before this time.
        self._silent = math.inf
        self._ending = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._woken, select.EPOLLIN)
        self._pause = select.poll()
        self._pause.register(self._woken, select.POLLIN)
        self._thread = daemon(name, self._run)
        self._thread.start()

    def add(self, key: Hashable, connection: Connection) -> None:
        """Watch a connection, owned from now on."""
        with self._lock:
            if self._ending:
                connection.close()
                return
            now = time.monotonic()
            self._remove(key)
            self._connections[key] = control = ControlConnection(connection, now)
            self._watched[control.sock.fileno()] = key, control
            self._epoll.register(control.sock, select.EPOLLIN)
            # What was received already isn't reported: look at all connections once.
            late = 0.0 if holds_bytes(control.sock) else self._timeouts.heartbeat
            self._silent = min(self._silent, now + late)
        self.wake()

    def post(
        self, key: Hashable, kind: FrameType, payload: bytes, call: Call = _NO_CALL
    ) -> None:
        """Send a frame soon; nothing happens if the connection has ended."""
        with self._lock:
            control = self._connections.get(key)
            if control is not None:
                control.post(kind, payload, call)
                self._flush(control)

    def broadcast(
        self, kind: FrameType, payload: bytes, call: Call, skip: Hashable = None
    ) -> None:
        """Send a frame on all connections soon, but for one."""
        with self._lock:
            for key, control in self._connections.items():
                if key != skip:
                    control.post(kind, payload, call)
                    self._flush(control)

    def last_received(self, key: Hashable) -> float | None:
        """Return when a connection's last frame arrived (monotonic); None: no such."""
        with self._lock:
            control = self._connections.get(key)
            return None if control is None else control.received

    def drop(self, key: Hashable) -> None:
        """Stop watching a connection: send what is still queued, and close it."""
        with self._lock:
            self._remove(key)

    def wake(self) -> None:
        """Wake the thread."""
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
            self._watched.clear()
            self._wake.close()
            self._woken.close()
            self._epoll.close()
        log.flush(_FLUSH_SECONDS)

    # With the lock.

    def _flush(self, control: ControlConnection) -> None:
        """Send what the kernel takes now; the thread sends the rest."""
        control.flush()
        fd = control.sock.fileno()
        if control.waiting != (fd in self._blocked):
            self._blocked ^= {fd}
            mask = select.EPOLLIN | (select.EPOLLOUT if control.waiting else 0)
            self._epoll.modify(fd, mask)

    def _remove(self, key: Hashable) -> None:
        control = self._connections.pop(key, None)
        if control is not None:
            control.flush()
            fd = control.sock.fileno()
            del self._watched[fd]
            self._blocked.discard(fd)
            # `close` alone isn't enough if a forked child has the socket, too.
            self._epoll.unregister(fd)
            control.close()

    # The thread.

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
                beat = (b"", _NO_CALL) if self._beat is None else self._beat()
                self.broadcast(FrameType.HEARTBEAT, *beat)
                due = now + interval
            controls = self._wait(min(due, following) - now)
            if controls is None:
                return
            now = time.monotonic()
            # A process that was frozen itself must not take the others for lost: it
            # first reads their frames of the meantime.
            if now - ticked > 2 * interval:
                with self._lock:
                    for control in self._connections.values():
                        control.received = now
            ticked = now
            for key, control in controls:
                self._read(key, control, now)
            following = self._tick(now)

    def _wait(self, seconds: float) -> list[tuple[Hashable, ControlConnection]] | None:
        """Wait for events; return the connections to look at, None when it must end."""
        with self._lock:
            if self._epoll.closed:
                return None  # `close` didn't wait any longer for this thread
            ending = self._ending
            seconds = min(seconds, self._silent - time.monotonic())
            most = len(self._watched) + 1
        if ending:
            self._flush_all(time.monotonic() + _FLUSH_SECONDS)
            return None
        # Without heartbeats frames are rare, and don't wait for others.
        if most > _MANY and self._timeouts.heartbeat_interval < _LONGEST_POLL:
            self._pause.poll(_GATHERING_MS)  # `wake` ends it
        try:
            events = self._epoll.poll(max(0.0, min(seconds, _LONGEST_POLL)), most)
        except (OSError, ValueError):  # `close` has closed it since
            return None
        ready = dict(events)
        if self._woken.fileno() in ready:
            with contextlib.suppress(OSError):  # closed
                self._woken.recv(4096)
        with self._lock:
            if time.monotonic() < self._silent:
                return [self._watched[fd] for fd in ready if fd in self._watched]
            received = (c.received for c in self._connections.values())
            self._silent = min(received, default=math.inf) + self._timeouts.heartbeat
            return list(self._connections.items())

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
                self._flush(control)
                frames = control.frames()
            for frame in frames:
                control.received = now
                if self._beat is not None or frame[0] is not FrameType.HEARTBEAT:
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
                    self._remove(key)

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
    log.log_in_background(logging.ERROR, message, exc_info=True)
