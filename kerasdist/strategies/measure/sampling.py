"""The choice of the calls that are measured: rows of some, at random times.

    counted   ● ● ● ● ●                 ● ● ● ● ● ●                 ● ● ●  ...
    warming             ●                           ●
    measured              ● ● ● ● ● ● ●               ● ● ● ● ● ● ●

The first call of a row is slower than others, because the graph that measures hasn't
run for a while: it warms up. A row begins at random, so that periodic events (a slow
batch, a message) aren't met always or never; but the random numbers are the same on all
workers, so that workers that take each step together measure the same ones.
"""

from __future__ import annotations

import math
import random

# For calls up to this many seconds, the length of a row, including the warm-up. Longer
# calls are all measured: that costs little (benchmarks/board_cost), and a second graph
# of them may take long to trace.
_ROWS = ((0.02, 8), (0.1, 3))
# Seconds from one row to the next. A row costs up to a millisecond, most of it while
# caches are filled for one graph and then for the other (benchmarks/board_cost).
_SECONDS = 0.5
# At most one call in this many is in a row.
_SHARE = 5


def rows_for(seconds: float) -> tuple[int, int]:
    """Return the calls of a row and of a period, for calls that take `seconds`.

    (0, 0) means that all are measured.
    """
    for most, row in _ROWS:
        if 0 < seconds < most:
            return row, max(math.ceil(_SECONDS / seconds), row * _SHARE)
    return 0, 0


class Sampling:
    """Decides for each call whether it's measured; initially all are.

    Attributes:
        measured: Whether the current call is.
        warming: Whether a measured call is a warm-up, and doesn't count.
    """

    def __init__(self) -> None:
        self.measured, self.warming = True, False
        self._chance = random.Random(0)
        # The lengths of a row and a period, calls until the next row, left of this one.
        self._calls = self._period = self._ahead = self._row = 0

    def set(self, row: int, period: int) -> None:
        """Set the number of calls in a row and in a period from here on.

        All calls are measured if a period has no others. Otherwise the next one isn't:
        it is preceded by the end of a window, which is no part of most steps.
        """
        others = period - row
        self._calls, self._period = (row, period) if others > 0 else (0, 0)
        self._row = 0
        self._ahead = self._chance.randint(1, others) if self._period else 0

    def next(self, *, asked: bool = False) -> bool:
        """Begin the next call; `asked` requests its measurement.

        Returns:
            Whether it is measured.
        """
        before = self.measured
        if self._ahead:
            self._ahead -= 1
            self.measured = False
        else:
            self._choose()
        if asked and not self.measured:
            # After a call that wasn't measured its graph warms up, too.
            self.measured, self.warming = True, not before
        return self.measured

    def _choose(self) -> None:
        self.measured, self.warming = True, False
        if not self._period:
            return
        self.warming = not self._row
        if self.warming:
            self._row = self._calls
        self._row -= 1
        if not self._row:
            # On average one row in a period.
            self._ahead = self._chance.randint(0, 2 * (self._period - self._calls))
