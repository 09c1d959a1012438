"""A line on a terminal that is rewritten in place while something goes on."""

from __future__ import annotations

import os
from typing import TextIO

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
