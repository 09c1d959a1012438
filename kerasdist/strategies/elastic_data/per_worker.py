"""Datasets that are each worker's own, in a job whose workers may be lost.

The others can't read a lost worker's data: what it hasn't trained on in this epoch is
skipped, and one line reports that. A dataset that is divided by file is divided among
the present workers at the beginning of each pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerasdist._keras import CountedData, StepTimer
from kerasdist.strategies.data.per_worker import PerWorkerDataset, PerWorkerIterator
from kerasdist.strategies.reduce.workers import Workers


class ElasticOwnData(PerWorkerDataset, CountedData):
    """The iterable for Keras in place of a worker's own distributed dataset.

    Args:
        workers: The connected workers.
        timer: Measures steps, and the time of waiting.
        dataset: The worker's own dataset.

    Attributes:
        divide: Returns the worker's own part of data that all workers have; None: each
            worker has its own in any case.
        tell: Prints a line for the user, given its kind.
    """

    divide: Callable[[], Any] | None = None
    tell: Callable[[str, str], None]

    def __init__(self, workers: Workers, timer: StepTimer, dataset: Any) -> None:
        super().__init__(workers, timer, dataset)
        self._layout = workers.layout
        self._lost = 0

    def __iter__(self) -> PerWorkerIterator:
        if self.divide is not None and self._layout != self._workers.layout:
            self._layout = self._workers.layout
            self._dataset = self.divide()
        self.next_pass()
        return _Pass(self._workers, self._timer, self._dataset, self._report)

    def _report(self, lost: int) -> None:
        self._lost += lost
        text = (
            f"kerasdist: {lost} worker(s) with data of their own were lost; their "
            "batches that are left in this epoch are skipped."
        )
        if self.divide is not None:
            text += " The next epoch's data are divided among the others."
        self.tell(f"lost data {self._lost}", text)


class _Nothing:
    """An optional without a value, of any specification."""

    def has_value(self) -> bool:
        return False


class _Pass(PerWorkerIterator):
    """One pass over all present workers' own datasets."""

    def __init__(
        self,
        workers: Workers,
        timer: StepTimer,
        dataset: Any,
        report: Callable[[int], None],
    ) -> None:
        super().__init__(workers, timer, dataset)
        self._size = workers.size
        self._report = report
        self._paused = False
        # A batch that was read for its form, and not yielded yet.
        self._ahead: Any = None

    def pause(self, paused: bool) -> bool:
        """See `BatchIterator.pause`.

        Data that are divided by file are divided again in the next pass.
        """
        if paused and self._last is None:
            optional = self._iterator.get_next_as_optional()
            if optional.has_value():
                self._ahead, self._last = optional, optional.get_value()
        self._paused = paused or self._by_file is True
        return True

    @property
    def admits(self) -> bool:
        """See `BatchIterator.admits`: the first batch by file is another collective."""
        return self._paused or not self._by_file or self._last is not None

    def _next_own(self) -> Any:
        if self._paused:
            return _Nothing()
        ahead, self._ahead = self._ahead, None
        return super()._next_own() if ahead is None else ahead

    def _fetch(self) -> Any:
        try:
            return super()._fetch()
        finally:
            # At the end of the data, too, of which the lost worker may have had more.
            before, self._size = self._size, self._workers.size
            if self._size < before:
                self._report(before - self._size)
