"""A train function that is measured on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerasdist._keras.context import setting
from kerasdist._keras.protocols import StepTimer

__all__ = ["InstrumentedStep"]


class InstrumentedStep:
    """A train function in up to two kinds: without clocks, and measuring.

    Each is made, and its graph traced, when it's first called.

    This is a hot path (a step can take 1 ms): it uses no context managers.

    Args:
        trainer: The model.
        make: Makes the function.
        timer: Measures steps of training; None for any other steps.
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
        self._made: dict[bool, Callable[[Any], Any]] = {}

    def __call__(self, iterator: Any) -> Any:
        """Take steps on the batches of an iterator."""
        timer = self._timer
        if timer is None or not (timer.running or timer.asked):
            # What XLA has compiled has no clocks inside, and takes long to compile.
            compiled = self._trainer.jit_compile is True
            plain = self._made.get(False) or self._made.get(compiled)
            return (plain or self._get(False))(iterator)
        timer.enter()
        try:
            logs = (self._made.get(True) or self._get(True))(iterator)
        except BaseException:
            timer.leave(0)  # above all where the data have ended
            raise
        timer.leave(int(self._trainer.steps_per_execution))
        return logs

    def _get(self, timed: bool) -> Callable[[Any], Any]:
        if timed not in self._made:
            with setting(timed=timed):
                self._made[timed] = self._make()
        return self._made[timed]
