"""The library's own lines, of any level, for the logger "kerasdist" and its children.

INFO is shown although Python's default is WARNING, as long as neither the application
nor the user has chosen anything: users are used to these lines.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from kerasdist.transport.log.default_handler import LOGGER, is_configured


def info(message: str, *args: object, **fields: Any) -> None:
    """Log a line of level INFO, as `log` does."""
    log(logging.INFO, message, *args, **fields)


def log(
    level: int,
    message: str,
    *args: object,
    logger: logging.Logger = LOGGER,
    exc_info: bool = False,
    **fields: Any,
) -> None:
    """Log a line.

    Args:
        level: For instance `logging.INFO`.
        message: As of `Logger.log`.
        *args: As of `Logger.log`.
        logger: "kerasdist", or a child.
        exc_info: Whether to log the exception that is being handled.
        **fields: Attributes of the record, which are fields of a line in JSON.
    """
    record = make_record(level, message, args, logger, fields, exc_info=exc_info)
    if record is not None:
        logger.handle(record)


def make_record(
    level: int,
    message: str,
    args: tuple[object, ...],
    logger: logging.Logger,
    fields: dict[str, Any],
    *,
    exc_info: bool = False,
) -> logging.LogRecord | None:
    """Return the record for `logger.handle`; None if its level isn't to be shown."""
    if not _is_shown(level, logger):
        return None
    # Two frames up is the caller of `log`.
    frame = sys._getframe(2)
    return logger.makeRecord(
        logger.name,
        level,
        frame.f_code.co_filename,
        frame.f_lineno,
        message,
        args,
        sys.exc_info() if exc_info else None,
        frame.f_code.co_name,
        fields,
    )


def _is_shown(level: int, logger: logging.Logger) -> bool:
    at: logging.Logger | None = logger
    while at is not None and at is not LOGGER.root and at.level == logging.NOTSET:
        at = at.parent
    if at is not LOGGER.root or is_configured(logger):
        return logger.isEnabledFor(level)
    return level >= logging.INFO and level > LOGGER.manager.disable
