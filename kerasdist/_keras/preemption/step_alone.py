"""The train function of a job of one worker, which the next start may continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kerasdist._keras.context import current
from kerasdist._keras.data.batches import RepeatableIterator
from kerasdist._keras.elastic.batches import is_of_fit
from kerasdist._keras.elastic.continuable import ContinuableStep, summed_metrics
from kerasdist._keras.elastic.metric_totals import MetricTotals
from kerasdist._keras.protocols import KerasHooks


class StepAlone(ContinuableStep):
    """Takes steps as in a job that isn't elastic: none is ever repeated.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        calls: Takes the steps of one execution.
        given: See `ContinuableStep.given`.
        leave: Ends the job; called between two steps with this object, the iterator,
            and the number of the next step in the epoch.
    """

    def __init__(
        self,
        trainer: Any,
        hooks: KerasHooks,
        calls: Callable[[Any], Any],
        given: Callable[[], Sequence[Any]],
        leave: Callable[[StepAlone, Any, int], None],
    ) -> None:
        self._trainer = trainer
        self._communicator = hooks.workers.communicator
        self._calls = calls
        self.given = given
        self._leave = leave
        job: Any = hooks.workers.job
        self._leaving = job.leaving
        self._totals = MetricTotals(list)
        # By the type of an iterator: whether it's one of `fit`, and whether it counts
        # its batches. Asking costs as much as the rest of this module in a step.
        self._kinds: dict[type, tuple[bool, bool]] = {}
        # The steps of this epoch.
        self._taken = 0

    def begin(self) -> None:
        """See `ContinuableStep.begin`."""
        self._taken = 0

    def __call__(self, iterator: Any) -> Any:
        """See `ContinuableStep.__call__`."""
        kind = self._kinds.get(type(iterator))
        if kind is None:
            kind = is_of_fit(iterator), isinstance(iterator, RepeatableIterator)
            self._kinds[type(iterator)] = kind
        if not kind[0]:
            return self._calls(iterator)
        if current.resumed is not None:
            current.resumed()
            current.resumed = None
        if self._leaving.wanted and current.iterator is not None:
            self._leave(self, iterator, self._taken + current.first_step)
        logs = self._calls(iterator)
        # The last execution of a pass may have had fewer; then none follows.
        steps = int(self._trainer.steps_per_execution)
        if kind[1]:
            for _ in range(steps):
                iterator.commit()
        self._taken += steps
        self._communicator.step += steps
        return logs

    def prepare(self, iterator: Any) -> None:
        """See `ContinuableStep.prepare`: no other worker waits."""

    def read_metrics(self, read: Callable[[], Any]) -> Any:
        """See `ContinuableStep.read_metrics`."""
        result = read()
        self._taken = current.first_step = 0
        return result

    def sum_metrics(self) -> tuple[int, list[Any]]:
        """See `ContinuableStep.sum_metrics`."""
        steps = self._taken + current.first_step
        return steps, self._totals.sums(summed_metrics(self._trainer))

    def set_metrics(self, steps: int, sums: Sequence[Any]) -> None:
        """See `ContinuableStep.set_metrics`."""
        self._totals.set(summed_metrics(self._trainer), sums, steps, chief=True)
