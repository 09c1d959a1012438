"""Steps of training that are measured, if somebody wants to know."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kerasdist._keras.hooks import timer_of
from kerasdist._keras.step import current

__all__ = ["Graphs", "measured", "unmeasured"]


class Graphs:
    """A function of an iterator, and the same for calls that are measured.

    Their graphs differ. What nobody calls is never traced.

    Args:
        make: Makes one.
    """

    def __init__(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        self._make = make
        self._made: dict[bool, Callable[[Any], Any]] = {}

    def get(self, timed: bool) -> Callable[[Any], Any]:
        """The function; for calls that are measured, if `timed`."""
        if timed not in self._made:
            self._made[timed] = self._make()
        return self._made[timed]


@contextlib.contextmanager
def unmeasured(trainer: Any) -> Iterator[bool]:
    """What isn't a step of training stands inside."""
    del trainer
    yield False


@contextlib.contextmanager
def measured(trainer: Any) -> Iterator[bool]:
    """Steps of training stand inside: they are counted, if somebody wants to know.

    Yields whether they are measured, too.
    """
    timer = timer_of(trainer.distribute_strategy)
    if timer is None or not (timer.running or timer.asked):
        yield False
        return
    # XLA can't compile what reads a clock: then there are none inside of a step. And
    # it takes so long to compile that one graph must do.
    compiled = trainer.jit_compile is True
    timed = timer.enter(always=compiled)
    # Not `setting`: this is done in each step.
    before = current.counted, current.timed, current.compiled
    current.counted, current.timed = True, timed
    current.compiled = compiled
    try:
        yield timed
    except BaseException:
        timer.leave(0)  # above all where the data have ended
        raise
    finally:
        current.counted, current.timed, current.compiled = before
    timer.leave(int(trainer.steps_per_execution))
