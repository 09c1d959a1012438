"""A deadline across retries and phases, so that nothing waits for ever."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")

# An event that also ends waits on sockets.


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


# Threads that may wait for what can't be interrupted: the exit doesn't wait for them.


def daemon(
    name: str, target: Callable[..., object], *arguments: Any
) -> threading.Thread:
    """Return a thread for `target(*arguments)` that doesn't block the exit."""
    return threading.Thread(target=target, args=arguments, name=name, daemon=True)


def in_daemon(
    name: str, target: Callable[..., _Result], *arguments: Any
) -> Future[_Result]:
    """Begin `target(*arguments)` in such a thread, and return its future result."""
    found: Future[_Result] = Future()

    def run() -> None:
        try:
            found.set_result(target(*arguments))
        except BaseException as error:
            found.set_exception(error)

    daemon(name, run).start()
    return found


# The time limits of a job's phases.

# 31 years. The system's calls accept no much longer times.
_MOST_SECONDS = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds that each phase may take. All finite: nothing waits for ever.

    Attributes:
        startup: Until all workers of the job are connected. Machines of a
            cluster start minutes apart, so this is generous.
        collective: Until all ranks have joined one collective and it is done.
            It bounds how far workers may drift apart, e.g. while one of them
            saves a checkpoint. A dead or frozen worker is noticed much earlier.
        heartbeat: Silence after which a worker counts as lost. Heartbeats are
            sent by a thread of their own, several times in this span.
    """

    startup: float = 300.0
    collective: float = 600.0
    heartbeat: float = 30.0

    def __post_init__(self) -> None:
        faults = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), bool)
            or not isinstance(value, (int, float))
            or not 0 < value <= _MOST_SECONDS
        ]
        if faults:
            raise ValueError(
                "Timeouts must be finite numbers of seconds above 0, at most 1e9. "
                f"Received: {', '.join(faults)}. Nothing may wait for ever: to wait "
                "long, pass a large number."
            )

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two heartbeats: four may be lost before the time-out.

        They also report the collective that each rank is in, so at least four fit into
        the time of one collective: the late ranks are known when the time is over.
        """
        return min(self.heartbeat / 5.0, self.collective / 4.0)


_MOST_MILLISECONDS = 2**31 - 1


class Deadline:
    """A moment on the monotonic clock, and the time until then.

    Args:
        seconds: Seconds from now, a finite number >= 0.

    Attributes:
        seconds: The whole span, for error messages.
    """

    __slots__ = ("_at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = float(seconds)
        self._at = time.monotonic() + self.seconds

    def remaining(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self._at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return time.monotonic() >= self._at

    def milliseconds(self) -> int:
        """Return the milliseconds left, rounded up, for `poll`.

        At most `poll`'s limit, 24 days: a longer wait needs several calls.
        """
        return min(int(self.remaining() * 1000.0) + 1, _MOST_MILLISECONDS)
