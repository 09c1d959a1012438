"""Log lines that are written by a thread of their own, so that nothing waits for them.

Standard error may be a pipe that isn't read at the moment: a pager, a stopped terminal.
A thread that writes there blocks; if it also sends heartbeats, or holds a lock that
others need, a healthy process is taken for a lost one. So lines are put into a queue,
and a thread writes them, which runs for as long as there is something to write. A
process that ends waits for it, as for all of its output.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from kerasdist.transport.log.default_handler import LOGGER
from kerasdist.transport.log.status import make_record

# Log lines that foreign processes can cause, limited in number.


class LimitedLog:
    """Writes warnings, no more than some in each span of time; counts the others.

    Args:
        most: How many lines a span may have.
        seconds: Length of a span.
    """

    def __init__(self, *, most: int = 10, seconds: float = 60.0) -> None:
        self._most = most
        self._seconds = seconds
        self._lock = threading.Lock()
        self._began = -seconds
        self._written = 0
        self._omitted = 0

    def warning(self, text: str, *args: object) -> None:
        """Write a warning, or count it."""
        with self._lock:
            now = time.monotonic()
            omitted = 0
            if now - self._began >= self._seconds:
                omitted, self._omitted = self._omitted, 0
                self._began, self._written = now, 0
            self._written += 1
            written = self._written
            if written > self._most:
                self._omitted += 1
        if omitted:
            self._report(omitted)
        if written < self._most:
            log(logging.WARNING, text, *args)
        elif written == self._most:
            more = f" (more such lines are only counted for {self._seconds:g} s)"
            log(logging.WARNING, f"{text}%s", *args, more)

    def flush(self) -> None:
        """Write how many lines were only counted, if any."""
        with self._lock:
            omitted, self._omitted = self._omitted, 0
        if omitted:
            self._report(omitted)

    def _report(self, omitted: int) -> None:
        log(logging.WARNING, "kerasdist: %d more such lines were omitted", omitted)


MOST_LINES = 1000


def log(
    level: int,
    message: str,
    *args: object,
    logger: logging.Logger = LOGGER,
    exc_info: bool = False,
    **fields: Any,
) -> None:
    """Log a line soon, from another thread. Never waits.

    Args:
        level: For instance `logging.WARNING`.
        message: As of `Logger.log`.
        *args: As of `Logger.log`.
        logger: "kerasdist", or a child.
        exc_info: Whether to log the exception that is being handled.
        **fields: See `status.log`.
    """
    # Made here: with the time and the thread of its cause.
    record = make_record(level, message, args, logger, fields, exc_info=exc_info)
    if record is not None:
        _QUEUE.put(lambda: logger.handle(record))


def flush(seconds: float | None) -> None:
    """Wait until everything is written, at most `seconds`; None: without a limit."""
    _QUEUE.flush(seconds)


class _Queue:
    """The lines that a process still has to write."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop all lines, in a forked child: its parent writes them."""
        self._changed = threading.Condition()
        self._waiting: collections.deque[Callable[[], object]] = collections.deque()
        self._dropped = 0
        self._running = False

    def put(self, write: Callable[[], object]) -> None:
        with self._changed:
            if len(self._waiting) >= MOST_LINES:
                self._dropped += 1
                return
            self._waiting.append(write)
            if self._running:
                return
            self._running = True
        try:
            # No daemon: the last lines often have the reason why the process ends.
            threading.Thread(
                target=self._run, name="kerasdist-log", daemon=False
            ).start()
        except RuntimeError:  # no room for a thread, or the interpreter is ending
            self._run()

    def flush(self, seconds: float | None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._running, seconds)

    def _run(self) -> None:
        while (write := self._next()) is not None:
            # Standard output may be gone or closed.
            with contextlib.suppress(OSError, ValueError):
                write()

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            if self._waiting:
                return self._waiting.popleft()
            dropped, self._dropped = self._dropped, 0
            if not dropped:
                self._running = False
                self._changed.notify_all()
                return None
        return lambda: LOGGER.warning(
            "kerasdist: %d more lines were not written", dropped
        )


_QUEUE = _Queue()
os.register_at_fork(after_in_child=_QUEUE.forget)
