"""The lines of TensorFlow's start that its log level doesn't silence, taken out.

Each is known by its source file and its words. Any other line is shown, errors of a GPU
among them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import termios
import tty
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from kerasdist.cli.run.output import Lines, OutputPump
from kerasdist.transport.liveness.launcher_pipe import stderr_environ

# The chief's standard error, while TensorFlow starts.
#
#     chief ── pipe, or terminal of its own ── pump, without the lines of the start ── 2
#       └───── the launcher's own standard error, from its first strategy on
#
# The chief takes the launcher's standard error when its first strategy has been created
# (`transport.liveness.launcher_pipe`). From then on nothing stands between its lines
# and the user: bars that are redrawn, and the order of output and errors, are as
# without a launcher. A process that doesn't create a strategy keeps the way through the
# pump.

_WINDOW_BYTES = 8


class ChiefErrors:
    """Copies what the chief writes to its standard error at the start.

    Args:
        environ: The chief's environment.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._pump = OutputPump(2)

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[int, int, dict[str, str]]]:
        """Open the chief's standard error; the launcher's copies close with the block.

        Yields:
            Its descriptor, the further one that the chief inherits, and the variables
            that tell the chief about both.

        Raises:
            OSError: There are too few descriptors.
        """
        with contextlib.ExitStack() as undo:
            reading, writing = _terminal() if os.isatty(2) else os.pipe()
            undo.callback(os.close, writing)
            source: IO[bytes] = os.fdopen(reading, "rb", buffering=0)
            with contextlib.ExitStack() as failed:
                failed.callback(source.close)
                real = os.dup(2)
                undo.callback(os.close, real)
                yield writing, real, stderr_environ(real, writing)
                failed.pop_all()
            self._pump.add(StartUpLines(self._environ), source)
            self._pump.start()

    def finish(self, seconds: float) -> None:
        """Copy the rest, for at most `seconds`."""
        self._pump.finish(seconds)


def _terminal() -> tuple[int, int]:
    """Return a terminal that is like the launcher's, and passes all as it is."""
    reading, writing = os.openpty()
    try:
        tty.setraw(writing)
        size = fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(_WINDOW_BYTES))
        fcntl.ioctl(writing, termios.TIOCSWINSZ, size)
    except (OSError, termios.error):
        os.close(reading)
        os.close(writing)
        return os.pipe()
    return reading, writing


# "I0000 00:00:1795460946.405285    7881 ", "2025-01-01 12:00:00.123: I tensorflow/"
# and more of a path.
_BEGIN = (
    r"(?:[IWE]0000 00:00:\d+\.\d+ +\d+ "
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] (?:[\w.]+/)*)"
)
_LIBRARY = r"cu(?:BLAS|DNN|FFT)"
_NO_DRIVER = (
    rf"{_BEGIN}cudart_stub\.cc:\d+\] Could not find cuda drivers on your machine, GPU "
    r"will not be used\."
)
_ALWAYS = (
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written "
    r"to STDERR",
    rf"{_BEGIN}cpu_feature_guard\.cc:\d+\] This TensorFlow binary is optimized to use "
    r"available CPU instructions in performance-critical operations\.",
    r"To enable the following instructions: [A-Z0-9_ .]+, in other operations, rebuild "
    r"TensorFlow with the appropriate compiler flags\.",
    rf"{_BEGIN}port\.cc:\d+\] oneDNN custom operations are on\..*",
    rf"{_BEGIN}cuda_(?:blas|dnn|fft)\.cc:\d+\] Unable to register {_LIBRARY} factory: "
    rf"Attempting to register factory for plugin {_LIBRARY} when one has already been "
    r"registered",
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
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._no_gpu = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        self._pending = b""
        self._in_line = False

    def feed(self, data: bytes, now: float) -> bytes:
        """Add output, and return what is to be shown; see `output.Lines`."""
        del now
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
        return self._line(rest) if rest else b""

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


class QuietLines:
    """Cuts a task's output as others do, without the lines of TensorFlow's start.

    Args:
        parts: What the output passes, the first one first.
    """

    def __init__(self, *parts: Lines) -> None:
        self._parts: Sequence[Lines] = parts

    def feed(self, data: bytes, now: float) -> bytes:
        """See `output.Lines`."""
        for part in self._parts:
            data = part.feed(data, now)
        return data

    def flush(self) -> bytes:
        """See `output.Lines`."""
        shown = b""
        for part in self._parts:
            shown = (part.feed(shown, 0.0) if shown else b"") + part.flush()
        return shown
