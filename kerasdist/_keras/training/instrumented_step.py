"""A train function that counts its steps, and measures them on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerasdist._keras.context import setting
from kerasdist._keras.protocols import StepTimer


class InstrumentedStep:
    """A train function in up to three kinds: without clocks, counting, and measuring.

    Graphs of training always count their steps, which costs one operation, so that most
    steps run the same graph whether or not they are measured. Another graph also
    measures its steps; it is traced on the first request.

    This is a hot path (a step can take 1 ms): it uses no context managers.

    Args:
        trainer: The model.
        make: Makes the function.
        timer: Measures steps of training; None for any other steps.
        single: Whether a call is one step, whatever `steps_per_execution`.
    """

    def __init__(
        self,
        trainer: Any,
        make: Callable[[], Callable[[Any], Any]],
        timer: StepTimer | None,
        *,
        single: bool = False,
    ) -> None:
        self._trainer = trainer
        self._make = make
        self._timer = timer
        self._single = single
        self._made: dict[bool | None, Callable[[Any], Any]] = {}

    def __call__(self, iterator: Any) -> Any:
        """Take steps on the batches of an iterator."""
        timer = self._timer
        # XLA can't compile an operation that reads a clock, so such a step has none
        # inside. It compiles for so long that there is only one graph.
        compiled = self._trainer.jit_compile is True
        if timer is None or not (timer.running or timer.asked):
            kind = None if timer is None else False
            # A function that measures does as well, and may have been compiled.
            plain = self._made.get(kind) or self._made.get(compiled)
            return (plain or self._get(kind))(iterator)
        timed = timer.enter(always=compiled)
        try:
            logs = (self._made.get(timed) or self._get(timed))(iterator)
        except BaseException:
            timer.leave(0)  # above all where the data have ended
            raise
        several = timed and not self._single
        timer.leave(int(self._trainer.steps_per_execution) if several else 1)
        return logs

    def _get(self, kind: bool | None) -> Callable[[Any], Any]:
        if kind not in self._made:
            with setting(making=kind):
                self._made[kind] = self._make()
        return self._made[kind]
