"""What is said when all tasks of a job have ended, and the launcher's exit code.

    nothing went wrong                                       0
    the job has failed                                       the code of who is to blame
    it finished without workers that were lost, all of them
        killed from outside, dropped by the servers          0
        one of them ended with an error of its own           that one's code
        the chief is one of them                             the chief's code

A killed worker was preempted: that is what such jobs are for, and there is nothing to
mend. An error of its own is the script's: a missing file on three workers of four would
else be a success with a quarter of the data, which nobody sees who looks at codes. And
what the chief alone writes, the model above all, isn't there without the chief.
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

__all__ = ["Ending", "to_blame"]

# Sent by a person, a system or whoever keeps the machines. What a process sends itself
# when it crashes (SIGSEGV, SIGABRT) is an error of its own.
_FROM_OUTSIDE = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
)


def to_blame(tasks: Sequence[Started], verdict: JobOutcome) -> Started | None:
    """The task that the others blame for the job's failure, if they do."""
    kind, index = "worker", verdict.blamed
    if index is None:
        kind, index = "ps", verdict.blamed_server
    found = (
        each for each in tasks if (each.task.kind, each.task.index) == (kind, index)
    )
    return next(found, None)


class Ending:
    """The end of a job that nobody has broken off.

    Args:
        job: What was to be run.
        tasks: All of its tasks, ended.
        verdict: What they have said.
    """

    def __init__(
        self, job: JobSpec, tasks: Sequence[Started], verdict: JobOutcome
    ) -> None:
        self._job = job
        self._tasks = tasks
        self._verdict = verdict
        self._workers = [each for each in tasks if not each.task.is_server]

    def report(self, *, failed: bool) -> int:
        """Say how the job has ended; return the exit code.

        Args:
            failed: Whether a task has failed without which the job couldn't go on.
        """
        lost = [each for each in self._workers if each.lost and not each.replaced]
        if not failed and lost and len(lost) < len(self._workers):
            return self._finished_without(lost)
        return self._failed()

    # The job went on without some workers.

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
        blamed = chief or own
        return 0 if blamed is None else exit_code(blamed.code or 1)

    def _by_itself(self, worker: Started) -> bool:
        """Whether an error of its own has ended it."""
        if not worker.code or worker.ended_by_us:
            return False
        if worker.code < 0:
            return -worker.code not in _FROM_OUTSIDE
        return worker.task.index not in self._verdict.gave_up

    # The job has failed, or nothing went wrong.

    def _failed(self) -> int:
        failures = []
        # Workers that were lost before aren't why, unless nobody was left.
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
        blamed = to_blame(self._tasks, self._verdict)
        index = None if blamed is None else self._tasks.index(blamed)
        first = first_failure(failures, index)
        if first is None:
            well = all(each.code == 0 or each.lost for each in self._tasks)
            return 0 if well else 1
        failed = shown = self._tasks[first.rank]
        alone = len(self._tasks) == 1
        others = "" if alone else f"; the other {self._job.kinds} were ended"
        say(f"{shown.task} {in_words(first.code)}{others}")
        if blamed is not None and blamed is not shown:
            how = "was lost to the others, and had to be ended"
            if not blamed.ended_by_us:
                how = f"ended with code {blamed.code} while others still needed it"
            say(f"before that, {blamed.task} {how}")
            if last_traceback(blamed.evidence(self._job)[0]):
                shown = blamed
        # What the task has shown itself isn't shown again.
        if not self._has_printed(shown):
            self._show_end(shown)
        if failed is not shown:
            self._say_message(failed, str(failed.task))
        for other in failures:
            # Said because the order of exits may deceive, see `outcome`.
            if other is not first:
                task = self._tasks[other.rank]
                self._say_message(
                    task, f"afterwards {task.task} {in_words(other.code)}"
                )
        return exit_code(first.code)

    def _has_printed(self, task: Started) -> bool:
        """Whether what ended a task stands above already.

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
        """Say of a task how it ended, and the error that wasn't printed."""
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
