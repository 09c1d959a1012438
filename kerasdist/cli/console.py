"""The launcher's own lines, which go to the logger "kerasdist.run"."""

from __future__ import annotations

import logging

from kerasdist.transport.log import background_log, status

_LOG = logging.getLogger("kerasdist.run")


def print_line(text: str, level: int = logging.INFO) -> None:
    """Log a line to the user, after all that are to be written soon."""
    background_log.flush(None)
    status.log(level, "kerasdist run: %s", text, logger=_LOG)


def print_line_soon(text: str, level: int = logging.INFO) -> None:
    """Log a line while a job is watched: a reader that has stopped delays nothing."""
    background_log.log(level, "kerasdist run: %s", text, logger=_LOG)
