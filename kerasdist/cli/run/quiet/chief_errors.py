"""The chief's standard error, while TensorFlow starts.

    chief ── pipe, or terminal of its own ── pump, without the lines of the start ── 2
      └───── the launcher's own standard error, from its first strategy on

The chief takes the launcher's standard error when its first strategy has been created
(`transport.liveness.launcher_stderr`). From then on nothing stands between its lines
and the user: bars that are redrawn, and the order of output and errors, are as without
a launcher. A process that doesn't create a strategy keeps the way through the pump.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import termios
import tty
from collections.abc import Iterator, Mapping
from typing import IO

from kerasdist.cli.run.output import OutputPump
from kerasdist.cli.run.quiet.start_up_lines import StartUpLines
from kerasdist.transport.liveness.launcher_stderr import stderr_environ

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
