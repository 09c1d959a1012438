"""The library's log lines: where they go, and how a blocked reader can't hold them up.

All go to the logger "kerasdist" and its children. An application that has configured
logging decides what becomes of them; for others there is `DefaultHandler`.

`log` writes at once. `log_in_background` is for threads that send heartbeats or hold a
lock: standard error may be a pipe that isn't read at the moment (a pager, a stopped
terminal), and a thread that writes there blocks, so that a healthy process is taken for
a lost one. Its lines go into a queue, and a thread writes them, which runs for as long
as there is something to write. A process that ends waits for it, as for all output.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

# The handler that shows the library's lines where the application has configured none.
#
# It is asked for each line whether another handler gets it: an application may call
# `logging.basicConfig` after the import of this library, and no line may be doubled.

_COLUMNS = 80


def rewrites(stream: TextIO | None) -> bool:
    """Return whether lines can be rewritten there: it is a terminal with a cursor."""
    try:
        return (
            stream is not None
            and stream.isatty()
            and os.environ.get("TERM", "dumb") != "dumb"
        )
    except ValueError:  # it is closed
        return False


class ProgressLine:
    """The text to write for each line, with regard to the one that stands there."""

    def __init__(self) -> None:
        # How many rows of the terminal the present line takes; 0: there is none.
        self._rows = 0

    def text(self, line: str, progress: bool | None, stream: TextIO) -> str:
        """Return what is to be written.

        Args:
            line: The line, without its end.
            progress: True: the next such line replaces this one. False: it ends a
                series of such lines, and replaces the last one. None: neither.
            stream: Where it is written.
        """
        if not rewrites(stream):
            return f"{line}\n"
        # To the begin of the present line, which is erased with all below it.
        erase = f"\x1b[{self._rows - 1}A" if self._rows > 1 else ""
        erase = f"\r{erase}\x1b[J" if self._rows else ""
        if not progress:
            self._rows = 0
            return f"{erase}{line}\n"
        try:
            columns = os.get_terminal_size(stream.fileno()).columns or _COLUMNS
        except (OSError, ValueError):
            columns = _COLUMNS
        rows = [max(1, -(-len(part) // columns)) for part in line.split("\n")]
        self._rows = sum(rows)
        return f"{erase}{line}"


LOGGER = logging.getLogger("kerasdist")
LEVEL_VARIABLE, FORMAT_VARIABLE = "KERASDIST_LOG_LEVEL", "KERASDIST_LOG_FORMAT"
_FORMATS = ("text", "json")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_PREFIX = "kerasdist: "
# The attributes that each record has; the others are fields of the line.
_USUAL = frozenset(
    {
        *logging.LogRecord("", 0, "", 0, "", (), None).__dict__,
        *("message", "asctime", "taskName", "progress"),
    }
)


class DefaultHandler(logging.Handler):
    """Writes lines to the standard error of the moment, unless another handler does.

    A line with the attribute `progress` is rewritten in place on a terminal.

    Attributes:
        as_json: Whether each line is a JSON object.
        task: This process's task, for JSON; empty: unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.as_json = False
        self.task: dict[str, Any] = {}
        self._progress = ProgressLine()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; see `logging.Handler.emit`."""
        stream: TextIO | None = sys.stderr
        if stream is None or is_configured(logging.getLogger(record.name)):
            return
        try:
            if self.as_json:
                stream.write(self._json(record) + "\n")
            else:
                progress = getattr(record, "progress", None)
                stream.write(self._progress.text(self.format(record), progress, stream))
            stream.flush()
        except (OSError, ValueError):
            # It is closed, or isn't read any more: nobody can be told.
            pass
        except Exception:
            self.handleError(record)

    def _json(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record.created),
            "level": record.levelname,
            "logger": record.name,
            **self.task,
            "message": record.getMessage().removeprefix(_PREFIX),
            **{
                name: value
                for name, value in record.__dict__.items()
                if name not in _USUAL
            },
        }
        if record.exc_info:
            text = logging.Formatter().formatException(record.exc_info)
            line["exception"] = text
        return json.dumps(line, default=str)


def _time(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"


def is_configured(logger: logging.Logger) -> bool:
    """Return whether the application has a handler that gets this logger's records."""
    at: logging.Logger | None = logger
    while at is not None:
        if any(
            not isinstance(each, (DefaultHandler, logging.NullHandler))
            for each in at.handlers
        ):
            return True
        at = at.parent if at.propagate else None
    return False


def configure(environ: Mapping[str, str] | None = None) -> None:
    """Give the logger "kerasdist" its handler, once, and the environment's settings.

    A value that can't be used is warned of and ignored: an import isn't the place for
    an error. `kerasdist run` refuses it before anything starts.

    Args:
        environ: The environment; the process's by default.
    """
    environ = os.environ if environ is None else environ
    handler = _handler()
    if handler is None:
        handler = DefaultHandler()
        LOGGER.addHandler(handler)
    handler.as_json = environ.get(FORMAT_VARIABLE, "").strip().lower() == "json"
    number = _number(environ.get(LEVEL_VARIABLE, ""))
    if number is not None:
        LOGGER.setLevel(number)
    for fault in (level_fault(environ), format_fault(environ)):
        if fault is not None:
            LOGGER.warning("kerasdist: %s. It is ignored.", fault)


def _handler() -> DefaultHandler | None:
    found = (each for each in LOGGER.handlers if isinstance(each, DefaultHandler))
    return next(found, None)


def name_task(kind: str, index: int, rank: int | None) -> None:
    """Note which task this process is: lines in JSON name it from now on.

    Args:
        kind: "worker", "chief", "ps" or "evaluator".
        index: Index among the tasks of that type.
        rank: The worker's rank at the start; None for a server.
    """
    handler = _handler()
    if handler is not None:
        ranks = {} if rank is None else {"rank": rank}
        handler.task = {"task": f"{kind} {index}", **ranks}


def rewrites_lines() -> bool:
    """Return whether a line with the attribute `progress` is rewritten in place now."""
    handler = _handler()
    return (
        handler is not None
        and not handler.as_json
        and rewrites(sys.stderr)
        and not is_configured(LOGGER)
    )


def level_fault(environ: Mapping[str, str]) -> str | None:
    """Return what is wrong with `KERASDIST_LOG_LEVEL`; None if nothing is."""
    text = environ.get(LEVEL_VARIABLE, "")
    if not text.strip() or _number(text) is not None:
        return None
    return (
        f"{LEVEL_VARIABLE} isn't a level. Received: {LEVEL_VARIABLE}={text!r}. "
        f"Expected one of {', '.join(_LEVELS)}, or a number from 1 on"
    )


def format_fault(environ: Mapping[str, str]) -> str | None:
    """Return what is wrong with `KERASDIST_LOG_FORMAT`; None if nothing is."""
    text = environ.get(FORMAT_VARIABLE, "")
    if text.strip().lower() in ("", *_FORMATS):
        return None
    return (
        f"{FORMAT_VARIABLE} isn't a format. Received: {FORMAT_VARIABLE}={text!r}. "
        "Expected text or json"
    )


def _number(text: str) -> int | None:
    """Return a level's number; None if there is none, or it can't be used."""
    name = text.strip().upper()
    if name in _LEVELS:
        return int(getattr(logging, name))
    with contextlib.suppress(ValueError):
        return int(name) if int(name) > 0 else None
    return None


# The library's own lines, of any level, for the logger "kerasdist" and its children.
#
# INFO is shown although Python's default is WARNING, as long as neither the application
# nor the user has chosen anything: users are used to these lines.


def log(
    level: int,
    message: str,
    *args: object,
    logger: logging.Logger = LOGGER,
    exc_info: bool = False,
    background: bool = False,
    **fields: Any,
) -> None:
    """Log a line.

    Args:
        level: For instance `logging.INFO`.
        message: As of `Logger.log`.
        *args: As of `Logger.log`.
        logger: "kerasdist", or a child.
        exc_info: Whether to log the exception that is being handled.
        background: Whether another thread writes the line, soon: the call never waits.
        **fields: Attributes of the record, which are fields of a line in JSON.
    """
    if not _is_shown(level, logger):
        return
    caller = sys._getframe(1)
    # Made here: with the time and the thread of its cause.
    record = logger.makeRecord(
        logger.name,
        level,
        caller.f_code.co_filename,
        caller.f_lineno,
        message,
        args,
        sys.exc_info() if exc_info else None,
        caller.f_code.co_name,
        fields,
    )
    if background:
        _QUEUE.put(lambda: logger.handle(record))
    else:
        logger.handle(record)


info = functools.partial(log, logging.INFO)
log_in_background = functools.partial(log, background=True)


def _is_shown(level: int, logger: logging.Logger) -> bool:
    at: logging.Logger | None = logger
    while at is not None and at is not LOGGER.root and at.level == logging.NOTSET:
        at = at.parent
    if at is not LOGGER.root or is_configured(logger):
        return logger.isEnabledFor(level)
    return level >= logging.INFO and level > LOGGER.manager.disable


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
            ended = now - self._began >= self._seconds
            if ended:
                self._began, self._written = now, 0
            self._written += 1
            written = self._written
            if written > self._most:
                self._omitted += 1
        if ended:
            self.flush()
        if written < self._most:
            log_in_background(logging.WARNING, text, *args)
        elif written == self._most:
            more = f" (more such lines are only counted for {self._seconds:g} s)"
            log_in_background(logging.WARNING, f"{text}%s", *args, more)

    def flush(self) -> None:
        """Write how many lines were only counted, if any."""
        with self._lock:
            omitted, self._omitted = self._omitted, 0
        if omitted:
            log_in_background(
                logging.WARNING, "kerasdist: %d more such lines were omitted", omitted
            )


MOST_LINES = 1000


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
