"""The lengths of windows of steps, in calls, which all workers know.

A call is Keras's call of the train function: one step, or `steps_per_execution`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kerasdist.strategies.measure.step_times import StepTimes

# Calls of the first window with "auto", and the fewest of any other.
_FIRST = 10
# A window lasts at least this many times as long as writing it; otherwise at most
# these seconds.
_TIMES_COST = 500
_MOST_SECONDS = 5.0
# While a job is young its windows are a part of its age: there is something to see.
_PART_OF_AGE = 20
_NEVER = 1 << 62


class Windows:
    """The windows of one `fit`: the length of the present one, and its calls so far.

    Lengths only depend on numbers that the chief sends to all workers at the end of a
    window, so that the next one ends at the same step everywhere.

    Args:
        update_freq: Steps of a window; "epoch": the caller ends it; or "auto".
        steps_per_call: The number of steps of a call.
        now: A clock, in seconds.

    Attributes:
        calls: The number of calls in this window so far.
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
        """The number of calls that remain in this window."""
        return max(self._length - self.calls, 0)

    def state(self) -> list[float]:
        """Return this worker's calls, a window's cost and age in seconds."""
        return [float(self.calls), self._cost, self._now() - self._began]

    def begin(self, times: StepTimes, state: Sequence[float]) -> None:
        """Begin the next window.

        Args:
            times: The chief's times of the window that has ended.
            state: The chief's `state` at its end.
        """
        self.calls = 0
        calls, cost, age = state
        if self._update_freq != "auto" or not calls or not times.seconds:
            self._length = self._usual()
            return
        seconds = min(_MOST_SECONDS, age / _PART_OF_AGE)
        seconds = max(seconds, _TIMES_COST * cost)
        # Of the steps that were counted, without those that were traced.
        per_call = times.seconds / max(times.steps / self._steps_per_call, 1.0)
        self._length = max(_FIRST, round(seconds / per_call))

    def cost(self, seconds: float) -> None:
        """Note the duration of a window's end; an outlier is soon forgotten."""
        self._cost = max(self._cost / 2, seconds)

    def _usual(self) -> int:
        if isinstance(self._update_freq, int):
            return max(1, self._update_freq // self._steps_per_call)
        return _FIRST if self._update_freq == "auto" else _NEVER
