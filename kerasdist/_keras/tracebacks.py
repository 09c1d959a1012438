"""Tracebacks with a user's own lines and without kerasdist's between them."""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable
from typing import Any

from kerasdist._tf.patching import Original
from kerasdist.errors import KerasDistError
from kerasdist.transport import log

# Lines for the user, which the chief logs once.


class OnceLogger:
    """Logs lines for the user on the chief, each kind of line once.

    Args:
        rank: Returns this worker's rank, which may change.
    """

    def __init__(self, rank: Callable[[], int]) -> None:
        self._rank = rank
        self._logged: set[str] = set()

    def __call__(self, kind: str, line: str) -> None:
        """Log a line, unless one of its kind was logged."""
        if self._rank() == 0 and kind not in self._logged:
            log.info("%s", line)
        self._logged.add(kind)


def filter_frames(
    original: Original, tb: types.TracebackType | None
) -> types.TracebackType | None:
    """Replace `_process_traceback_frames`: leave out frames of kerasdist, too.

    Keras calls it where it leaves out its own, unless
    `keras.config.disable_traceback_filtering()` was called. The frame in which the
    error was raised stays, because it shows whose error it is.
    """
    if tb is None:
        return None
    last, last_line = list(traceback.walk_tb(tb))[-1]
    kept: types.TracebackType | None = None
    for frame, line in reversed(list(traceback.walk_tb(original(tb)))):
        if not _is_ours(frame) or frame is last:
            kept = types.TracebackType(kept, frame, frame.f_lasti, line)
    # A traceback needs at least one frame.
    return kept or types.TracebackType(None, last, last.f_lasti, last_line)


def show_cause(original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `_symbolic_build`: its error ends in the line that has failed.

    Keras builds a model in a strategy by calling it on shapes, and keeps only the text
    of an error that is raised there, without the line. Errors of kerasdist stay as they
    are.
    """
    try:
        return original(trainer, *args, **kwargs)
    except RuntimeError as error:
        cause = error.__context__
        if cause is None:
            raise
        if isinstance(cause, KerasDistError):
            raise cause from None
        raise error.with_traceback(cause.__traceback__) from cause


def keep_own_error(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Replace `compute_output_spec`: kerasdist's errors keep class and attributes.

    Keras makes an error again, from a message alone, where a layer's `call` ends in it
    while shapes are computed.
    """
    try:
        return original(*args, **kwargs)
    except Exception as error:
        # The direct one only: what a script raises in its place is the script's.
        if isinstance(error.__context__, KerasDistError):
            raise error.__context__ from None
        raise


def _is_ours(frame: types.FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] == "kerasdist"
