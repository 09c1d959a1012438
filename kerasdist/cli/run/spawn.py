"""The start of the workers and servers of `kerasdist run`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hmac
import itertools
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from kerasdist.cli.run import bootstrap
from kerasdist.cli.run.job_spec import JobSpec, TaskProcess
from kerasdist.cli.run.output import JobOutput, Tail, window_of
from kerasdist.transport.liveness.failure_protocol import ERROR_VARIABLE, FinalError
from kerasdist.transport.liveness.launcher_pipe import descriptor_in_words

# The assignment of cores to workers: pure functions, and one look at the machine.

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


def shares(cores: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Divide cores among workers, in order.

    Args:
        cores: At least one core, neighbours next to each other.
        size: Number of workers.

    Returns:
        One tuple per rank. With enough cores they are disjoint, use all, and differ
        by at most one core; with fewer cores than workers each worker has one, and
        the workers are spread evenly.
    """
    count = len(cores)
    bounds = [rank * count // size for rank in range(size + 1)]
    return [
        tuple(cores[first : max(first + 1, last)])
        for first, last in itertools.pairwise(bounds)
    ]


def thread_variables(cores: int) -> dict[str, str]:
    """Return the environment that gives a worker as many threads as cores.

    One more thread runs operations: a collective waits in one of them while the
    others compute.

    Args:
        cores: Number of the worker's cores, at least 1.
    """
    cores = max(1, cores)
    return {
        "TF_NUM_INTRAOP_THREADS": str(cores),
        "TF_NUM_INTEROP_THREADS": str(cores + 1),
        "OMP_NUM_THREADS": str(cores),
    }


def cores_in_order(read: Callable[[str], str] | None = None) -> list[int]:
    """Return the cores this process may use, those of one physical core together.

    The kernel often numbers the second hardware threads of all cores after all
    first ones: by number alone, two workers would get halves of the same cores.

    Args:
        read: From a path to the file's text; reads the file by default.
    """

    def place(core: int) -> tuple[int, int, int]:
        try:
            package = int(read_text(_TOPOLOGY.format(core, "physical_package_id")))
            physical = int(read_text(_TOPOLOGY.format(core, "core_id")))
        except (OSError, ValueError):  # no /sys in this container: by number
            return 0, 0, core
        return package, physical, core

    read_text = read or (lambda path: Path(path).read_text(encoding="ascii"))
    return sorted(os.sched_getaffinity(0), key=place)


# The variables that tell a task its place, beside `TF_CONFIG`.

# As other launchers (torchrun) name them. Strategies don't read them.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def place_variables(job: JobSpec, task: TaskProcess) -> dict[str, str]:
    """Return a task's variables: its rank, that on its host, and its GPUs.

    Sizes count all workers that the job may have: those that an elastic job may add,
    too. A server has no rank.

    Args:
        job: The job.
        task: One of its tasks, also one that is started again.
    """
    host = job.host_of(task)
    division = job.gpus.get(host)
    if task.is_server:
        return {} if division is None else division.environ(None)
    workers = [each for each in job.all_tasks if not each.is_server]
    beside = [each for each in workers if job.host_of(each) == host]
    local = beside.index(task)
    return {
        "RANK": str(task.index),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(len(beside)),
        **({} if division is None else division.environ(local)),
    }


@dataclasses.dataclass(kw_only=True, eq=False)
class Started:
    """A started task.

    Attributes:
        task: The task.
        process: Its process.
        incarnation: How many times the task was started before this process.
        tail: The end of its output, if the pump copies that.
        log: The file with its output, if it has one.
        error_file: Takes its last error, if its output is shown at once.
        result_file: Takes what its function returns or raises, if it runs one.
        code: Its exit code when it has ended; negative for a signal.
        ended_at: When it ended, in ns since the epoch.
        ended_by_us: Whether the launcher ended it.
        missed_by: The servers that report that they have lost it: by index, when they
            did (monotonic).
        reason: How it was lost, as server 0 reports.
        lost: Whether the job continues without it.
        replaced: Whether another process has joined with its rank since.
        gave_up: Whether it reported that it ends because of other tasks.
    """

    task: TaskProcess
    process: subprocess.Popen[bytes]
    incarnation: int = 0
    tail: Tail | None
    log: Path | None = None
    error_file: IO[bytes] | None = None
    result_file: IO[bytes] | None = None
    code: int | None = None
    ended_at: int = 0
    ended_by_us: bool = False
    missed_by: dict[int, float] = dataclasses.field(default_factory=dict)
    reason: str = ""
    lost: bool = False
    replaced: bool = False
    gave_up: bool = False

    @property
    def on_terminal(self) -> bool:
        """Whether it is in the launcher's process group, and reads the terminal."""
        return self.task.is_chief and not self.incarnation

    @property
    def final_error(self) -> FinalError | None:
        """The error that ended its script, if the script's process wrote it."""
        if self.error_file is None:
            return None
        self.error_file.seek(0)
        return FinalError.decode(self.error_file.read())

    def evidence(self) -> tuple[str, int]:
        """Return the end of its output, and the last write in ns since the epoch."""
        final = self.final_error
        if final is not None and self.error_file is not None:
            status = os.fstat(self.error_file.fileno())
            return final.text, status.st_mtime_ns
        if self.tail is not None:
            return self.tail.read()
        return ("", 0) if self.log is None else Tail.of_file(self.log)


def _opened(path: Path, *, append: bool) -> IO[bytes]:
    """Open a log file, which may be in a folder that another user can write to.

    Raises:
        OSError: There is something else than a file: no link is followed, and no reader
            of a FIFO is waited for.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        opened = os.open(path, flags | (os.O_APPEND if append else 0), 0o666)
        try:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise OSError(errno.EEXIST, "it isn't a file")
            if not append:
                os.ftruncate(opened, 0)
        except BaseException:
            os.close(opened)
            raise
    except OSError as error:
        raise OSError(
            error.errno,
            f"A task's log can't be written: {error.strerror}. It must be a file of "
            "this user, no link. Remove it, or name another folder with --log-dir",
            str(path),
        ) from error
    return os.fdopen(opened, "ab" if append else "wb", buffering=0)


def _hash_seed(secret: str) -> str:
    """Return the PYTHONHASHSEED of all tasks of a job, from its secret."""
    digest = hmac.digest(secret.encode(), b"PYTHONHASHSEED", "sha256")
    return str(int.from_bytes(digest[:4], "big"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The settings with which tasks are started.

    Attributes:
        job: What to run.
        environ: Further variables of all tasks.
        pass_fds: Descriptors that all inherit.
        output: Shows the output of tasks.
    """

    job: JobSpec
    environ: Mapping[str, str]
    pass_fds: tuple[int, ...]
    output: JobOutput

    def start(self) -> list[Started]:
        """Start all tasks.

        Raises:
            OSError: One can't be started; others may run.
        """
        # The sockets listen before any worker runs: no other process can take a port
        # in between, and a worker that is early can connect to all others. Our copies
        # are closed then, else a dead worker's port would stay open.
        tasks = self.job.tasks
        with contextlib.ExitStack() as listeners:
            sockets = [listeners.enter_context(self._listen(task)) for task in tasks]
            started = [
                self._start_task(task, server, 0)
                for task, server in zip(tasks, sockets, strict=True)
            ]
        if self.output.pump is not None:
            self.output.pump.start()
        return started

    def start_one(self, task: TaskProcess | Started) -> Started:
        """Start a task that isn't one of the start, or one that has ended again.

        The latter is started at its address, without the terminal.

        Raises:
            OSError: It can't be started.
        """
        incarnation = 0
        if isinstance(task, Started):
            incarnation, task = task.incarnation + 1, task.task
        with self._listen(task) as server:
            return self._start_task(task, server, incarnation)

    def _listen(self, task: TaskProcess) -> contextlib.AbstractContextManager[Any]:
        return self.job.part.listen(task.kind, task.index)

    def _start_task(
        self, task: TaskProcess, listener: socket.socket | None, incarnation: int
    ) -> Started:
        job, pump = self.job, self.output.pump
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
        inherited = [*self.pass_fds]
        own = place_variables(job, task)
        environ = {
            # An outer launcher's ranks aren't those of this job.
            **{n: v for n, v in job.environ.items() if n not in RANK_VARIABLES},
            **own,
            **(thread_variables(len(cores)) if cores else {}),
            "KERASDIST_SECRET": job.secret,
            # The order of a `set` of strings is the same in all tasks, on all hosts and
            # after a restart.
            "PYTHONHASHSEED": job.environ.get("PYTHONHASHSEED")
            or _hash_seed(job.secret),
            **self.environ,
            "PYTHONUNBUFFERED": "1",
            "TF_CONFIG": json.dumps(
                {
                    "cluster": job.part.cluster,
                    "task": {"type": task.kind, "index": task.index},
                }
            ),
        }
        if job.elastic is not None:
            environ["KERASDIST_INCARNATION"] = str(incarnation)
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
            environ.update(job.function.environ(result_file.fileno()))
            # The function's modules are found by the caller's `sys.path`: until then
            # nothing of the working folder is imported.
            arguments = ["-P", *arguments]
        if job.hosts is not None:
            shown = chief and not piped and os.isatty(1)
            window = window_of(1) if shown else None
            arguments, environ = job.hosts.command(
                (task.kind, task.index), arguments, environ, window, own
            )
        command = [
            *(sys.executable, "-I", "-S", str(bootstrap.__file__)),
            str(os.getpid()),
            str(job.group) if chief else "-",
            ",".join(map(str, cores)) or "-",
            *("--", sys.executable, *arguments),
        ]
        log = None if path is None else _opened(path, append=incarnation > 0)
        with contextlib.ExitStack() as undo:
            errors_to = None if chief else subprocess.STDOUT
            if chief and (opened := undo.enter_context(self.output.chief_errors())):
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
            copied = pump.add(self.output.lines_of(task), process.stdout, log)
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
