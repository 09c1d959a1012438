"""Log lines that foreign processes can cause, limited in number."""

from __future__ import annotations

import logging
import threading
import time

from kerasdist.transport.log.background_log import log


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
