"""Lines for the user, printed as Keras prints its own."""

from __future__ import annotations

from collections.abc import Callable

from keras.src.utils import io_utils

__all__ = ["OncePrinter", "print_line"]


def print_line(line: str) -> None:
    """Print a line as Keras prints its own: to standard output, or to the log."""
    io_utils.print_msg(line)


class OncePrinter:
    """Prints lines for the user on the chief, each kind of line once.

    Args:
        rank: Returns this worker's rank, which may change.
    """

    def __init__(self, rank: Callable[[], int]) -> None:
        self._rank = rank
        self._printed: set[str] = set()

    def __call__(self, kind: str, line: str) -> None:
        """Print a line, unless one of its kind was printed."""
        if self._rank() == 0 and kind not in self._printed:
            print_line(line)
        self._printed.add(kind)
