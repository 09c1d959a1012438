"""A deadline across retries and phases, so that nothing waits for ever."""

from __future__ import annotations

import time

_MOST_MILLISECONDS = 2**31 - 1


class Deadline:
    """A moment on the monotonic clock, and the time until then.

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
        """Return the seconds left, never below 0."""
        return max(0.0, self._at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return time.monotonic() >= self._at

    def milliseconds(self) -> int:
        """Return the milliseconds left, rounded up, for `poll`.

        At most `poll`'s limit, 24 days: a longer wait needs several calls.
        """
        return min(int(self.remaining() * 1000.0) + 1, _MOST_MILLISECONDS)
