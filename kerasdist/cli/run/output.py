"""The workers' output: tags, logs, and the traceback to show."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import selectors
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

_TAIL_BYTES = 256 * 1024
_LONGEST_LINE = 64 * 1024
_PROGRESS_SECONDS = 5.0
_MOST_LINES = 200
_LINES_WITHOUT_TRACEBACK = 20

_TRACEBACK = re.compile(
    r"^(?:[ +|]*)(?:Exception Group )?Traceback \(most recent call last\):", re.M
)
_CHAINED = re.compile(
    r"(?:The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:)\s*\Z"
)


class Lines(Protocol):
    """Cuts one rank's output into what is shown at once."""

    def feed(self, data: bytes, now: float) -> bytes:
        """Add output of the rank, and return what is to be shown, maybe nothing.

        Args:
            data: Any part of the output.
            now: The monotonic time in seconds.
        """
        ...

    def flush(self) -> bytes:
        """Return what is still to be shown when the output ends."""
        ...


class LineTagger:
    """Cuts one rank's output into lines and puts a tag before each.

    Progress bars write their line again and again with carriage returns. Of a finished
    line only the last state is kept, as a terminal would show it; of a line that isn't
    finished a state is shown every few seconds.

    Args:
        tag: The beginning of each line, e.g. `b"[1] "`.
    """

    def __init__(self, tag: bytes) -> None:
        self._tag = tag
        self._pending = b""
        self._shown_at: float | None = None

    def feed(self, data: bytes, now: float) -> bytes:
        """Add output of the rank and return whole tagged lines, maybe none.

        Args:
            data: Any part of the output.
            now: The monotonic time in seconds.
        """
        *lines, pending = (self._pending + data).split(b"\n")
        result = b"".join(self._line(line) for line in lines)
        if lines:
            self._shown_at = None
        if b"\r" in pending:
            # The states before the last one have been written over.
            body = pending.rstrip(b"\r")
            start = body.rfind(b"\r")
            pending = pending[max(start, 0) :]
            if self._shown_at is None:
                self._shown_at = now
            elif now - self._shown_at >= _PROGRESS_SECONDS:
                self._shown_at = now
                result += self._line(pending)
        if len(pending) > _LONGEST_LINE:
            result += self._line(pending)
            pending = b""
        self._pending = pending
        return result

    def flush(self) -> bytes:
        """Return what has no line end yet, as a line."""
        pending = self.take()
        return self._line(pending) if pending else b""

    def take(self) -> bytes:
        """Return what has no line end yet, as the rank wrote it."""
        pending, self._pending = self._pending, b""
        return pending

    def _line(self, line: bytes) -> bytes:
        states = line.rstrip(b"\r")
        shown = states.rpartition(b"\r")[2].lstrip(b"\b")
        if b"\r" in states and not shown.strip():
            return b""  # a bar that was wiped out
        return (self._tag + shown if shown else self._tag.rstrip()) + b"\n"


class WholeLines:
    """Cuts one rank's output only where a line, or a state of a bar, ends.

    It keeps the output of a rank without tags apart from others' lines: Python writes
    the arguments of one `print` in several pieces.
    """

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes, now: float) -> bytes:
        """Add output of the rank and return complete lines; see `LineTagger`."""
        del now
        data = self._pending + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > _LONGEST_LINE:
            end = len(data)
        self._pending = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        """Return what has no line end yet."""
        pending, self._pending = self._pending, b""
        return pending


class Tail:
    """The end of one rank's output, and the time of its last write."""

    def __init__(self) -> None:
        self._data = b""
        self._written_at = 0

    def add(self, data: bytes) -> None:
        """Append `data`."""
        self._data = (self._data + data)[-_TAIL_BYTES:]
        self._written_at = time.time_ns()

    def read(self) -> tuple[str, int]:
        """Return the text, and the time of the last write, in ns since the epoch."""
        return self._data.decode(errors="replace"), self._written_at

    @staticmethod
    def of_file(path: Path) -> tuple[str, int]:
        """Return the end of a log and its time; `("", 0)` if it can't be read."""
        try:
            with path.open("rb") as log:
                status = os.fstat(log.fileno())
                log.seek(max(0, status.st_size - _TAIL_BYTES))
                return log.read().decode(errors="replace"), status.st_mtime_ns
        except OSError:
            return "", 0


class OutputPump:
    """Copies the output of several ranks to one descriptor, in whole lines.

    It runs in a thread of its own: the reader of our output may stop for a while (a
    pager), and the supervisor mustn't stop with it. The workers do, when their pipes
    are full, as they would without a launcher.

    Args:
        out: Descriptor to write to.
    """

    def __init__(self, out: int) -> None:
        self._out: int | None = out
        self._selector = selectors.DefaultSelector()
        self._calls: collections.deque[Callable[[float], bytes]] = collections.deque()
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._thread = threading.Thread(
            target=self._run, name="kerasdist-output", daemon=True
        )

    def add(
        self, lines: Lines, source: IO[bytes], log: IO[bytes] | None = None
    ) -> Tail:
        """Add a rank; the pump owns `source` and `log` from now on."""
        tail = Tail()
        os.set_blocking(source.fileno(), False)

        def register(now: float) -> bytes:
            del now
            data = (source, lines, tail, log)
            self._selector.register(source, selectors.EVENT_READ, data)
            return b""

        self.call(register)
        return tail

    def call(self, function: Callable[[float], bytes]) -> None:
        """Let the pump's thread call a function, and write what it returns.

        Args:
            function: Is called with the monotonic time; must not wait.
        """
        self._calls.append(function)
        # If the pipe is full, the thread has to look already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._woken, b"c")

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Copy the remaining output, then stop; wait for that at most `seconds`."""
        if self._thread.is_alive():
            os.close(self._woken)
            self._thread.join(seconds)

    def _run(self) -> None:
        ending = False
        while self._selector.get_map():
            events = self._selector.select(0 if ending else None)
            if ending and not events:
                break
            # Calls first: they were made before what has arrived with them is shown.
            events.sort(key=lambda event: event[0].data is not None)
            for key, _ in events:
                if key.data is None:
                    if not os.read(self._wake, 512):
                        ending = True
                        self._selector.unregister(self._wake)
                    while self._calls:
                        self._write(self._calls.popleft()(time.monotonic()))
                else:
                    self._copy(*key.data)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._write(key.data[1].flush())

    def _copy(
        self,
        source: IO[bytes],
        lines: Lines,
        tail: Tail,
        log: IO[bytes] | None,
    ) -> None:
        try:
            data = os.read(source.fileno(), 65536)
        except BlockingIOError:
            return
        except OSError:  # a terminal without processes
            data = b""
        if data:
            tail.add(data)
            if log is not None:
                with contextlib.suppress(OSError):  # a full disk mustn't end the job
                    log.write(data)
                    log.flush()
            self._write(lines.feed(data, time.monotonic()))
            return
        self._selector.unregister(source)
        self._write(lines.flush())
        source.close()
        if log is not None:
            log.close()

    def _write(self, data: bytes) -> None:
        while data and self._out is not None:
            try:
                data = data[os.write(self._out, data) :]
            except OSError:
                # The reader has ended (`| head`). The workers mustn't stop for it.
                self._out = None


def last_traceback(text: str) -> str | None:
    """Return the last traceback of an output, with those that it is chained to.

    Args:
        text: A rank's output, or its end.
    """
    starts = [match.start() for match in _TRACEBACK.finditer(text)]
    if not starts:
        return None
    first = starts.pop()
    while starts and _CHAINED.search(text, starts[-1], first):
        first = starts.pop()
    return text[first:].rstrip()


def end_of(text: str) -> str:
    """Return the part of a failed rank's output to show: traceback or last lines."""
    traceback = last_traceback(text)
    lines = (text.rstrip() if traceback is None else traceback).splitlines()
    if traceback is None:
        return "\n".join(lines[-_LINES_WITHOUT_TRACEBACK:])
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        left_out = len(lines) - 2 * half
        lines = [*lines[:half], f"  [... {left_out} lines]", *lines[-half:]]
    return "\n".join(lines)
