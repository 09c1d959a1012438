"""One deadline across retries and phases: nothing waits for ever."""

from __future__ import annotations

import time

__all__ = ["Deadline"]

_MOST_MILLISECONDS = 2**31 - 1


class Deadline:
    """A moment on the monotonic clock, and how far away it is.

    Args:
        seconds: Seconds from now, a finite number >= 0.

    Attributes:
        seconds: The whole span, for error messages.
    """

    __slots__ = ("_at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = float(seconds)
        self._at = time.monotonic() + self.seconds

    def remaining(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return time.monotonic() >= self._at

    def milliseconds(self) -> int:
        """What is left in whole milliseconds, rounded up, for `poll`.

        At most what `poll` takes, 24 days: who waits longer waits again.
        """
        return min(int(self.remaining() * 1000.0) + 1, _MOST_MILLISECONDS)
