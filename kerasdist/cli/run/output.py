"""The workers' output: tags, logs, and the traceback to show."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import os
import queue
import re
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from kerasdist.cli.run.hosts.agent import open_output
from kerasdist.cli.run.hosts.places import TaskProcess
from kerasdist.cli.run.job_spec import JobSpec
from kerasdist.transport.deadline import Deadline, daemon
from kerasdist.transport.liveness.failure_protocol import FinalError
from kerasdist.transport.liveness.launcher_pipe import stderr_environ

# The lines of TensorFlow's start that its log level doesn't silence, taken out.
#
# Each is known by its source file and its words. Any other line is shown, errors of a
# GPU among them.

# "I0000 00:00:1795460946.405285    7881 ", "2025-01-01 12:00:00.123: I tensorflow/"
# and more of a path.
_BEGIN = (
    r"(?:[IWE]0000 00:00:\d+\.\d+ +\d+ "
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] (?:[\w.]+/)*)"
)
_NO_DRIVER = (
    rf"{_BEGIN}cudart_stub\.cc:\d+\] Could not find cuda drivers on your machine, GPU "
    r"will not be used\."
)
_ALWAYS = (
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written "
    r"to STDERR",
    rf"{_BEGIN}cpu_feature_guard\.cc:\d+\] This TensorFlow binary is optimized .*",
    r"To enable the following instructions: [A-Z0-9_ .]+, in other operations, .*",
    rf"{_BEGIN}port\.cc:\d+\] oneDNN custom operations are on\..*",
    rf"{_BEGIN}cuda_(?:blas|dnn|fft)\.cc:\d+\] Unable to register cu\w+ factory: .*",
    rf"{_BEGIN}computation_placer\.cc:\d+\] computation placer already registered\..*",
    rf"{_BEGIN}py_utils\.cc:\d+\] TF-TRT Warning: Could not find TensorRT",
    _NO_DRIVER,
)
# Of a machine on which there is no driver, or whose user has hidden the GPUs; elsewhere
# it is an error.
_NO_GPU = (
    rf"{_BEGIN}cuda_(?:platform|driver)\.cc:\d+\] failed call to cuInit: "
    r"(?:INTERNAL: CUDA error: Failed call to cuInit: )?"
    r"(?:CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"
    r"|UNKNOWN ERROR \(303\))"
)
_LINE = re.compile("|".join(_ALWAYS))
_DRIVER_LINE, _GPU_LINE = re.compile(_NO_DRIVER), re.compile(_NO_GPU)
# What such a line begins with, for one that isn't complete.
_STARTS = (
    b"WARNING: All log messages",
    b"To enable the following instructions:",
    *(b"%c0000 00:00:" % letter for letter in b"IWE"),
)
_DATED = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] ")
_LEAST = 5
_LONGEST = 4096


class StartUpLines:
    """Takes the lines of TensorFlow's start out of the output of one task.

    All else passes at once, also the begin of a line: a progress bar, a question.

    Args:
        environ: The task's environment.
        then: Cuts what is left; None: it passes.
    """

    def __init__(self, environ: Mapping[str, str], then: Lines | None = None) -> None:
        self._then = then
        self._no_gpu = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        self._pending = b""
        self._in_line = False

    def feed(self, data: bytes, now: float) -> bytes:
        """Add output, and return what is to be shown; see `LineTagger`."""
        shown = self._without_start(data)
        return shown if self._then is None else self._then.feed(shown, now)

    def _without_start(self, data: bytes) -> bytes:
        *lines, rest = (self._pending + data).split(b"\n")
        shown = b"".join(self._line(line + b"\n") for line in lines)
        self._pending = b""
        if self._may_be_one(rest):
            self._pending = rest
            return shown
        self._in_line = self._in_line or bool(rest)
        return shown + rest

    def flush(self) -> bytes:
        """Return what was kept because it might be the begin of such a line."""
        rest, self._pending = self._pending, b""
        shown = self._line(rest) if rest else b""
        if self._then is None:
            return shown
        return (self._then.feed(shown, 0.0) if shown else b"") + self._then.flush()

    def _line(self, line: bytes) -> bytes:
        begun, self._in_line = self._in_line, False
        return b"" if not begun and self._is_of_start(line) else line

    def _is_of_start(self, line: bytes) -> bool:
        text = line.decode(errors="replace").rstrip()
        if _DRIVER_LINE.fullmatch(text):
            self._no_gpu = True
        if self._no_gpu and _GPU_LINE.fullmatch(text):
            return True
        return _LINE.fullmatch(text) is not None

    def _may_be_one(self, rest: bytes) -> bool:
        # TensorFlow writes a line at once. A few letters are somebody else's.
        if self._in_line or not _LEAST <= len(rest) <= _LONGEST or b"\r" in rest:
            return False
        return _DATED.match(rest) is not None or any(
            rest.startswith(start) or start.startswith(rest) for start in _STARTS
        )


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


# The output of an elastic job's present chief, in the place of that of rank 0.
#
# The first chief has the terminal. When another worker becomes the chief, its output is
# shown from where the output of the former chief ended; until then it was only written
# to its log, or shown with its tag.

_MOST_KEPT = 64 * 1024


class RoleLines:
    """Cuts one task's output as its present role requires: see `LineTagger`.

    Only one thread of the pump at a time calls its methods.

    Args:
        tag: The beginning of each line while the worker isn't the chief; None: nothing
            is shown then.
        is_chief: Whether it begins as the chief.
    """

    def __init__(self, tag: bytes | None, *, is_chief: bool) -> None:
        self._tagger = None if tag is None else LineTagger(tag)
        self._is_chief = is_chief
        self._in_line = False
        # Of the chief, and while nothing is shown: the line that isn't finished, or,
        # without a chief, all since then.
        self._kept = b""
        self._keeps_all = False

    def feed(self, data: bytes, now: float) -> bytes:
        """Add output of the worker, and return what is to be shown of it."""
        if self._is_chief:
            return self._show_whole(data)
        if self._tagger is not None:
            return self._tagger.feed(data, now)
        self._kept += data
        if not self._keeps_all:
            end = max(self._kept.rfind(b"\n"), self._kept.rfind(b"\r")) + 1
            self._kept = self._kept[end:]
        self._kept = self._kept[-_MOST_KEPT:]
        return b""

    def flush(self) -> bytes:
        """Return what has no line end yet, if it is to be shown."""
        if self._is_chief:
            kept, self._kept = self._kept, b""
            return self._shown(kept)
        return b"" if self._tagger is None else self._tagger.flush()

    def keep_all(self) -> bytes:
        """Keep what follows, for `begin`: the chief has ended."""
        self._keeps_all = True
        return b""

    def begin(self) -> bytes:
        """Become the chief; return what is to be shown at once."""
        if self._is_chief:
            return b""
        self._is_chief = True
        if self._tagger is not None:
            self._kept = self._tagger.take()
        return self._show_whole(b"")

    def end(self) -> bytes:
        """Be the chief no longer; return the end of the line."""
        if not self._is_chief:
            self._keeps_all = False
            return b""
        rest = self.flush()
        self._is_chief = self._keeps_all = False
        return rest + (b"\n" if self._in_line else b"")

    def _show_whole(self, data: bytes) -> bytes:
        """Return output up to where a line, or a state of a bar, ends.

        Python writes the arguments of one `print` in several pieces: the output is
        kept apart from others' lines.
        """
        data = self._kept + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > _LONGEST_LINE:
            end = len(data)
        self._kept = data[end:]
        return self._shown(data[:end])

    def _shown(self, data: bytes) -> bytes:
        if data:
            self._in_line = not data.endswith(b"\n")
        return data


# What cuts one rank's output into what is shown at once.
Lines = StartUpLines | LineTagger | RoleLines


def open_log(path: Path, *, append: bool) -> IO[bytes]:
    """Open a log file, which may be in a folder that another user can write to.

    Raises:
        OSError: There is something else than a file: no link is followed, and no reader
            of a FIFO is waited for.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        opened = os.open(path, flags, 0o666)
        log = os.fdopen(opened, "ab", buffering=0)
        if not stat.S_ISREG(os.fstat(log.fileno()).st_mode):
            log.close()
            raise OSError(errno.EEXIST, "it isn't a file")
        if not append:
            log.truncate(0)
    except OSError as error:
        raise OSError(
            error.errno,
            f"A task's log can't be written: {error.strerror}. It must be a file of "
            "this user, no link. Remove it, or name another folder with --log-dir",
            str(path),
        ) from error
    return log


class Tail:
    """The end of one rank's output, and the time of its last write.

    Args:
        log: The file that gets all of the output; closed at its end.
    """

    def __init__(self, log: IO[bytes] | None) -> None:
        self._log = log
        self._data = b""
        self._written_at = 0

    def add(self, data: bytes) -> None:
        """Append `data`, also to the log; close that when there is no more."""
        if self._log is not None and not data:
            self._log.close()
        elif self._log is not None:
            with contextlib.suppress(OSError):  # a full disk mustn't end the job
                self._log.write(data)
                self._log.flush()
        self._data = (self._data + data)[-_TAIL_BYTES:]
        self._written_at = time.time_ns() if data else self._written_at

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


@dataclasses.dataclass(kw_only=True, eq=False)
class Started:
    """A started task.

    Attributes:
        task: The task.
        process: Its process.
        incarnation: How many times the task was started before this process.
        tail: The end of its output, if the pump copies that.
        log: The file with its output, if it has one.
        error_file: Takes its last error, if its output is shown at once.
        result_file: Takes what its function returns or raises, if it runs one.
        code: Its exit code when it has ended; negative for a signal.
        ended_at: When it ended, in ns since the epoch.
        ended_by_us: Whether the launcher ended it.
        missed_by: The servers that report that they have lost it: by index, when they
            did (monotonic).
        reason: How it was lost, as server 0 reports.
        lost: Whether the job continues without it.
        replaced: Whether another process has joined with its rank since.
        gave_up: Whether it reported that it ends because of other tasks.
    """

    task: TaskProcess
    process: subprocess.Popen[bytes]
    incarnation: int = 0
    tail: Tail | None
    log: Path | None = None
    error_file: IO[bytes] | None = None
    result_file: IO[bytes] | None = None
    code: int | None = None
    ended_at: int = 0
    ended_by_us: bool = False
    missed_by: dict[int, float] = dataclasses.field(default_factory=dict)
    reason: str = ""
    lost: bool = False
    replaced: bool = False
    gave_up: bool = False

    @property
    def on_terminal(self) -> bool:
        """Whether it is in the launcher's process group, and reads the terminal."""
        return self.task.is_chief and not self.incarnation

    @property
    def final_error(self) -> FinalError | None:
        """The error that ended its script, if the script's process wrote it."""
        if self.error_file is None:
            return None
        self.error_file.seek(0)
        return FinalError.decode(self.error_file.read())

    def evidence(self) -> tuple[str, int]:
        """Return the end of its output, and the last write in ns since the epoch."""
        final = self.final_error
        if final is not None and self.error_file is not None:
            status = os.fstat(self.error_file.fileno())
            return final.text, status.st_mtime_ns
        if self.tail is not None:
            return self.tail.read()
        return ("", 0) if self.log is None else Tail.of_file(self.log)


class OutputPump:
    """Copies the output of several ranks to one descriptor, in whole lines.

    A thread copies each: the reader of our output may stop for a while (a pager), and
    the supervisor mustn't stop with it. The workers do, when their pipes are full, as
    they would without a launcher.

    Args:
        out: Descriptor to write to.
    """

    def __init__(self, out: int) -> None:
        self._out: int | None = out
        self._lock = threading.Lock()
        self._calls: collections.deque[Callable[[], bytes]] = collections.deque()
        self._wake: queue.SimpleQueue[Callable[[], bytes] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._begin(self._run_calls)

    def _begin(self, target: Callable[..., None], *args: object) -> None:
        thread = daemon("kerasdist-output", target, *args)
        self._threads.append(thread)
        thread.start()

    def add(
        self, lines: Lines, source: IO[bytes], log: IO[bytes] | None = None
    ) -> Tail:
        """Add a rank; the pump owns `source` and `log` from now on."""
        tail = Tail(log)
        self._begin(self._copy, lines, source, tail)
        return tail

    def call(self, function: Callable[[], bytes]) -> None:
        """Let a thread call a function, and write what it returns.

        Args:
            function: Is called while no output is being cut; must not wait.
        """
        self._calls.append(function)
        self._wake.put(bytes)

    def finish(self, seconds: float) -> None:
        """Copy the remaining output, then stop; wait for that at most `seconds`."""
        self._wake.put(None)
        deadline = Deadline(seconds)
        for thread in self._threads:
            thread.join(deadline.remaining())

    def _run_calls(self) -> None:
        for nothing in iter(self._wake.get, None):
            self._show(nothing)

    def _copy(self, lines: Lines, source: IO[bytes], tail: Tail) -> None:
        with source:
            while data := _read(source.fileno()):
                # First: what the reader of our output delays is in the log.
                tail.add(data)
                self._show(functools.partial(lines.feed, data, time.monotonic()))
        tail.add(b"")
        self._show(lines.flush)

    def _show(self, cut: Callable[[], bytes]) -> None:
        with self._lock:
            # Calls first: they were made before what has arrived with them is shown.
            while self._calls:
                self._write(self._calls.popleft()())
            self._write(cut())

    def _write(self, data: bytes) -> None:
        while data and self._out is not None:
            try:
                data = data[os.write(self._out, data) :]
            except OSError:
                # The reader has ended (`| head`). The workers mustn't stop for it.
                self._out = None


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # a terminal without processes
        return b""


def window_of(descriptor: int) -> tuple[int, int] | None:
    """Return the lines and columns of a terminal; None if it's something else."""
    if not os.isatty(descriptor):
        return None
    size = os.get_terminal_size(descriptor)
    return size.lines, size.columns


class JobOutput:
    """Shows the output of a job: the present chief's, and others' lines with tags.

    Args:
        job: The job.
        pump: Copies the output of its tasks; None: they write to their logs.

    Attributes:
        chief: Rank of the present chief.
        pump: As given.
    """

    def __init__(self, job: JobSpec, pump: OutputPump | None) -> None:
        self.chief = 0
        self.pump = pump
        self._job = job
        self._errors = OutputPump(2) if job.quiet else None
        self._lines: dict[int, RoleLines] = {}  # by rank

    def lines_of(self, task: TaskProcess) -> Lines:
        """Return what cuts the output of a task that is being started."""
        job = self._job
        tag = f"[{task.tag}] ".encode() if job.tagged else None
        is_chief = not task.is_server and task.index == self.chief
        lines = RoleLines(tag, is_chief=is_chief)
        if not task.is_server:
            self._lines[task.index] = lines
        return StartUpLines(job.environ, lines) if job.quiet else lines

    def _call(self, function: Callable[[], bytes]) -> None:
        if self.pump is not None:
            self.pump.call(function)

    def chief_ended(self) -> None:
        """Keep the others' output until one of them is the chief."""
        for lines in self._lines.values():
            self._call(lines.keep_all)

    def show(self, rank: int) -> None:
        """Show the output of the new chief, instead of the former one's."""
        self.chief = rank
        # The others' first: the former chief's may have to end a line.
        for other, lines in self._lines.items():
            if other != rank:
                self._call(lines.end)
        if rank in self._lines:
            self._call(self._lines[rank].begin)

    # The chief's standard error, while TensorFlow starts.
    #
    #     chief ── pipe, or terminal of its own ── pump, without lines of the start ── 2
    #       └───── the launcher's own standard error, from its first strategy on
    #
    # The chief takes the launcher's standard error when its first strategy has been
    # created (`transport.liveness.launcher_pipe`). From then on nothing stands between
    # its lines and the user: bars that are redrawn, and the order of output and errors,
    # are as without a launcher. A process that doesn't create a strategy keeps the way
    # through the pump.

    @contextlib.contextmanager
    def chief_errors(self) -> Iterator[tuple[int, int, dict[str, str]] | None]:
        """Open the chief's standard error; the launcher's copies close with the block.

        Yields:
            Its descriptor, the further one that the chief inherits, and the variables
            that tell the chief about both; None: it writes to the launcher's.

        Raises:
            OSError: There are too few descriptors.
        """
        if self._errors is None:
            yield None
            return
        with contextlib.ExitStack() as undo:
            reading, writing = open_output(window_of(2))
            source: IO[bytes] = os.fdopen(reading, "rb", buffering=0)
            self._errors.add(StartUpLines(self._job.environ), source)
            undo.callback(os.close, writing)
            real = os.dup(2)
            undo.callback(os.close, real)
            yield writing, real, stderr_environ(real, writing)

    def finish(self, seconds: float) -> None:
        """Copy the rest of each pump's sources, for at most `seconds`."""
        for pump in filter(None, (self.pump, self._errors)):
            pump.finish(seconds)


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
