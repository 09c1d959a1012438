"""Steps of training that are measured, if somebody wants to know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kerasdist._keras.hooks import timer_of
from kerasdist._keras.step import setting

__all__ = ["measured", "unmeasured"]


@contextlib.contextmanager
def unmeasured(trainer: Any) -> Iterator[None]:
    """What isn't a step of training stands inside."""
    del trainer
    yield


@contextlib.contextmanager
def measured(trainer: Any) -> Iterator[None]:
    """Steps of training stand inside: they are measured, if somebody wants to know."""
    timer = timer_of(trainer.distribute_strategy)
    if timer is None or not timer.running:
        yield
        return
    timer.enter()
    try:
        # XLA can't compile what reads a clock: then there are none inside of a step.
        with setting(timed=True, compiled=trainer.jit_compile is True):
            yield
    except BaseException:
        timer.leave(0)  # above all where the data have ended
        raise
    timer.leave(int(trainer.steps_per_execution))
