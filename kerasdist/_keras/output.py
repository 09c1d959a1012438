"""Lines for the user, printed as Keras prints its own."""

from __future__ import annotations

from keras.src.utils import io_utils

__all__ = ["print_line"]


def print_line(line: str) -> None:
    """Print a line as Keras prints its own: to standard output, or to the log."""
    io_utils.print_msg(line)
