"""The launcher's own lines on standard error."""

from __future__ import annotations

import contextlib
import sys

from kerasdist.transport.log import background_log

__all__ = ["print_line", "print_line_soon"]


def print_line(text: str) -> None:
    """Print a line to the user on standard error, even if it isn't read any more."""
    background_log.flush(None)
    with contextlib.suppress(OSError):
        print(f"kerasdist run: {text}", file=sys.stderr, flush=True)


def print_line_soon(text: str) -> None:
    """Print a line while a job is watched: a reader that has stopped delays nothing."""
    background_log.write_line(f"kerasdist run: {text}", error=True)
