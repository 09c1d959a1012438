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

An elastic job. A worker that ends with a failure is lost, and the others go on. So is a
server, if another one is left. The job succeeds if at least one worker finishes. If
none does, it ends as other jobs do, with the first cause. SIGTERM to a worker is a
request to leave, so that one isn't started again; if the last one was asked, the exit
code is that of SIGTERM. Which worker is the chief, the members of each epoch report on
the launcher's pipe.
"""

from __future__ import annotations

import logging
import shlex
import signal
import sys
import time
from collections.abc import Sequence

from kerasdist.cli.console import print_line, print_line_soon
from kerasdist.cli.run.hosts.places import TaskProcess
from kerasdist.cli.run.job_spec import ENDING_SIGNALS, JobSpec
from kerasdist.cli.run.output import JobOutput, Started, end_of, last_traceback
from kerasdist.transport.liveness.failure_protocol import EndedTaskList
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
_SIGNAL_NAMES = {each.value: each.name for each in signal.Signals}


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
    name = f"{_SIGNAL_NAMES[-code]} ({-code})" if -code in _SIGNAL_NAMES else f"{-code}"
    hint = ""
    if -code == signal.SIGKILL:
        hint = ", sent by another process, or by the system when memory ran out"
    return f"was ended by signal {name}{hint}"


def _has_left(worker: Started) -> bool:
    """Return whether a worker has ended because it was sent SIGTERM."""
    return worker.code == -signal.SIGTERM and not worker.ended_by_us


def _how_lost(task: Started) -> str:
    """Return how a lost task of an elastic job ended, in a word or two."""
    code = task.code or 0
    if task.ended_by_us:
        return "ended by the launcher"
    if code >= 0:
        return f"exit code {code}"
    return _SIGNAL_NAMES.get(-code, f"signal {-code}")


# Seconds that the process of a worker that the servers have lost may take to end, so
# that its exit code is printed with the loss.
_LET_IT_END = 1.0

# Seconds before a lost worker of an elastic job is started again.
FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0


def pause_before_restart(incarnation: int) -> float:
    """Return the seconds before a worker is started again.

    A worker that ends soon after each start must not keep the machine busy.

    Args:
        incarnation: How many times it was started again before.
    """
    return min(FIRST_PAUSE * 2 ** min(incarnation, 10), _LONGEST_PAUSE)


class JobOutcome:
    """The facts about a job's end, and the decisions that follow from them.

    Args:
        job: The job's specification.
        tasks: Its tasks; the list may be filled later, and a task that is started
            again takes the place of the one that ended.
        output: Shows its output.

    Attributes:
        tasks: The tasks.
        pipe: The pipe on which the tasks report.
        ended: The tasks of an elastic job that have ended, where workers look for those
            that won't connect; None in other jobs.
        failed_at: When a task failed without which the job can't continue (monotonic);
            None: none has.
        over: Whether the job is being ended: then nothing is a loss any more.
    """

    def __init__(
        self,
        job: JobSpec,
        tasks: Sequence[Started],
        output: JobOutput,
    ) -> None:
        self.pipe = LauncherPipe()
        self.ended: EndedTaskList | None = None
        if job.elastic is not None:
            self.ended = EndedTaskList(job.elastic.max_workers)
        self.failed_at: float | None = None
        self.over = False
        self.tasks = tasks
        self._job = job
        self._output = output
        self._reports: list[Report] = []
        # Servers whose job continues without lost workers, until one reports that it
        # doesn't.
        self._begun: set[int] = set()
        self._can_lose = True
        # Seconds that the workers wait for a lost server; 0: not at all.
        self._patience = 0.0
        # Of an elastic job: the latest epoch that was reported, by job, and its
        # members' ranks.
        self._epochs: dict[str, int] = {}
        self._members: tuple[int, ...] = ()
        self._pauses: list[float] = []
        # Each process that was lost, in order, and when some are started again.
        self._losses: list[Started] = []
        self._restart_at: dict[Started, float] = {}
        self._restarts = 0

    def task(self, kind: str, index: int | None) -> Started | None:
        """Return a task by its kind and index; None if there is none."""
        named = {(each.task.kind, each.task.index): each for each in self.tasks}
        return named.get((kind, index)) if index is not None else None

    @property
    def workers(self) -> list[Started]:
        """The tasks that are workers, by rank."""
        return [each for each in self.tasks if not each.task.is_server]

    @property
    def _finished(self) -> list[Started]:
        return [each for each in self.workers if each.code == 0]

    @property
    def _running(self) -> list[Started]:
        return [each for each in self.workers if each.code is None]

    # What processes report.

    def read(self) -> None:
        """Read the reports that have arrived, without waiting, and print new losses."""
        for record in self.pipe.read():
            if isinstance(record, Report):
                self._take_report(record)
            elif isinstance(record, Notice):
                self._take_notice(record)
            elif self._job.elastic is not None:
                self._take_members(record)
        for worker in self._unprinted:
            until = worker.missed_by[0] + _LET_IT_END
            if worker.code is not None or time.monotonic() >= until:
                self._lose(worker)

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
        elif (worker := self.task("worker", notice.rank)) is not None:
            self._take_event(worker, notice)

    def _take_event(self, worker: Started, notice: Notice) -> None:
        lost = notice.kind == "lost"
        if lost:
            worker.missed_by[notice.server] = time.monotonic()
        else:
            worker.missed_by.pop(notice.server, None)
        if notice.server != 0:  # the others report the same, sooner or later
            return
        worker.reason = notice.reason if lost else ""
        if lost:
            worker.lost = worker.lost and not worker.replaced
            worker.replaced = False
        elif notice.kind in ("joined", "returned") and worker.lost:
            worker.replaced = True
            print_line_soon(f"{worker.task} joined again")

    def _take_members(self, members: Members) -> None:
        # All members report the same epoch, and late ones an earlier one.
        if members.epoch <= self._epochs.get(members.job, -1):
            return
        self._epochs[members.job] = members.epoch
        self._members = members.ranks if members.complete else ()
        if members.pause > 0:
            self._pauses.append(members.pause)
        chief = members.ranks[0]
        if chief != self._output.chief and self.task("worker", chief) is not None:
            # First: who reads the line may cause the output that it announces.
            self._output.show(chief)
            print_line_soon(
                f"rank {chief} is the chief from step {members.step} on: its output is "
                "shown from here"
            )

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
        kind = "ps" if first.blames is None else "worker"
        return self.task(kind, first.server if kind == "ps" else first.blames)

    # Losses, while the job continues.

    def fails_with(self, task: Started) -> bool:
        """Return whether the job fails now, because this task has ended."""
        elastic = self._job.elastic is not None
        if task.ended_by_us or self.failed_at is not None or (elastic and self.over):
            return False
        if task.code == 0:
            if elastic and not task.task.is_server:
                # The job is done: a new worker would find no other.
                for each in (*self._restart_at, task):
                    self._mark(each, ended=True)
                self._restart_at.clear()
            return False
        # Reports that it sent before it ended are in the pipe.
        self.read()
        goes_on = self._members_continue if elastic else self._continues_without
        if goes_on(task):
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
        others = any(not each.lost for each in self._running)
        rest = "; the others go on" if others else ""
        print_line_soon(f"{worker.task} was lost: {why}{rest}", logging.WARNING)

    def _members_continue(self, task: Started) -> bool:
        """Return whether an elastic job continues without a task; print its loss."""
        self._losses.append(task)
        is_server = task.task.is_server
        if not is_server and task.task.index == self._output.chief:
            self._output.chief_ended()
        left = self._running
        if is_server:
            left = [each for each in self.tasks if each.task.is_server]
            left = [e for e in left if e.code is None and not e.ended_by_us]
        line = f"{task.task} ({self._job.part.address(task.task)}) "
        line += in_words(task.code or 0)
        final = None if is_server else task.final_error
        if final is not None and final.consequence:
            line += ", because another task was lost"
        elif left and self._running:
            line += "; the others go on"
        if not is_server:
            line += self._schedule_restart(task)
        print_line_soon(line, logging.WARNING)
        if not is_server and self._restart_at and not (self._finished or left):
            # The workers that are started again begin a job of their own.
            self._epochs.clear()
            self._members = ()
            self._output.show(0)
            return True
        return bool(self._finished or left)

    # Restarts and growth of an elastic job.

    def _mark(self, worker: Started, *, ended: bool) -> None:
        if self.ended is not None:
            self.ended.mark(worker.task.index, ended=ended)

    def _schedule_restart(self, worker: Started) -> str:
        """Let a lost worker be started again, if it may; return the words about it."""
        most = self._job.elastic.restarts if self._job.elastic else 0
        leaves = _has_left(worker)
        again = not leaves and not self._finished and self._restarts < most
        self._mark(worker, ended=not again)
        if not again:
            return "; it isn't started again" if leaves and most else ""
        self._restarts += 1
        pause = pause_before_restart(worker.incarnation)
        self._restart_at[worker] = time.monotonic() + pause
        count = f"restart {self._restarts} of {most}"
        return f"; it is started again in {pause:g} s ({count})"

    @property
    def restart_pending(self) -> bool:
        """Whether a task is still to be started again."""
        return bool(self._restart_at) and not self.over

    def take_restarts(self) -> list[Started]:
        """Return the ended tasks that are to be started again now, each once."""
        now = time.monotonic()
        due = [each for each, at in self._restart_at.items() if at <= now]
        due = [] if self.over else due
        for worker in due:
            del self._restart_at[worker]
        return due

    def take_growth(self) -> TaskProcess | Started | None:
        """Return a task that hasn't been started, or else one that was lost.

        Returns:
            None if there is none, or the job is ending; then a line reports that.
        """
        most = self._job.elastic.max_workers if self._job.elastic else 0
        started = self.workers
        lost = [each for each in self._losses if each in started]
        if self.over or self._finished or self.failed_at is not None:
            print_line_soon("no worker is added: the job is ending")
        elif len(started) < most:
            found = TaskProcess(kind="worker", index=len(started))
            line = f"{found} ({self._job.part.address(found)}) is added"
            print_line_soon(f"{line}: {len(started) + 1} of {most} workers")
            return found
        elif lost:
            self._restart_at.pop(lost[0], None)
            self._mark(lost[0], ended=False)
            print_line_soon(f"{lost[0].task} is started again")
            return lost[0]
        else:
            print_line_soon(f"no worker is added: all {most} run (--max-workers)")
        return None

    # What the supervisor waits for.

    @property
    def _unprinted(self) -> list[Started]:
        """The workers whose loss is still to be printed."""
        if self.over or not self.continues:
            return []
        return [each for each in self.tasks if 0 in each.missed_by and not each.lost]

    @property
    def is_due_later(self) -> bool:
        """Whether a loss is to be printed soon, or a task to be started again."""
        return self.restart_pending or bool(self._unprinted)

    @property
    def only_lost_workers_running(self) -> bool:
        """Whether all that are needed have ended, and only lost workers still run.

        Needed are the servers, or in an elastic job the members of its last epoch.
        """
        if self._job.elastic is not None:
            running = {each.task.index for each in self._running}
            ended = self._members and self._finished
            return bool(running and ended and running.isdisjoint(self._members))
        return any(each.task.is_server for each in self.tasks) and all(
            each.lost and not each.task.is_server
            for each in self.tasks
            if each.code is None
        )

    @property
    def only_servers_running(self) -> bool:
        """Whether all workers of an elastic job have ended for good, and servers run.

        They wait for workers; other jobs' servers end by themselves.
        """
        return (
            self._job.elastic is not None
            and any(each.code is None for each in self.tasks)
            and not self._running
            and not self.restart_pending
        )

    # The end.

    def report(self, ended_by: int | None, *, launcher_lost: bool) -> int:
        """Print how the job ended; return the exit code.

        Args:
            ended_by: The signal by which a user or a batch system ended it, if any.
            launcher_lost: Whether it was ended because the launcher had ended.
        """
        if ended_by is not None:
            name = _SIGNAL_NAMES[ended_by]
            print_line(f"ended by {name}; all {self._job.kinds} are ended")
            return exit_code(-ended_by)
        if launcher_lost:
            return exit_code(-signal.SIGKILL)
        if self._job.elastic is None:
            return self._report_failure()
        # The last workers were asked to leave: that is the cause of the end.
        asked = bool(self._losses) and not self._finished
        asked = asked and _has_left(self._losses[-1])
        if not asked and (not self._finished or self.failed_at is not None):
            code = self._report_failure()
        else:
            code = exit_code(-signal.SIGTERM) if asked else 0
            for worker in filter(is_own_error, self.workers):
                show_end(worker, with_log=False)
        if self._losses or len(self._finished) < len(self.workers):
            self._print_summary()
        return code

    def _report_failure(self) -> int:
        """Print which task failed first, if any; return the exit code."""
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
        own = next(filter(is_own_error, lost), None)
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
        # Ranks that reported that they failed because of another task.
        follow = {each.rank for each in self._of_last_job if each.names_another}

        def order(task: Started) -> tuple[bool, bool, int]:
            follows = not task.task.is_server and task.task.index in follow
            return task is not cause, task.gave_up or follows, failed_at(task)

        return min(self.failures(), key=order, default=None)

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

    def _print_summary(self) -> None:
        # Also a worker that the launcher had to end, for instance a frozen one.
        not_finished = [each for each in self.workers if each.code != 0]
        ends: dict[TaskProcess, list[str]] = {}
        left = []
        for each in dict.fromkeys([*self._losses, *not_finished]):
            if _has_left(each):
                left.append(each.task.index)
            else:
                ends.setdefault(each.task, []).append(_how_lost(each))
        lost = sorted(ends, key=lambda task: (task.is_server, task.index))
        again = [(each.task, each.incarnation) for each in self.workers]
        named = {
            "finished": [str(each.task) for each in self._finished],
            "left": [f"rank {rank}" for rank in sorted(left)],
            "lost": [f"{task} ({', '.join(ends[task])})" for task in lost],
            "added": [str(task) for task, _ in again if task.index >= self._job.size],
            "started again": [
                f"{task} ({'once' if count == 1 else f'{count} times'})"
                for task, count in again
                if count
            ],
        }
        text = "; ".join(
            f"{name}: {', '.join(them) or 'none'}"
            for name, them in named.items()
            if them or name == "finished"
        )
        if self._pauses:
            text += f"; pauses: {len(self._pauses)}, {sum(self._pauses):.2f} s in all"
        print_line(text)
