"""The report when all tasks of a job have ended, and the launcher's exit code.

    nothing went wrong                                       0
    the job failed                                           code of the first failure
    it finished without workers that were lost, all of them
        killed from outside, dropped by the servers          0
        one of them ended with an error of its own           that one's code
        the chief is one of them                             the chief's code

A killed worker was preempted: such jobs are made for that, and nothing has to be
mended. An error of its own is the script's: otherwise a missing file on three workers
of four would be a success with a quarter of the data, invisible in the exit code. And
without the chief, the files that it alone writes are missing, the model above all.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence

from kerasdist.cli.console import say
from kerasdist.cli.run.job import JobSpec
from kerasdist.cli.run.outcome import (
    Failure,
    JobOutcome,
    exit_code,
    first_failure,
    in_words,
)
from kerasdist.cli.run.output import end_of, last_traceback
from kerasdist.cli.run.spawn import Started

__all__ = ["Ending", "reported_cause"]

# Sent by a user, a batch system or an administrator. A signal that a process sends
# itself when it crashes (SIGSEGV, SIGABRT) is an error of its own.
_FROM_OUTSIDE = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
)


def reported_cause(tasks: Sequence[Started], outcome: JobOutcome) -> Started | None:
    """Return the task that the others report as the cause of the failure, if any."""
    kind, index = "worker", outcome.blamed
    if index is None:
        kind, index = "ps", outcome.blamed_server
    found = (
        each for each in tasks if (each.task.kind, each.task.index) == (kind, index)
    )
    return next(found, None)


class Ending:
    """The end of a job that wasn't interrupted.

    Args:
        job: The job's specification.
        tasks: All of its tasks, ended.
        outcome: What they reported.
    """

    def __init__(
        self, job: JobSpec, tasks: Sequence[Started], outcome: JobOutcome
    ) -> None:
        self._job = job
        self._tasks = tasks
        self._outcome = outcome
        self._workers = [each for each in tasks if not each.task.is_server]

    def report(self, *, failed: bool) -> int:
        """Print how the job ended; return the exit code.

        Args:
            failed: Whether a task failed without which the job couldn't continue.
        """
        lost = [each for each in self._workers if each.lost and not each.replaced]
        if not failed and lost and len(lost) < len(self._workers):
            return self._finished_without(lost)
        return self._failed()

    # The job continued without some workers.

    def _finished_without(self, lost: list[Started]) -> int:
        names = " and ".join(str(each.task) for each in lost)
        say(f"the job has finished without {names}")
        chief = next((each for each in lost if each.task.is_chief), None)
        if chief is not None:
            if not self._has_printed(chief):
                self._say_message(chief, str(chief.task))
            say(
                "that was the chief: what it alone writes, the model for instance, "
                "may be missing, so this is no success"
            )
        own = next((each for each in lost if self._by_itself(each)), None)
        if own is not None:
            say(f"{own.task} {in_words(own.code or 0)} by itself: this is no success")
            if not own.task.is_chief:
                self._show_end(own)
        cause = chief or own
        return 0 if cause is None else exit_code(cause.code or 1)

    def _by_itself(self, worker: Started) -> bool:
        """Return whether a worker was ended by an error of its own."""
        if not worker.code or worker.ended_by_us:
            return False
        if worker.code < 0:
            return -worker.code not in _FROM_OUTSIDE
        return worker.task.index not in self._outcome.gave_up

    # The job failed, or nothing went wrong.

    def _failed(self) -> int:
        failures = []
        # Workers that were lost before aren't the cause, unless none was left.
        all_lost = all(each.lost for each in self._workers)
        for number, task in enumerate(self._tasks):
            counts = all_lost or not task.lost or task.task.is_server
            if task.code and not task.ended_by_us and counts:
                text, written_at = task.evidence(self._job)
                failures.append(
                    Failure(
                        rank=number,
                        code=task.code,
                        ended_at=task.ended_at,
                        output=text,
                        written_at=written_at,
                    )
                )
        cause = reported_cause(self._tasks, self._outcome)
        index = None if cause is None else self._tasks.index(cause)
        first = first_failure(failures, index)
        if first is None:
            well = all(each.code == 0 or each.lost for each in self._tasks)
            return 0 if well else 1
        failed = shown = self._tasks[first.rank]
        alone = len(self._tasks) == 1
        others = "" if alone else f"; the other {self._job.kinds} were ended"
        say(f"{shown.task} {in_words(first.code)}{others}")
        if cause is not None and cause is not shown:
            how = "was lost to the others, and had to be ended"
            if not cause.ended_by_us:
                how = f"ended with code {cause.code} while others still needed it"
            say(f"before that, {cause.task} {how}")
            if last_traceback(cause.evidence(self._job)[0]):
                shown = cause
        # An error that the task printed itself isn't printed again.
        if not self._has_printed(shown):
            self._show_end(shown)
        if failed is not shown:
            self._say_message(failed, str(failed.task))
        for other in failures:
            # Listed because the order of exits may deceive, see `outcome`.
            if other is not first:
                task = self._tasks[other.rank]
                self._say_message(
                    task, f"afterwards {task.task} {in_words(other.code)}"
                )
        return exit_code(first.code)

    def _has_printed(self, task: Started) -> bool:
        """Return whether the error that ended a task was printed already.

        The chief prints its own error, unless that only follows from another task's.
        Where all ranks raise one error, the chief's is enough.
        """
        chief = self._tasks[0].final_error
        if task.task.is_chief:
            return chief is None or not chief.consequence
        if chief is None or chief.consequence:
            return False
        final = task.final_error
        ends = task.evidence(self._job)[0].rstrip() if final is None else final.message
        if not ends.endswith(chief.message):
            return False
        say(f"{task.task} ended with the error of rank 0, which stands above")
        return True

    def _say_message(self, task: Started, begin: str) -> None:
        """Print how a task ended, and its error if that wasn't printed."""
        final = task.final_error
        hidden = final is not None and final.consequence
        message = "" if final is None or not hidden else final.message.splitlines()[0]
        say(f"{begin}: {message}" if message else begin)

    def _show_end(self, task: Started) -> None:
        output, log = task.evidence(self._job)[0], self._job.log(task.task)
        whose = f"the end of {task.task}'s output:"
        if last_traceback(output) is None:
            left = whose if output.strip() else "and no output"
            whose = f"{task.task} left no traceback; {left}"
        say(whose)
        shown = end_of(output)
        if shown:
            print(shown, file=sys.stderr, flush=True)
        if log is not None:
            say(f"all of its output: {shlex.quote(str(log))}")
