"""What a job has lost and goes on without.

A job with asynchronous parameter servers goes on without a worker that was lost. Its
servers say that it is such a job, and whom they have lost (`verdict`); a process that
has ended is seen here. With snapshots it waits for a lost server, too, until somebody
has started that again: whoever keeps the machines, not `kerasdist run`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kerasdist.cli.console import say_soon
from kerasdist.cli.run.outcome import JobOutcome, in_words
from kerasdist.cli.run.spawn import Started

__all__ = ["Losses"]

# How long the process of a worker that the servers have lost may take to end, for its
# code to be told with the loss.
_LET_IT_END = 1.0


class Losses:
    """Notes and tells who was lost while the job goes on.

    Args:
        tasks: All tasks of the job.
        verdict: What they say.

    Attributes:
        over: Whether the job is being ended: then nothing is told any more.
    """

    def __init__(self, tasks: Sequence[Started], verdict: JobOutcome) -> None:
        self._tasks = tasks
        self._verdict = verdict
        self.over = False

    def takes(self, ended: Started) -> bool:
        """A task has ended badly: return whether the job goes on without it."""
        # What was said before it ended is in the pipe.
        self.listen()
        if ended.lost:
            return True
        if not self._goes_on:
            return False
        if ended.task.is_server:
            # One that has raised an error hasn't been lost: it has failed.
            if not self._verdict.patience or not (ended.code and ended.code < 0):
                return False
            ended.lost = True
            say_soon(
                f"{ended.task} was lost: it {in_words(ended.code)}; the workers wait "
                f"{self._verdict.patience:g} s for it to be started again"
            )
        else:
            self._lose(ended)
        return True

    @property
    def _goes_on(self) -> bool:
        return self._verdict.goes_on and not self.over

    def listen(self) -> None:
        """Hear what workers and servers have said since the last time."""
        self._verdict.read()
        for notice in self._verdict.notices():
            found = [
                each
                for each in self._tasks
                if each.task.index == notice.rank and not each.task.is_server
            ]
            for worker in found:
                if notice.kind == "lost":
                    worker.reason, worker.heard_at = notice.reason, time.monotonic()
                    worker.lost = worker.lost and not worker.replaced
                    worker.replaced = False
                elif notice.kind in ("joined", "returned"):
                    worker.reason, worker.heard_at = "", None
                    if worker.lost:
                        worker.replaced = True
                        say_soon(f"{worker.task} has come again")
        for worker in self._tasks:
            if self._to_tell(worker) and (
                worker.code is not None or self._seconds(worker) <= 0
            ):
                self._lose(worker)

    def _to_tell(self, worker: Started) -> bool:
        return self._goes_on and worker.heard_at is not None and not worker.lost

    def _lose(self, worker: Started) -> None:
        worker.lost = True
        why = worker.reason
        if worker.code:
            said = f" ({why})" if worker.code > 0 and why else ""
            why = f"it {in_words(worker.code)}{said}"
        others = any(
            each.code is None and not each.lost and not each.task.is_server
            for each in self._tasks
        )
        rest = "; the others go on" if others else ""
        say_soon(f"{worker.task} was lost: {why}{rest}")

    def next_in(self) -> float | None:
        """Seconds until something is to be told; None: nothing waits for that."""
        return min(
            (
                max(0.0, self._seconds(each))
                for each in self._tasks
                if self._to_tell(each)
            ),
            default=None,
        )

    def _seconds(self, worker: Started) -> float:
        return (worker.heard_at or 0.0) + _LET_IT_END - time.monotonic()

    @property
    def only_lost_workers_running(self) -> bool:
        """Whether the servers have ended, and only lost workers still run."""
        running = [each for each in self._tasks if each.code is None]
        return any(each.task.is_server for each in self._tasks) and all(
            each.lost and not each.task.is_server for each in running
        )
