"""Lost workers and servers that a job continues without.

A job with asynchronous parameter servers continues without a worker that was lost. Its
servers report that it is such a job, and which workers they have lost (`outcome`);
processes that have ended are noticed here. With snapshots the job also waits for a lost
server until that is started again, by an administrator, not by `kerasdist run`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kerasdist.cli.console import say_soon
from kerasdist.cli.run.outcome import JobOutcome, in_words
from kerasdist.cli.run.spawn import Started

__all__ = ["Losses"]

# Seconds that the process of a worker that the servers have lost may take to end, so
# that its exit code is printed with the loss.
_LET_IT_END = 1.0


class Losses:
    """Records and reports lost tasks while the job continues.

    Args:
        tasks: All tasks of the job.
        outcome: What they report.

    Attributes:
        over: Whether the job is being ended: then nothing is reported any more.
    """

    def __init__(self, tasks: Sequence[Started], outcome: JobOutcome) -> None:
        self._tasks = tasks
        self._outcome = outcome
        self.over = False

    def takes(self, ended: Started) -> bool:
        """Return whether the job continues without a task that has ended badly."""
        # Reports that it sent before it ended are in the pipe.
        self.read_reports()
        if ended.lost:
            return True
        if not self._goes_on:
            return False
        if ended.task.is_server:
            # A server that exits with an error has failed; it is not "lost".
            if not self._outcome.patience or not (ended.code and ended.code < 0):
                return False
            ended.lost = True
            say_soon(
                f"{ended.task} was lost: it {in_words(ended.code)}; the workers wait "
                f"{self._outcome.patience:g} s for it to be started again"
            )
        else:
            self._lose(ended)
        return True

    @property
    def _goes_on(self) -> bool:
        return self._outcome.goes_on and not self.over

    def read_reports(self) -> None:
        """Read and print what workers and servers reported since the last call."""
        self._outcome.read()
        for notice in self._outcome.notices():
            found = [
                each
                for each in self._tasks
                if each.task.index == notice.rank and not each.task.is_server
            ]
            for worker in found:
                if notice.kind == "lost":
                    worker.reason, worker.reported_at = notice.reason, time.monotonic()
                    worker.lost = worker.lost and not worker.replaced
                    worker.replaced = False
                elif notice.kind in ("joined", "returned"):
                    worker.reason, worker.reported_at = "", None
                    if worker.lost:
                        worker.replaced = True
                        say_soon(f"{worker.task} joined again")
        for worker in self._tasks:
            if self._is_unreported(worker) and (
                worker.code is not None or self._seconds(worker) <= 0
            ):
                self._lose(worker)

    def _is_unreported(self, worker: Started) -> bool:
        return self._goes_on and worker.reported_at is not None and not worker.lost

    def _lose(self, worker: Started) -> None:
        worker.lost = True
        why = worker.reason
        if worker.code:
            detail = f" ({why})" if worker.code > 0 and why else ""
            why = f"it {in_words(worker.code)}{detail}"
        others = any(
            each.code is None and not each.lost and not each.task.is_server
            for each in self._tasks
        )
        rest = "; the others go on" if others else ""
        say_soon(f"{worker.task} was lost: {why}{rest}")

    def next_in(self) -> float | None:
        """Return the seconds until the next loss is to be printed; None if none is."""
        return min(
            (
                max(0.0, self._seconds(each))
                for each in self._tasks
                if self._is_unreported(each)
            ),
            default=None,
        )

    def _seconds(self, worker: Started) -> float:
        return (worker.reported_at or 0.0) + _LET_IT_END - time.monotonic()

    @property
    def only_lost_workers_running(self) -> bool:
        """Whether the servers have ended, and only lost workers still run."""
        running = [each for each in self._tasks if each.code is None]
        return any(each.task.is_server for each in self._tasks) and all(
            each.lost and not each.task.is_server for each in running
        )
