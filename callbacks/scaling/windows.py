"""When a window of steps ends: after a number of calls that all workers know.

A call is what Keras makes to take a step, or `steps_per_execution` of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kerasdist.strategies.measure.step_times import StepTimes

__all__ = ["Windows"]

# Calls of the first window, if its length is left to us, and the fewest of any other.
_FIRST = 10
# A window is at least so many times what it costs to write one, and at most so long.
_TIMES_COST = 500
_MOST_SECONDS = 5.0
# While a job is young its windows are a part of its age: there is something to see.
_PART_OF_AGE = 20
_NEVER = 1 << 62


class Windows:
    """The windows of one `fit`: how long this one is, and what it has had.

    Lengths depend on nothing but what the chief tells all workers at the end of a
    window, so that the next one ends at the same step everywhere.

    Args:
        update_freq: Steps of a window, "epoch": whoever asks ends it, or "auto".
        steps_per_call: How many steps a call takes.
        now: A clock, in seconds.

    Attributes:
        calls: How many calls this window has had.
    """

    def __init__(
        self,
        update_freq: int | str,
        steps_per_call: int = 1,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.calls = 0
        self._update_freq = update_freq
        self._steps_per_call = steps_per_call
        self._now = now
        self._began = now()
        self._cost = 0.0
        self._length = self._usual()

    @property
    def left(self) -> int:
        """How many calls are missing until this window has had all of them."""
        return max(self._length - self.calls, 0)

    def told(self) -> list[float]:
        """This worker's calls, what a window costs (seconds), its age (seconds)."""
        return [float(self.calls), self._cost, self._now() - self._began]

    def begin(self, times: StepTimes, told: Sequence[float]) -> None:
        """Begin the next window.

        Args:
            times: The chief's, of the window that has ended.
            told: What the chief has `told` at its end.
        """
        self.calls = 0
        calls, cost, age = told
        if self._update_freq != "auto" or not calls or not times.seconds:
            self._length = self._usual()
            return
        seconds = min(_MOST_SECONDS, age / _PART_OF_AGE)
        seconds = max(seconds, _TIMES_COST * cost)
        # All steps that were counted, of which those that were traced aren't a part.
        per_call = times.seconds / max(times.steps / self._steps_per_call, 1.0)
        self._length = max(_FIRST, round(seconds / per_call))

    def cost(self, seconds: float) -> None:
        """Note what the end of a window has taken; an outlier is soon forgotten."""
        self._cost = max(self._cost / 2, seconds)

    def _usual(self) -> int:
        if isinstance(self._update_freq, int):
            return max(1, self._update_freq // self._steps_per_call)
        return _FIRST if self._update_freq == "auto" else _NEVER
