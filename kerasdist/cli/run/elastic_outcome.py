"""The outcome of an elastic job: its losses, its restarts, and the exit code.

A worker that ends with a failure is lost, and the others go on. So is a server, if
another one is left. The job succeeds if at least one worker finishes. If none does, it
ends as other jobs do, with the first cause.
SIGTERM to a worker is a request to leave, so that one isn't started again.
Which worker is the chief, the members of each epoch report on the launcher's pipe.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence

from kerasdist.cli.console import print_line, print_line_soon
from kerasdist.cli.run.outcome import (
    JobOutcome,
    exit_code,
    in_words,
    is_own_error,
    show_end,
)
from kerasdist.cli.run.output import LineTagger, OutputPump, WholeLines
from kerasdist.cli.run.spawn import JobPorts, Started
from kerasdist.cli.run.task_processes import ElasticOptions, JobSpec, TaskProcess
from kerasdist.transport.liveness.failure_protocol import EndedTaskList
from kerasdist.transport.liveness.launcher_pipe import Members, Notice, Report

# The output of an elastic job's present chief, in the place of that of rank 0.
#
# The first chief has the terminal. When another worker becomes the chief, its output is
# shown from where the output of the former chief ended; until then it was only written
# to its log, or shown with its tag.

_MOST_KEPT = 64 * 1024


class RoleLines:
    """Cuts one task's output as its present role requires: see `LineTagger`.

    Only the pump's thread calls its methods. They get the monotonic time in seconds.

    Args:
        tag: The beginning of each line while the worker isn't the chief; None: nothing
            is shown then.
        is_chief: Whether it begins as the chief.
    """

    def __init__(self, tag: bytes | None, *, is_chief: bool) -> None:
        self._tagger = None if tag is None else LineTagger(tag)
        self._whole = WholeLines()
        self._is_chief = is_chief
        self._in_line = False
        # While nothing is shown: the line that isn't finished, or, without a chief,
        # all since then.
        self._kept = b""
        self._keeps_all = False

    def feed(self, data: bytes, now: float) -> bytes:
        """Add output of the worker, and return what is to be shown of it."""
        if self._is_chief:
            return self._shown(self._whole.feed(data, now))
        if self._tagger is not None:
            return self._tagger.feed(data, now)
        self._kept += data
        if not self._keeps_all:
            end = max(self._kept.rfind(b"\n"), self._kept.rfind(b"\r")) + 1
            self._kept = self._kept[end:]
        self._kept = self._kept[-_MOST_KEPT:]
        return b""

    def flush(self) -> bytes:
        """Return what has no line end yet, if it is to be shown."""
        if self._is_chief:
            return self._shown(self._whole.flush())
        return b"" if self._tagger is None else self._tagger.flush()

    def keep_all(self, now: float) -> bytes:
        """Keep what follows, for `begin`: the chief has ended."""
        del now
        self._keeps_all = True
        return b""

    def begin(self, now: float) -> bytes:
        """Become the chief; return what is to be shown at once."""
        if self._is_chief:
            return b""
        self._is_chief = True
        kept = self._kept if self._tagger is None else self._tagger.take()
        self._kept = b""
        return self._shown(self._whole.feed(kept, now))

    def end(self, now: float) -> bytes:
        """Be the chief no longer; return the end of the line."""
        del now
        if not self._is_chief:
            self._keeps_all = False
            return b""
        rest = self.flush()
        self._is_chief = self._keeps_all = False
        return rest + (b"\n" if self._in_line else b"")

    def _shown(self, data: bytes) -> bytes:
        if data:
            self._in_line = not data.endswith(b"\n")
        return data


class ChiefOutput:
    """Shows the output of the present chief.

    Args:
        job: The job.
        pump: Copies the output of its workers.

    Attributes:
        chief: Rank of the present chief.
    """

    def __init__(self, job: JobSpec, pump: OutputPump) -> None:
        self.chief = 0
        self._tagged = job.tagged
        self._pump = pump
        self._lines: dict[int, RoleLines] = {}  # by rank

    def lines_of(self, task: TaskProcess) -> RoleLines:
        """Return what cuts the output of a task that is being started."""
        tag = f"[{task.tag}] ".encode() if self._tagged else None
        if task.is_server:
            return RoleLines(tag, is_chief=False)
        lines = RoleLines(tag, is_chief=task.index == self.chief)
        self._lines[task.index] = lines
        return lines

    def chief_ended(self) -> None:
        """Keep the others' output until one of them is the chief."""
        for lines in self._lines.values():
            self._pump.call(lines.keep_all)

    def show(self, rank: int) -> None:
        """Show the output of the new chief, instead of the former one's."""
        self.chief = rank
        # The others' first: the former chief's may have to end a line.
        for other, lines in self._lines.items():
            if other != rank:
                self._pump.call(lines.end)
        if rank in self._lines:
            self._pump.call(self._lines[rank].begin)


# The restarts of lost workers: how many are left, and when each takes place.

FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0


class Restarts:
    """The schedule of a job's restarts. It starts nothing itself.

    Args:
        most: Number of restarts, of all workers together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._at: dict[Started, float] = {}

    def schedule(self, worker: Started, now: float) -> float | None:
        """Schedule a restart; return the pause before it in seconds.

        Args:
            worker: The worker that has ended.
            now: The monotonic time.

        Returns:
            None if no restart is left.
        """
        if self.used >= self.most:
            return None
        self.used += 1
        # A worker that ends soon after each start must not keep the machine busy.
        pause = min(FIRST_PAUSE * 2 ** min(worker.incarnation, 10), _LONGEST_PAUSE)
        self._at[worker] = now + pause
        return pause

    @property
    def pending(self) -> bool:
        """Whether a worker is still to be started again."""
        return bool(self._at)

    def next_in(self, now: float) -> float | None:
        """Return the seconds until the next restart; None if there is none."""
        return max(0.0, min(self._at.values()) - now) if self._at else None

    def take_due(self, now: float) -> list[Started]:
        """Return each worker that is to be started again now, once."""
        due = [worker for worker, at in self._at.items() if at <= now]
        for worker in due:
            del self._at[worker]
        return due

    def forget(self, worker: Started) -> None:
        """Leave out a worker, which is started again for another reason."""
        self._at.pop(worker, None)

    def cancel(self) -> list[Started]:
        """Start nothing any more; return the workers that were to be started."""
        waiting = list(self._at)
        self._at.clear()
        return waiting


class ElasticOutcome(JobOutcome):
    """The facts about an elastic job's end, and the decisions that follow from them.

    Args:
        job: The job's specification.
        tasks: Its tasks; the list may be filled later, and a task that is started
            again takes the place of the one that ended.
        options: The settings of elastic jobs.
        ports: The ports of its tasks.
        output: Shows the chief's output.

    Attributes:
        ended: The tasks that have ended, where workers look for those that won't
            connect.
    """

    def __init__(
        self,
        job: JobSpec,
        tasks: Sequence[Started],
        options: ElasticOptions,
        ports: JobPorts,
        output: ChiefOutput,
    ) -> None:
        super().__init__(job, tasks)
        self._ports = ports
        self._output = output
        self._restarts = Restarts(options.restarts)
        self._most = options.max_workers
        # The latest epoch that was reported, by job, and its members' ranks.
        self._epochs: dict[str, int] = {}
        self._members: tuple[int, ...] = ()
        # Each process that was lost, in order.
        self._losses: list[Started] = []
        self._pauses: list[float] = []
        self.ended = EndedTaskList(options.max_workers)

    @property
    def environ(self) -> dict[str, str]:
        """See `JobOutcome.environ`."""
        return {**super().environ, **self.ended.environ}

    @property
    def inherited(self) -> tuple[int, ...]:
        """See `JobOutcome.inherited`."""
        return (*super().inherited, self.ended.fileno())

    # Reports.

    def take(self, record: Report | Notice | Members) -> None:
        """Take a record that has arrived on the pipe."""
        if isinstance(record, Members):
            self._take_members(record)
        else:
            super().take(record)

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

    # Losses and restarts.

    def fails_with(self, task: Started) -> bool:
        """Return whether the job fails now, because this task has ended."""
        if task.ended_by_us or self.over or self.failed_at is not None:
            return False
        if task.code == 0 and task.task.is_server:
            return False
        if task.code == 0:
            # The job is done: a new worker would find no other.
            for worker in self._restarts.cancel():
                self.ended.mark(worker.task.index, ended=True)
            self.ended.mark(task.task.index, ended=True)
            return False
        # Reports that it sent before it ended are in the pipe.
        self.read()
        if task.task.is_server:
            return self._fails_with_server(task)
        self._take_loss(task)
        if self._finished or self._running:
            return False
        if self._restarts.pending:
            # The workers that are started again begin a job of their own.
            self._epochs.clear()
            self._members = ()
            self._output.show(0)
            return False
        self.failed_at = time.monotonic()
        return True

    def _fails_with_server(self, server: Started) -> bool:
        """Return whether the job fails now, because a server was lost."""
        self._losses.append(server)
        left = any(
            each.task.is_server and each.code is None and not each.ended_by_us
            for each in self.tasks
        )
        fails = not left and not self._finished
        line = f"{server.task} ({self._ports.address(server.task)}) "
        line += in_words(server.code or 0)
        line += "; the others go on" if left and self._running else ""
        print_line_soon(line, logging.WARNING)
        if fails:
            self.failed_at = time.monotonic()
        return fails

    @property
    def _finished(self) -> list[Started]:
        return [each for each in self.workers if each.code == 0]

    @property
    def _running(self) -> list[Started]:
        return [each for each in self.workers if each.code is None]

    def _take_loss(self, worker: Started) -> None:
        self._losses.append(worker)
        if worker.task.index == self._output.chief:
            self._output.chief_ended()
        line = f"{worker.task} ({self._ports.address(worker.task)}) "
        line += in_words(worker.code or 0)
        final = worker.final_error
        if final is not None and final.consequence:
            line += ", because another task was lost"
        elif self._running:
            line += "; the others go on"
        pause = None
        if _has_left(worker):
            line += "; it isn't started again" if self._restarts.most else ""
        elif not self._finished:
            pause = self._restarts.schedule(worker, time.monotonic())
        self.ended.mark(worker.task.index, ended=pause is None)
        if pause is not None:
            line += (
                f"; it is started again in {pause:g} s (restart {self._restarts.used} "
                f"of {self._restarts.most})"
            )
        print_line_soon(line, logging.WARNING)

    @property
    def restart_pending(self) -> bool:
        """Whether a task is still to be started again."""
        return self._restarts.pending and not self.over

    def take_restarts(self) -> list[Started]:
        """Return the ended tasks that are to be started again now."""
        return [] if self.over else self._restarts.take_due(time.monotonic())

    def take_growth(self) -> TaskProcess | Started | None:
        """Return a task that hasn't been started, or else one that was lost.

        Returns:
            None if there is none, or the job is ending; then a line reports that.
        """
        started = {each.task.index: each for each in self.workers}
        losses = [each for each in self._losses if not each.task.is_server]
        lost = [each for each in losses if each is started[each.task.index]]
        found: TaskProcess | Started | None = None
        if self.over or self._finished or self.failed_at is not None:
            print_line_soon("no worker is added: the job is ending")
        elif len(started) < self._most:
            found = TaskProcess(kind="worker", index=len(started))
            line = f"{found} ({self._ports.address(found)}) is added"
            print_line_soon(f"{line}: {len(started) + 1} of {self._most} workers")
        elif lost:
            found = lost[0]
            self._restarts.forget(found)
            self.ended.mark(found.task.index, ended=False)
            print_line_soon(f"{found.task} is started again")
        else:
            print_line_soon(f"no worker is added: all {self._most} run (--max-workers)")
        return found

    def next_in(self) -> float | None:
        """Return the seconds until the next restart; None if there is none."""
        return None if self.over else self._restarts.next_in(time.monotonic())

    @property
    def only_lost_workers_running(self) -> bool:
        """Whether the last epoch's members have ended, and only others still run."""
        running = {each.task.index for each in self._running}
        return bool(
            running
            and self._members
            and self._finished
            and running.isdisjoint(self._members)
        )

    @property
    def only_servers_running(self) -> bool:
        """Whether all workers have ended for good, and servers still run."""
        running = [each for each in self.tasks if each.code is None]
        return bool(running) and not self._running and not self.restart_pending

    # The end.

    def report(self, ended_by: int | None, *, launcher_lost: bool) -> int:
        """Print how the job ended; return the exit code. See `JobOutcome.report`."""
        if ended_by is not None or launcher_lost:
            return super().report(ended_by, launcher_lost=launcher_lost)
        # The last workers were asked to leave: that is the cause of the end.
        asked = bool(self._losses) and not self._finished
        asked = asked and _has_left(self._losses[-1])
        code = exit_code(-signal.SIGTERM) if asked else 0
        if not asked and (not self._finished or self.failed_at is not None):
            code = super().report(ended_by, launcher_lost=launcher_lost)
        else:
            for worker in self.workers:
                if is_own_error(worker):
                    show_end(worker, with_log=False)
        if self._losses or len(self._finished) < len(self.workers):
            self._print_summary()
        return code

    def _print_summary(self) -> None:
        # Also a worker that the launcher had to end, for instance a frozen one.
        not_finished = [each for each in self.workers if each.code != 0]
        ends: dict[TaskProcess, list[str]] = {}
        left = []
        for each in dict.fromkeys([*self._losses, *not_finished]):
            if _has_left(each):
                left.append(each.task.index)
            else:
                ends.setdefault(each.task, []).append(_how(each))
        named = {
            "finished": [str(each.task) for each in self._finished],
            "left": [f"rank {rank}" for rank in sorted(left)],
            "lost": [
                f"{task} ({', '.join(ends[task])})"
                for task in sorted(ends, key=lambda task: (task.is_server, task.index))
            ],
            "added": [
                str(each.task)
                for each in self.workers
                if each.task.index >= self._job.size
            ],
            "started again": [
                f"{each.task} ({'once' if count == 1 else f'{count} times'})"
                for each in self.workers
                if (count := each.incarnation)
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


def _has_left(worker: Started) -> bool:
    """Return whether a worker has ended because it was sent SIGTERM."""
    return worker.code == -signal.SIGTERM and not worker.ended_by_us


def _how(worker: Started) -> str:
    """Return how a lost worker ended, in a word or two."""
    code = worker.code or 0
    if worker.ended_by_us:
        return "ended by the launcher"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
