"""The start of the workers and servers of `kerasdist run`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from kerasdist.cli.run import bootstrap
from kerasdist.cli.run.cores import thread_variables
from kerasdist.cli.run.job import JobSpec, Task
from kerasdist.cli.run.output import LineTagger, OutputPump, Tail, WholeLines
from kerasdist.transport.liveness.final_error import (
    ERROR_VARIABLE,
    FinalError,
)
from kerasdist.transport.liveness.launcher_pipe import descriptor_in_words

__all__ = ["Launch", "Started"]


@dataclasses.dataclass(kw_only=True, eq=False)
class Started:
    """A started task.

    Attributes:
        task: The task.
        process: Its process.
        tail: The end of its output, if the pump copies that.
        log: The file with its output, if it has one.
        error_file: Takes its last error, if its output is shown at once.
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

    task: Task
    process: subprocess.Popen[bytes]
    tail: Tail | None
    log: Path | None = None
    error_file: IO[bytes] | None = None
    code: int | None = None
    ended_at: int = 0
    ended_by_us: bool = False
    missed_by: dict[int, float] = dataclasses.field(default_factory=dict)
    reason: str = ""
    lost: bool = False
    replaced: bool = False
    gave_up: bool = False

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The settings with which tasks are started.

    Attributes:
        job: What to run.
        group: The launcher's process group, which the chief joins.
        secret: The job's secret.
        environ: Further variables of all tasks.
        pass_fds: Descriptors that all inherit.
        pump: Copies the output of tasks; None: the tasks write to their logs.
    """

    job: JobSpec
    group: int
    secret: str
    environ: Mapping[str, str]
    pass_fds: tuple[int, ...]
    pump: OutputPump | None

    def start(self) -> list[Started]:
        """Start all tasks.

        Raises:
            OSError: One can't be started; others may run.
        """
        # The sockets listen before any worker runs: no other process can take a port
        # in between, and a worker that is early can connect to all others.
        started = []
        with contextlib.ExitStack() as listeners:
            sockets = []
            tasks = self.job.tasks
            for _ in tasks:
                server = listeners.enter_context(socket.socket())
                server.bind(("127.0.0.1", 0))
                # A server that was lost can be started again at this address, though
                # its connections linger. Not before `bind`: ports would be shared.
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.listen(1024)
                sockets.append(server)
            addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
            cluster = {"worker": addresses[: self.job.size]}
            if self.job.servers:
                cluster["ps"] = addresses[self.job.size :]
            for task, server in zip(tasks, sockets, strict=True):
                started.append(self._start_task(task, cluster, server.fileno()))
        # Our copies are closed now, else a dead worker's port would stay open.
        if self.pump is not None:
            self.pump.start()
        return started

    def _start_task(
        self, task: Task, cluster: dict[str, list[str]], listen_fd: int
    ) -> Started:
        job = self.job
        chief = task.is_chief
        # A server may run on any core: it waits for most of the time.
        cores = job.cores[task.index] if job.cores and not task.is_server else ()
        place = {"type": task.kind, "index": task.index}
        path = job.log(task)
        # The chief writes straight to the terminal, with its progress bars; to a file
        # or another program the pump writes for it, or lines would be mixed.
        piped = self.pump is not None and (not chief or not os.isatty(1))
        # The errors of all others are read from their logs.
        shown = chief or self.pump is not None
        error_file = tempfile.TemporaryFile() if shown else None  # noqa: SIM115
        inherited = [listen_fd, *self.pass_fds]
        errors = {}
        if error_file is not None:
            inherited.append(error_file.fileno())
            errors[ERROR_VARIABLE] = descriptor_in_words(error_file.fileno())
        environ = {
            **job.environ,
            **(thread_variables(len(cores)) if cores else {}),
            "KERASDIST_LISTEN_FD": str(listen_fd),
            "KERASDIST_SECRET": self.secret,
            **self.environ,
            **errors,
            "PYTHONUNBUFFERED": "1",
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": place}),
        }
        command = [
            *(sys.executable, "-I", "-S", str(bootstrap.__file__)),
            str(os.getpid()),
            str(self.group) if chief else "-",
            ",".join(map(str, cores)) or "-",
            *("--", sys.executable, *job.command),
        ]
        log: IO[bytes] | None = None if path is None else path.open("wb", buffering=0)
        process = subprocess.Popen(
            command,
            stdin=None if chief else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else log,
            stderr=None if chief else subprocess.STDOUT,
            bufsize=0,
            env=environ,
            pass_fds=inherited,
            start_new_session=not chief,
        )
        tail = None
        if piped and self.pump is not None and process.stdout is not None:
            if chief:
                self.pump.add(WholeLines(), process.stdout)
            else:
                tag = LineTagger(f"[{task.tag}] ".encode())
                tail = self.pump.add(tag, process.stdout, log)
        elif log is not None:
            log.close()
        return Started(
            task=task, process=process, tail=tail, log=path, error_file=error_file
        )
