"""Which calls of the function that takes steps are measured: some, now and then.

    counted   ● ● ● ● ●                 ● ● ● ● ● ●                 ● ● ●  ...
    warming             ●                           ●
    measured              ● ● ● ● ● ● ●               ● ● ● ● ● ● ●

The first call of a row is slower than others, as the graph that measures hasn't run for
a while: it warms up. When a row comes is left to chance, so that nothing that happens
every so many steps (a slow batch, a message) is always met, or never; but it's the same
chance on all workers, so that those who take each step together measure the same ones.
"""

from __future__ import annotations

import math
import random

__all__ = ["Sampling", "rows_for"]

# Calls of a row, with the one that warms up, where calls are this long at most, in
# seconds. Of longer ones all are measured: that costs little (benchmarks/board_cost),
# and another graph of them may take long to trace.
_ROWS = ((0.02, 8), (0.1, 3))
# From one row to the next. One costs up to a millisecond, most of it while caches are
# filled for one graph and then for the other (benchmarks/board_cost).
_SECONDS = 0.5
# At most one call in so many is a row's.
_SHARE = 5


def rows_for(seconds: float) -> tuple[int, int]:
    """How many calls are a row, and in how many there's one, if each takes so long.

    (0, 0): all are measured.
    """
    for most, row in _ROWS:
        if 0 < seconds < most:
            return row, max(math.ceil(_SECONDS / seconds), row * _SHARE)
    return 0, 0


class Sampling:
    """Says of each call whether it's measured: all are until it's told otherwise.

    Attributes:
        measured: Whether the present call is.
        warming: Whether one that is measured is so in vain.
    """

    def __init__(self) -> None:
        self.measured, self.warming = True, False
        self._chance = random.Random(0)
        # Of a row, from one to the next, until the next one, left of this one.
        self._calls = self._period = self._ahead = self._row = 0

    def set(self, row: int, period: int) -> None:
        """From here on there's a row of so many calls in a period of so many.

        All calls are measured if a period has no others. Else the next one isn't: what
        comes before it, the end of a window, is no part of most steps.
        """
        others = period - row
        self._calls, self._period = (row, period) if others > 0 else (0, 0)
        self._row = 0
        self._ahead = self._chance.randint(1, others) if self._period else 0

    def next(self, *, asked: bool = False) -> bool:
        """The next call begins; it's measured in any case if that's asked for.

        Returns:
            Whether it is.
        """
        before = self.measured
        if self._ahead:
            self._ahead -= 1
            self.measured = False
        else:
            self._choose()
        if asked and not self.measured:
            # Behind one that wasn't measured its graph warms up, too.
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
