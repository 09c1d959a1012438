"""The outcome of a job: its losses, the cause of its failure, and the exit code.

It is decided from what processes report on the launcher's pipe (see
`kerasdist.transport.liveness.launcher_pipe`), from their exits, and from their
outputs.

The first failure. When one rank fails, the others fail because of it, and the processes
don't always end in the order in which they failed: a rank with an exception closes its
connections first; its peers notice that, fail and end at once, while it still tidies
up. So the first of all failures is, in this order,

    1. that of the task which the others reported as the cause
    2. that of a task which didn't report another one as the cause
    3. the earliest, by its last traceback, or else by the end of its process

The losses. A job with asynchronous parameter servers continues without a worker that
was lost. Its servers report that it is such a job, and which workers they have lost;
processes that have ended are noticed here. With snapshots the job also waits for a lost
server until that is started again, by an administrator, not by `kerasdist run`.

The exit code.

    a signal to the launcher ended the job                   128 + its number
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

import logging
import shlex
import signal
import sys
import time
from collections.abc import Sequence

from kerasdist.cli.console import print_line, print_line_soon
from kerasdist.cli.run.output import end_of, last_traceback
from kerasdist.cli.run.processes import ENDING_SIGNALS
from kerasdist.cli.run.spawn import Started
from kerasdist.cli.run.task_processes import JobSpec, TaskProcess
from kerasdist.transport.liveness.launcher_pipe import (
    LauncherPipe,
    Members,
    Notice,
    Report,
)

# The end of one task: how it ended, whose fault that was, and the error to show.

# Sent by a user, a batch system or an administrator. A signal that a process sends
# itself when it crashes (SIGSEGV, SIGABRT) is an error of its own.
_FROM_OUTSIDE = (signal.SIGKILL, *ENDING_SIGNALS)


def how(task: Started) -> str:
    """Return how a task ended, for instance `rank 1 failed with exit code 3`."""
    return f"{task.task} {in_words(task.code or 0)}"


def is_own_error(worker: Started) -> bool:
    """Return whether a worker was ended by an error of its own."""
    if not worker.code or worker.ended_by_us:
        return False
    if worker.code < 0:
        return -worker.code not in _FROM_OUTSIDE
    return not worker.gave_up


def failed_at(task: Started) -> int:
    """Return the estimated time of a task's failure, in ns since the epoch."""
    output, written_at = task.evidence()
    if last_traceback(output) is None:
        return task.ended_at
    return min(task.ended_at, written_at)


def show_end(task: Started, *, with_log: bool = True) -> None:
    """Show the end of a task's output, the traceback if there is one.

    Args:
        task: The task.
        with_log: Whether the path of its log is printed.
    """
    output = task.evidence()[0]
    whose = f"the end of {task.task}'s output:"
    if last_traceback(output) is None:
        left = whose if output.strip() else "and no output"
        whose = f"{task.task} left no traceback; {left}"
    print_line(whose, logging.ERROR)
    shown = end_of(output)
    if shown:
        print(shown, file=sys.stderr, flush=True)
    if with_log and task.log is not None:
        print_line(f"all of its output: {shlex.quote(str(task.log))}", logging.ERROR)


def exit_code(code: int) -> int:
    """Return a code as a shell shows it: 128 + the number for a signal."""
    return 128 - code if code < 0 else code


def in_words(code: int) -> str:
    """Describe how a process with this code (negative for a signal) ended."""
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        name = f"{signal.Signals(-code).name} ({-code})"
    except ValueError:
        name = str(-code)
    hint = ""
    if -code == signal.SIGKILL:
        hint = ", sent by another process, or by the system when memory ran out"
    return f"was ended by signal {name}{hint}"


# Seconds that the process of a worker that the servers have lost may take to end, so
# that its exit code is printed with the loss.
_LET_IT_END = 1.0


class JobOutcome:
    """The facts about a job's end, and the decisions that follow from them.

    Args:
        job: The job's specification.
        tasks: Its tasks; the list may be filled later.

    Attributes:
        tasks: The tasks.
        pipe: The pipe on which the tasks report.
        failed_at: When a task failed without which the job can't continue (monotonic);
            None: none has.
        over: Whether the job is being ended: then nothing is a loss any more.
    """

    def __init__(self, job: JobSpec, tasks: Sequence[Started]) -> None:
        self.pipe = LauncherPipe()
        self.failed_at: float | None = None
        self.over = False
        self._job = job
        self.tasks = tasks
        self._reports: list[Report] = []
        # Servers whose job continues without lost workers, until one reports that it
        # doesn't.
        self._begun: set[int] = set()
        self._can_lose = True
        # Seconds that the workers wait for a lost server; 0: not at all.
        self._patience = 0.0

    @property
    def environ(self) -> dict[str, str]:
        """The variables that name what tasks inherit."""
        return self.pipe.environ

    @property
    def inherited(self) -> tuple[int, ...]:
        """The descriptors that tasks inherit."""
        return (self.pipe.writing,)

    def task(self, kind: str, index: int | None) -> Started | None:
        """Return a task by its kind and index; None if there is none."""
        for each in self.tasks:
            if (each.task.kind, each.task.index) == (kind, index):
                return each
        return None

    # What processes report.

    def read(self) -> None:
        """Read the reports that have arrived, without waiting, and print new losses."""
        for each in self.pipe.read():
            self.take(each)
        for seconds, worker in self._unprinted():
            if not seconds:
                self._lose(worker)

    def take(self, record: Report | Notice | Members) -> None:
        """Take a record that has arrived on the pipe; `Members` change nothing here."""
        if isinstance(record, Report):
            self._take_report(record)
        elif isinstance(record, Notice):
            self._take_notice(record)

    def _take_report(self, report: Report) -> None:
        worker = self.task("worker", report.rank)
        if self.continues and worker is not None and worker.missed_by:
            # For instance, it was frozen, the others continued, and it wakes up.
            worker.gave_up = True
        elif not self.continues or report.rank != report.blames:
            # Servers don't report that another server was lost for good; workers do.
            self._can_lose = False
            self._reports.append(report)

    def _take_notice(self, notice: Notice) -> None:
        if notice.kind == "begun":
            self._begun.add(notice.server)
            self._patience = notice.patience
        elif notice.kind == "failed":
            self._can_lose = False
        elif notice.kind == "gave_up":
            server = self.task("ps", notice.server)
            if server is not None:
                server.gave_up = True
        else:
            worker = self.task("worker", notice.rank)
            if worker is not None:
                self._take_event(worker, notice)

    def _take_event(self, worker: Started, notice: Notice) -> None:
        if notice.kind == "lost":
            worker.missed_by[notice.server] = time.monotonic()
        else:
            worker.missed_by.pop(notice.server, None)
        if notice.server != 0:  # the others report the same, sooner or later
            return
        worker.reason = notice.reason if notice.kind == "lost" else ""
        if notice.kind == "lost":
            worker.lost = worker.lost and not worker.replaced
            worker.replaced = False
        elif notice.kind in ("joined", "returned") and worker.lost:
            worker.replaced = True
            print_line_soon(f"{worker.task} joined again")

    @property
    def continues(self) -> bool:
        """Whether the job continues without lost workers: all servers reported that."""
        return 0 < self._job.servers <= len(self._begun) and self._can_lose

    @property
    def _of_last_job(self) -> list[Report]:
        # Of several jobs the last to fail counts: the script has survived the others.
        return [each for each in self._reports if each.job == self._reports[-1].job]

    @property
    def cause(self) -> Started | None:
        """The task that was reported as the cause of the failure; None if none was."""
        if not self._reports:
            return None
        # Later reports may name a rank that failed because of this one.
        first = self._of_last_job[0]
        if first.blames is None:
            return self.task("ps", first.server)
        return self.task("worker", first.blames)

    def _follows(self, task: Started) -> bool:
        """Return whether a task reported that it failed because of another one."""
        return task.gave_up or any(
            report.names_another and self.task("worker", report.rank) is task
            for report in self._of_last_job
        )

    # Losses, while the job continues.

    def fails_with(self, task: Started) -> bool:
        """Return whether the job fails now, because this task has ended."""
        if task.code == 0 or task.ended_by_us or self.failed_at is not None:
            return False
        # Reports that it sent before it ended are in the pipe.
        self.read()
        if self._continues_without(task):
            return False
        self.failed_at = time.monotonic()
        return True

    def _continues_without(self, task: Started) -> bool:
        if task.lost or self.over or not self.continues:
            return task.lost
        if not task.task.is_server:
            self._lose(task)
        elif self._patience and task.code is not None and task.code < 0:
            task.lost = True
            print_line_soon(
                f"{task.task} was lost: it {in_words(task.code)}; the workers wait "
                f"{self._patience:g} s for it to be started again",
                logging.WARNING,
            )
        # A server that exits with an error has failed; it is not "lost".
        return task.lost

    def _lose(self, worker: Started) -> None:
        worker.lost = True
        why = worker.reason
        if worker.code:
            detail = f" ({why})" if worker.code > 0 and why else ""
            why = f"it {in_words(worker.code)}{detail}"
        others = any(each.code is None and not each.lost for each in self.workers)
        rest = "; the others go on" if others else ""
        print_line_soon(f"{worker.task} was lost: {why}{rest}", logging.WARNING)

    def _unprinted(self) -> list[tuple[float, Started]]:
        """Return the workers whose loss is to be printed, and in how many seconds."""
        if self.over or not self.continues:
            return []
        end = _LET_IT_END - time.monotonic()
        return [
            (max(0.0, each.missed_by[0] + end) if each.code is None else 0.0, each)
            for each in self.tasks
            if 0 in each.missed_by and not each.lost
        ]

    @property
    def restart_pending(self) -> bool:
        """Whether a task is still to be started again: in elastic jobs only."""
        return False

    def take_restarts(self) -> list[Started]:
        """Return the ended tasks that are to be started again now."""
        return []

    def take_growth(self) -> TaskProcess | Started | None:
        """Return the task that is to be added, or started again: in elastic jobs."""
        return None

    def next_in(self) -> float | None:
        """Return the seconds until the next loss is to be printed; None if none is."""
        return min((seconds for seconds, _ in self._unprinted()), default=None)

    @property
    def only_lost_workers_running(self) -> bool:
        """Whether the servers have ended, and only lost workers still run."""
        running = [each for each in self.tasks if each.code is None]
        return any(each.task.is_server for each in self.tasks) and all(
            each.lost and not each.task.is_server for each in running
        )

    @property
    def only_servers_running(self) -> bool:
        """Whether only servers run that wait for workers: in elastic jobs only."""
        return False

    # The end.

    @property
    def workers(self) -> list[Started]:
        """The tasks that are workers, by rank."""
        return [each for each in self.tasks if not each.task.is_server]

    def report(self, ended_by: int | None, *, launcher_lost: bool) -> int:
        """Print how the job ended; return the exit code.

        Args:
            ended_by: The signal by which a user or a batch system ended it, if any.
            launcher_lost: Whether it was ended because the launcher had ended.
        """
        if ended_by is not None:
            name = signal.Signals(ended_by).name
            print_line(f"ended by {name}; all {self._job.kinds} are ended")
            return exit_code(-ended_by)
        if launcher_lost:
            return exit_code(-signal.SIGKILL)
        lost = [each for each in self.workers if each.lost and not each.replaced]
        if self.failed_at is None and lost and len(lost) < len(self.workers):
            return self._finished_without(lost)
        first = self.first_failure()
        if first is None:
            well = all(each.code == 0 or each.lost for each in self.tasks)
            return 0 if well else 1
        self._show_first(first)
        for other in self.failures():
            # Listed because the order of exits may deceive.
            if other is not first:
                self._print_message(other, f"afterwards {how(other)}")
        return exit_code(first.code or 0)

    def _finished_without(self, lost: Sequence[Started]) -> int:
        names = " and ".join(str(each.task) for each in lost)
        print_line(f"the job has finished without {names}", logging.WARNING)
        chief = next((each for each in lost if each.task.is_chief), None)
        if chief is not None:
            if not self._has_printed(chief):
                self._print_message(chief, str(chief.task))
            print_line(
                "that was the chief: what it alone writes, the model for instance, "
                "may be missing, so this is no success",
                logging.ERROR,
            )
        own = next((each for each in lost if is_own_error(each)), None)
        if own is not None:
            print_line(f"{how(own)} by itself: this is no success", logging.ERROR)
            if not own.task.is_chief:
                show_end(own)
        counts = chief or own
        return 0 if counts is None else exit_code(counts.code or 1)

    def failures(self) -> list[Started]:
        """Return the tasks that ended by themselves, with a failure."""
        # Workers that were lost before aren't the cause, unless none was left. A lost
        # server is none if the job went on: it was started again by hand.
        all_lost = all(each.lost for each in self.workers)
        failed = self.failed_at is not None
        return [
            each
            for each in self.tasks
            if each.code
            and not each.ended_by_us
            and (all_lost or not each.lost or (failed and each.task.is_server))
        ]

    def first_failure(self) -> Started | None:
        """Return the one of `failures` that caused the others; None: there is none."""
        cause = self.cause
        return min(
            self.failures(),
            key=lambda task: (task is not cause, self._follows(task), failed_at(task)),
            default=None,
        )

    def _show_first(self, first: Started) -> None:
        alone = len(self.tasks) == 1
        others = "" if alone else f"; the other {self._job.kinds} were ended"
        print_line(f"{how(first)}{others}", logging.ERROR)
        shown, cause = first, self.cause
        if cause is not None and cause is not first:
            ended = "was lost to the others, and had to be ended"
            if not cause.ended_by_us:
                ended = f"ended with code {cause.code} while others still needed it"
            print_line(f"before that, {cause.task} {ended}", logging.ERROR)
            if last_traceback(cause.evidence()[0]):
                shown = cause
        # An error that the task printed itself isn't printed again.
        if not self._has_printed(shown):
            show_end(shown)
        if first is not shown:
            self._print_message(first, str(first.task))

    def _has_printed(self, task: Started) -> bool:
        """Return whether the error that ended a task was printed already.

        The chief prints its own error, unless that only follows from another task's.
        Where all ranks raise one error, the chief's is enough.
        """
        chief = self.tasks[0].final_error
        if task.task.is_chief:
            return chief is None or not chief.consequence
        if chief is None or chief.consequence:
            return False
        final = task.final_error
        ends = task.evidence()[0].rstrip() if final is None else final.message
        if not ends.endswith(chief.message):
            return False
        print_line(
            f"{task.task} ended with the error of rank 0, which stands above",
            logging.ERROR,
        )
        return True

    def _print_message(self, task: Started, begin: str) -> None:
        """Print how a task ended, and its error if that wasn't printed."""
        final = task.final_error
        if final is not None and final.consequence:
            begin += f": {final.message.splitlines()[0]}"
        print_line(begin, logging.ERROR)
