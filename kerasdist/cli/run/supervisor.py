"""The supervisor: the process that starts, watches and ends a job's tasks.

    launcher ───── supervisor ─┬─ rank 0, the chief ── ...
    (what the      (fork)      ├─ rank 1 ── ...
    user started)              ├─ rank 2 ── ...
                               └─ server 0 ── ...

There are two processes because the launcher may be killed with SIGKILL, and then
another process must end the workers and all their children. The supervisor holds the
reading end of a pipe whose other end only the launcher has; it reads the end of file
when the launcher has ended in any way. All orphans below it become its children
(`CHILD_SUBREAPER`), so its descendants are the whole job, whatever session or process
group they make for themselves. The other way round the launcher adopts and ends the job
if the supervisor is killed.

Process groups and the terminal: the launcher stays in the group in which the shell
started it, and the chief joins it, so the chief reads the terminal, and Ctrl-C
reaches both of them, as if the user had started the chief alone. The supervisor has
a group of its own in the same session: no key and no `kill -9 -GROUP` that hits the
launcher hits it. All others have sessions of their own and no terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import FrameType

from kerasdist.cli.console import print_line, print_line_soon
from kerasdist.cli.run import bootstrap
from kerasdist.cli.run.hosts.agent import (
    CHILD_SUBREAPER,
    below,
    prctl,
    signal_all,
    state_of,
)
from kerasdist.cli.run.hosts.places import TaskProcess
from kerasdist.cli.run.job_spec import (
    ENDING_SIGNALS,
    GROW_SIGNAL,
    RANK_VARIABLES,
    FunctionFiles,
    JobSpec,
    thread_variables,
)
from kerasdist.cli.run.outcome import JobOutcome, in_words
from kerasdist.cli.run.output import JobOutput, OutputPump, Started, open_log, window_of
from kerasdist.transport import log as logging_thread
from kerasdist.transport.liveness.failure_protocol import ERROR_VARIABLE
from kerasdist.transport.liveness.launcher_pipe import descriptor_in_words

# The processes below one, found and ended: children, their children, and orphans.


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal; False if it has ended.

    A process that a debugger holds isn't.
    """
    return state_of(pid)[:1] == [b"T"]


def kill_all(seconds: float, spare: frozenset[int] = frozenset()) -> list[int]:
    """Send SIGKILL to everything below this process until nothing is left.

    The signal is repeated, because one may fork while the others are being killed.
    Children of this process are reaped.

    Args:
        seconds: How long to go on.
        spare: Processes that are left alone.

    Returns:
        The ids of processes that still run; empty if there are none.
    """
    until = time.monotonic() + seconds
    while True:
        left = [pid for pid in below(os.getpid()) if pid not in spare]
        if not left or time.monotonic() > until:
            return left
        signal_all(signal.SIGKILL, spare)
        for pid in left:
            # Only our own children can be reaped; the others have parents or are
            # given to us when those end.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def kill_left_behind(pid: int, group: int | None = None) -> None:
    """Send SIGKILL to what an ended process has left below this one.

    Args:
        pid: The ended process.
        group: The process group that it shared with others above this process; None:
            it had a session of its own.
    """
    for each in below(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            own_session = group is None and os.getsid(each) == pid
            if own_session or os.getpgid(each) == group:
                os.kill(each, signal.SIGKILL)


def in_foreground(group: int) -> bool:
    """Return whether the terminal's keys send signals to this process group."""
    with contextlib.suppress(OSError):  # there is no terminal
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == group
        finally:
            os.close(terminal)
    return False


# Tasks that were stopped by a signal after all others ended.
#
# While others need a frozen worker they detect it by its silence. One that is stopped
# after they have ended well (in `model.save`, for instance) isn't missed by any task:
# only the system knows that it isn't just busy.

# Looks in a row, one per second. Counted, not timed: a batch system that suspends the
# whole job for hours stops the launcher, too.
_LOOKS = 10
FROZEN_SECONDS = 1.0


# When one rank fails, in seconds from then. The others first get the time to fail
# by themselves: they report which rank they have lost, and the real first failure may
# be one whose process takes longer to end. In sum less than 5 s.
LET_THEM_FAIL = 1.5
TERM_TO_KILL = 2.0
# The rank that the others report as the cause: TensorFlow may end a process slowly.
LET_CAUSE_END = 3.0
# A lost worker that still runs when the job without it has ended.
LET_LOST_END = 2.0
# After Ctrl-C: scripts may catch KeyboardInterrupt and save.
INTERRUPT_TO_TERM = 2.0
TWICE = 0.5
# A killed process only stays if the kernel holds it (a dead network disk).
_GIVE_UP = 1.0
_OUTPUT_SECONDS = 2.0
# How often it's looked whether something is due that no event announces.
_LOOK_SECONDS = 0.1


class JobSupervisor:
    """Runs one job from its start to the end of its last process.

    Args:
        job: The job to run.
        life: Reading end of the pipe that ends when the launcher does.
    """

    def __init__(self, job: JobSpec, life: int) -> None:
        self._job = job
        self._life = life
        self._tasks: list[Started] = []
        copies = job.tagged or job.elastic is not None
        self._output = JobOutput(job, OutputPump(1) if copies else None)
        self._outcome = JobOutcome(job, self._tasks, self._output)
        # To find frozen tasks: when to look again, and how often they were seen.
        self._launcher = os.getppid()
        self._look_at = 0.0
        self._looks = 0
        self._signal: int | None = None
        self._signal_at = 0.0
        # Whether workers of an elastic job have been asked to leave it.
        self._lets_leave = False
        self._give_up_at: float | None = None
        self._launcher_lost = False
        # (monotonic time, signal): the signals that are still to be sent to all.
        self._plan: list[tuple[float, int]] = []

    def run(self, unblock: frozenset[signal.Signals]) -> int:
        """Start the workers and return the launcher's exit code when all have ended.

        Args:
            unblock: Signals that are blocked until the handlers are in place.
        """
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        # This process is in the terminal's background, and yet writes to it.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        for number in ENDING_SIGNALS:
            # A signal that `nohup` or a shell's `&` ignores stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _ignore)
        if self._job.grows:
            signal.signal(GROW_SIGNAL, _ignore)
        prctl(CHILD_SUBREAPER, 1)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, unblock)
            self._start_all()
            self._watch(wake_read)
        except OSError as error:
            print_line(f"the workers can't be run: {error}", logging.ERROR)
            return 1
        finally:
            left = kill_all(_GIVE_UP)
            if left:
                print_line(f"processes {left} can't be killed", logging.ERROR)
        self._output.finish(_OUTPUT_SECONDS)
        code = self._outcome.report(self._signal, launcher_lost=self._launcher_lost)
        if self._job.function is not None:
            first = self._outcome.first_failure() if code else None
            self._send_results(self._job.function, first)
        return code

    def _send_results(self, files: FunctionFiles, first: Started | None) -> None:
        """Send to the caller how each task has ended, and its result's file.

        Args:
            files: Those of the job's function.
            first: The task that caused the job's failure, if it failed.
        """
        for each in self._tasks:
            if each.result_file is None:
                continue
            ended = "was ended by the launcher"
            message = {
                **dataclasses.asdict(each.task),
                "code": each.code,
                "ended": ended if each.code is None else in_words(each.code),
                "first": each is first,
            }
            files.send(message, each.result_file.fileno())

    # The start of tasks.

    def _start_all(self) -> None:
        """Start the tasks of the start.

        Raises:
            OSError: One can't be started; others may run.
        """
        # The sockets listen before any worker runs: no other process can take a port
        # in between, and a worker that is early can connect to all others. Our copies
        # are closed then, else a dead worker's port would stay open.
        with contextlib.ExitStack() as listeners:
            for task, listener in [
                (task, listeners.enter_context(self._job.part.listen(task)))
                for task in self._job.tasks
            ]:
                self._tasks.append(self._start_task(task, listener, 0))

    def _start(self, task: TaskProcess | Started, failed: str) -> None:
        """Start one more worker, or one that has ended again.

        The latter is started at its address, without the terminal.

        Args:
            task: The task.
            failed: What is said if it can't be started.
        """
        ended = task if isinstance(task, Started) else None
        incarnation = 0 if ended is None else ended.incarnation + 1
        task = task.task if isinstance(task, Started) else task
        try:
            with self._job.part.listen(task) as listener:
                started = self._start_task(task, listener, incarnation)
        except OSError as error:
            print_line_soon(f"{failed}: {error}", logging.ERROR)
            return
        if ended is None:
            self._tasks.append(started)
        else:
            self._tasks[self._tasks.index(ended)] = started

    def _start_task(
        self, task: TaskProcess, listener: socket.socket | None, incarnation: int
    ) -> Started:
        job, pump = self._job, self._output.pump
        # Only the first process of the chief has the terminal.
        chief = task.is_chief and not incarnation
        # A server may run on any core: it waits for most of the time.
        cores: tuple[int, ...] = ()
        if job.cores and not task.is_server:
            cores = job.cores[task.index - job.part.first[task.kind]]
        path = job.log(task, again=incarnation > 0)
        # The chief writes straight to the terminal, with its progress bars; to a file
        # or another program the pump writes for it, or lines would be mixed.
        piped = pump is not None and (not chief or not os.isatty(1))
        inherited = [self._outcome.pipe.writing]
        own = job.place_variables(task)
        environ = {
            # An outer launcher's ranks aren't those of this job.
            **{n: v for n, v in job.environ.items() if n not in RANK_VARIABLES},
            **own,
            **(thread_variables(len(cores)) if cores else {}),
            "KERASDIST_SECRET": job.secret,
            "PYTHONHASHSEED": job.hash_seed,
            "PYTHONUNBUFFERED": "1",
            **self._outcome.pipe.environ,
            "TF_CONFIG": json.dumps(
                {
                    "cluster": job.part.cluster,
                    "task": {"type": task.kind, "index": task.index},
                }
            ),
        }
        if self._outcome.ended is not None:
            environ["KERASDIST_INCARNATION"] = str(incarnation)
            environ |= self._outcome.ended.environ
            inherited.append(self._outcome.ended.fileno())
        if listener is not None:
            inherited.append(listener.fileno())
            environ["KERASDIST_LISTEN_FD"] = str(listener.fileno())
        error_file = result_file = None
        # The errors of all others are read from their logs.
        if chief or pump is not None:
            # Not on a disk, which may be full.
            error_file = os.fdopen(os.memfd_create("kerasdist-errors"), "w+b")
            inherited.append(error_file.fileno())
            environ[ERROR_VARIABLE] = descriptor_in_words(error_file.fileno())
        arguments: Sequence[str] = job.command
        if job.function is not None:
            result_file = tempfile.TemporaryFile()  # noqa: SIM115
            inherited += [job.function.call, result_file.fileno()]
            environ |= job.function.environ(result_file.fileno())
            # The function's modules are found by the caller's `sys.path`: until then
            # nothing of the working folder is imported.
            arguments = ["-P", *arguments]
        if job.hosts is not None:
            window = window_of(1) if chief and not piped else None
            arguments, environ = job.hosts.command(
                task, arguments, environ, window, own
            )
        command = [
            *(sys.executable, "-I", "-S", str(bootstrap.__file__)),
            str(os.getpid()),
            str(job.group) if chief else "-",
            ",".join(map(str, cores)) or "-",
            *("--", sys.executable, *arguments),
        ]
        log = None if path is None else open_log(path, append=incarnation > 0)
        with contextlib.ExitStack() as undo:
            errors_to = None if chief else subprocess.STDOUT
            if chief and (opened := undo.enter_context(self._output.chief_errors())):
                errors_to, real, more = opened
                inherited.append(real)
                environ = {**environ, **more}
            process = subprocess.Popen(
                command,
                stdin=None if chief else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=errors_to,
                bufsize=0,
                env=environ,
                pass_fds=inherited,
                start_new_session=not chief,
            )
        tail = None
        if pump is not None and process.stdout is not None:
            copied = pump.add(self._output.lines_of(task), process.stdout, log)
            tail = None if chief else copied
        elif log is not None:
            log.close()
        return Started(
            task=task,
            process=process,
            incarnation=incarnation,
            tail=tail,
            log=path,
            error_file=error_file,
            result_file=result_file,
        )

    # The watch.

    def _watch(self, wake: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            selector.register(self._life, selectors.EVENT_READ)
            selector.register(self._outcome.pipe.reading, selectors.EVENT_READ)
            while True:
                self._reap()
                self._outcome.read()
                for ended in self._outcome.take_restarts():
                    self._start(ended, f"{ended.task} can't be started again")
                # Grandchildren may hold the terminal or a pipe of ours.
                over = not self._running and not self._outcome.restart_pending
                if over and not below(os.getpid()):
                    return
                self._end_what_is_left(over=over)
                self._extend_grace_period()
                self._send_what_is_due()
                if self._give_up_at and time.monotonic() > self._give_up_at:
                    return
                for key, _ in selector.select(self._pause()):
                    if key.fd == wake:
                        for number in os.read(wake, 512):
                            self._on_signal(number)
                    elif key.fd == self._life:
                        selector.unregister(self._life)
                        self._launcher_lost = True
                        self._plan_to_end(0.0)

    def _end_what_is_left(self, *, over: bool) -> None:
        """Plan the end of what no task needs any more, if anything.

        Args:
            over: Whether all tasks have ended for good.
        """
        if over or self._outcome.only_servers_running:
            if not self._plan or self._lets_leave:
                self._lets_leave = False
                # Servers end by themselves, unless they wait for workers.
                self._plan_to_end(0.0 if over else LET_LOST_END)
        elif self._plan:
            return
        elif self._outcome.only_lost_workers_running:
            # Frozen, or busy with results that no task needs any more.
            self._plan_to_end(LET_LOST_END)
        elif frozen := self._frozen():
            names = " and ".join(str(each.task) for each in frozen)
            were = "were" if len(frozen) > 1 else "was"
            print_line_soon(
                f"{names} {were} stopped by a signal, and all others have ended: "
                "waiting no longer",
                logging.WARNING,
            )
            self._plan_to_end(0.0)

    @property
    def _running(self) -> list[Started]:
        return [each for each in self._tasks if each.code is None]

    @property
    def _looks_for_frozen(self) -> bool:
        return 0 < len(self._running) < len(self._tasks)

    def _frozen(self) -> list[Started]:
        """Return all running tasks if each has been stopped for several seconds."""
        if not self._looks_for_frozen or time.monotonic() < self._look_at:
            return []
        self._look_at = time.monotonic() + FROZEN_SECONDS
        # After Ctrl-Z the launcher is stopped with the chief; both are resumed later.
        stopped = all(is_stopped(each.process.pid) for each in self._running)
        stopped = stopped and not is_stopped(self._launcher)
        self._looks = self._looks + 1 if stopped else 0
        return self._running if self._looks >= _LOOKS else []

    def _reap(self) -> None:
        by_pid = {each.process.pid: each for each in self._running}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker = by_pid.get(pid)
            if worker is None:  # an orphan that was given to us
                continue
            worker.ended_at = time.time_ns()
            worker.code = os.waitstatus_to_exitcode(status)
            worker.process.returncode = worker.code  # it can't be waited for again
            if self._outcome.fails_with(worker):
                self._plan_to_end(LET_THEM_FAIL)
            elif worker.code and self._outcome.restart_pending:
                # A child could hold its port, or its memory.
                kill_left_behind(pid, self._job.group if worker.on_terminal else None)

    def _on_signal(self, number: int) -> None:
        if (
            number == GROW_SIGNAL
            and self._job.grows
            and (added := self._outcome.take_growth())
        ):
            self._start(added, "the worker can't be started")
        if number not in ENDING_SIGNALS:
            return
        now = time.monotonic()
        if self._signal is not None:
            # Closing a terminal may send two at once; a later one means: end at once.
            if now - self._signal_at > TWICE:
                self._plan = [(now, signal.SIGKILL)]
            return
        self._signal, self._signal_at = number, now
        if number == signal.SIGTERM and self._job.elastic is not None:
            # The workers leave after their step; they still need their children.
            self._lets_leave = True
            self._plan_to_end(self._job.elastic.grace)
        elif number == signal.SIGINT:
            self._plan_to_end(INTERRUPT_TO_TERM)
        else:
            self._plan_to_end(0.0)
            return
        for worker in self._running:
            worker.ended_by_us = True
            # Servers end after their workers, which may still need them.
            if worker.task.is_server:
                continue
            # The terminal has signalled the chief itself; a second signal would
            # interrupt the chief's handling of the first.
            by_terminal = number == signal.SIGINT and worker.on_terminal
            if not (by_terminal and in_foreground(self._job.group)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.process.pid, number)

    def _plan_to_end(self, term: float) -> None:
        """Schedule SIGTERM in seconds from now, then SIGKILL, if nothing earlier is."""
        self._outcome.over = True
        term += time.monotonic()
        if not self._plan or self._plan[0][0] > term:
            self._plan = [(term, signal.SIGTERM), (term + TERM_TO_KILL, signal.SIGKILL)]

    def _extend_grace_period(self) -> None:
        """Delay SIGTERM after a failure for the task whose exit code counts.

        SIGKILL isn't delayed: the task may be frozen.
        """
        failed_at = self._outcome.failed_at
        if (
            failed_at is None
            or self._signal is not None
            or self._launcher_lost
            or not (self._plan and self._plan[0][1] == signal.SIGTERM)
        ):
            return
        cause = self._outcome.cause
        runs = cause is not None and cause.code is None
        seconds = LET_CAUSE_END if runs else LET_THEM_FAIL
        self._plan[0] = (failed_at + seconds, signal.SIGTERM)

    def _send_what_is_due(self) -> None:
        while self._plan and self._plan[0][0] <= time.monotonic():
            number = self._plan[0][1]
            for worker in self._running:
                worker.ended_by_us = True
            signal_all(number)
            if number == signal.SIGKILL:
                # Until nothing is left: one may have forked in between.
                self._give_up_at = self._give_up_at or time.monotonic() + _GIVE_UP
                self._plan = [(time.monotonic() + 0.05, signal.SIGKILL)]
                return
            del self._plan[0]

    def _pause(self) -> float | None:
        """Return the seconds to wait for an event; None: as long as it takes."""
        if not self._running:
            return 0.05  # grandchildren's ends raise no event
        due = self._plan or self._looks_for_frozen or self._outcome.is_due_later
        return _LOOK_SECONDS if due else None


def _ignore(number: int, frame: object) -> None:
    """Ignore a signal: its number is in the wake-up pipe."""


def run_supervised(job: JobSpec) -> int:
    """Fork the supervisor, forward signals to it, and return the exit code.

    When this returns, nothing of the job runs any more.
    """
    others = frozenset(below(os.getpid()))  # not part of the job
    sys.stdout.flush()
    sys.stderr.flush()
    # Until both processes have their handlers no signal may be lost.
    forwarded = (*ENDING_SIGNALS, *([GROW_SIGNAL] if job.grows else []))
    blocked = frozenset({*forwarded, signal.SIGCHLD})
    unblock = blocked - signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    life_read, life_write = os.pipe()
    prctl(CHILD_SUBREAPER, 1)
    supervisor = os.fork()
    if supervisor == 0:
        # Leave by os._exit only: no code of the caller may run twice.
        code = 1
        try:
            os.close(life_write)
            os.setpgid(0, 0)
            code = JobSupervisor(job, life_read).run(unblock)
        except BaseException:  # the user must see all of them
            sys.excepthook(*sys.exc_info())
        finally:
            logging_thread.flush(None)  # as `sys.exit` would
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(code)
    os.close(life_read)
    received: list[int] = []  # that end the job

    def forward(number: int, frame: FrameType | None) -> None:
        if number in ENDING_SIGNALS:
            received.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, number)

    before = {
        number: signal.signal(number, forward)
        for number in forwarded
        # A signal that `nohup` or a shell's `&` ignores stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    signal.pthread_sigmask(signal.SIG_UNBLOCK, unblock)
    try:
        _, status = os.waitpid(supervisor, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(life_write)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # It was killed; its adopted children are ours now.
        kill_all(2.0, others)
        print_line(
            f"the supervisor of the workers was ended by signal {-code}",
            logging.ERROR,
        )
        return 128 - code
    if code != 0 and received:
        return 128 + received[0]
    return code
