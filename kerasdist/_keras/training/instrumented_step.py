"""Calls that take steps of training: counted and measured, if that's of interest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerasdist._keras.context import setting
from kerasdist._keras.protocols import StepTimer

__all__ = ["InstrumentedStep"]


class InstrumentedStep:
    """The function that takes steps, as Keras makes it: as many as there are kinds.

    Graphs of training count their steps, always: that's one operation, and so most
    steps run the same graph whether or not anybody wants to know. Another graph
    measures its steps, too, and is traced when somebody asks.

    What stands here is done in each step, which may last a millisecond: no context
    managers.

    Args:
        trainer: The model.
        make: Makes the function.
        timer: Measures steps of training; None: these are others.
    """

    def __init__(
        self,
        trainer: Any,
        make: Callable[[], Callable[[Any], Any]],
        timer: StepTimer | None,
    ) -> None:
        self._trainer = trainer
        self._make = make
        self._timer = timer
        self._made: dict[bool | None, Callable[[Any], Any]] = {}

    def __call__(self, iterator: Any) -> Any:
        """Take steps on what an iterator has."""
        timer = self._timer
        # XLA can't compile what reads a clock: then there are none inside of a step.
        # And it takes so long to compile that one graph must do.
        compiled = self._trainer.jit_compile is True
        if timer is None or not (timer.running or timer.asked):
            kind = None if timer is None else False
            # One that measures is as good, and may have been compiled.
            plain = self._made.get(kind) or self._made.get(compiled)
            return (plain or self._get(kind))(iterator)
        timed = timer.enter(always=compiled)
        try:
            logs = (self._made.get(timed) or self._get(timed))(iterator)
        except BaseException:
            timer.leave(0)  # above all where the data have ended
            raise
        timer.leave(int(self._trainer.steps_per_execution) if timed else 1)
        return logs

    def _get(self, kind: bool | None) -> Callable[[Any], Any]:
        if kind not in self._made:
            with setting(making=kind):
                self._made[kind] = self._make()
        return self._made[kind]
