"""Which calls of the function that takes steps are measured: some, now and then.

    counted   ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ● ●  ...
    warming             ●                             ●
    measured              ● ● ● ● ● ● ●                 ● ● ● ● ● ● ●

The first call of a row is slower than others, as the graph that measures hasn't run for
a while: it warms up. When a row comes is left to chance, so that nothing that happens
every so many steps (a slow batch, a message) is always met, or never; but it's the same
chance on all workers, so that those who take each step together measure the same ones.
"""

from __future__ import annotations

import math
import random

__all__ = ["Sampling", "period"]

_ROW = 8  # calls, with the one that warms up
# A row costs up to a millisecond, most of it while caches are filled for one graph and
# then for the other (benchmarks/board_cost).
_SECONDS = 0.5
# Of steps that take longer all are measured, and there's only one graph.
_LONG = 0.02


def period(seconds: float) -> int:
    """In how many calls there's one row, if each takes so long; 0: all are measured."""
    return 0 if not 0 < seconds < _LONG else math.ceil(_SECONDS / seconds)


class Sampling:
    """Says of each call whether it's measured: all are until it's told otherwise.

    Attributes:
        measured: Whether the present call is.
        warming: Whether one that is measured is so in vain.
    """

    def __init__(self) -> None:
        self.measured, self.warming = True, False
        self._chance = random.Random(0)
        self._period = self._ahead = self._row = 0

    def set(self, calls: int) -> None:
        """From here on there's a row in so many calls, or all are measured if it's 0.

        The next call isn't, if there's time: what comes before it, the end of a window,
        is no part of most steps.
        """
        self._period = calls if calls > _ROW else 0
        self._row = 0
        self._ahead = (
            self._chance.randint(1, self._period - _ROW) if self._period else 0
        )

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
            self._row = _ROW
        self._row -= 1
        if not self._row:
            # On average one row in a period.
            self._ahead = self._chance.randint(0, 2 * (self._period - _ROW))
