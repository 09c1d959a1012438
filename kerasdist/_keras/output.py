"""Lines for the user, which the chief logs once."""

from __future__ import annotations

from collections.abc import Callable

from kerasdist.transport import log


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
