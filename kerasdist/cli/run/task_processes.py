"""The specification of a job of `kerasdist run`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path

from kerasdist.cli.run.gpus import Division
from kerasdist.cli.run.hosts.check import TasksOnHosts
from kerasdist.cli.run.nodes import LocalPart
from kerasdist.cluster.tf_config import grace_seconds
from kerasdist.errors import ClusterError
from kerasdist.run_function.launcher import (
    CALL_VARIABLE,
    OUTCOME_VARIABLE,
    RESULT_VARIABLE,
)
from kerasdist.transport.liveness.launcher_pipe import (
    descriptor_in_words,
    descriptor_named,
)

# The files of a job that runs a function: its call, and the result of each task.

# The caller reads all the time, unless it is stopped.
_SEND_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class FunctionFiles:
    """The descriptors that the caller has given the launcher.

    Attributes:
        call: Descriptor of the file with the call.
        outcome: Socket that takes the outcome, a message for each task.
    """

    call: int
    outcome: socket.socket

    @staticmethod
    def take_from(environ: MutableMapping[str, str]) -> FunctionFiles | None:
        """Return the files; None if the job runs a script.

        Args:
            environ: The environment, which isn't to pass them on.
        """
        call = descriptor_named(environ.pop(CALL_VARIABLE, ""), stat.S_ISREG)
        outcome = descriptor_named(environ.pop(OUTCOME_VARIABLE, ""), stat.S_ISSOCK)
        if call is None or outcome is None:
            return None
        for descriptor in (call, outcome):
            os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=outcome)
        sock.settimeout(_SEND_SECONDS)
        return FunctionFiles(call, sock)

    def environ(self, result: int) -> dict[str, str]:
        """Return the variables of a task.

        Args:
            result: Descriptor of its result's file.
        """
        return {
            CALL_VARIABLE: descriptor_in_words(self.call),
            RESULT_VARIABLE: descriptor_in_words(result),
        }

    def refuse(self, faults: Sequence[str]) -> None:
        """Report why nothing was started."""
        self.send({"faults": list(faults)})

    def send(self, message: object, descriptor: int | None = None) -> None:
        """Send a message to the caller; it may have ended.

        Args:
            message: Of JSON's types.
            descriptor: A descriptor that is sent along.
        """
        data = json.dumps(message).encode()
        passed = [] if descriptor is None else [descriptor]
        try:
            socket.send_fds(self.outcome, [data], passed)
        except OSError:
            # It sees that a message is missing, or doesn't exist any more.
            pass


# The options of `kerasdist run` for elastic jobs.

WITH_VALUE = ("--min-workers", "--max-workers", "--restarts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """The settings of an elastic job.

    Attributes:
        min_workers: The smallest number of workers that go on.
        restarts: How many times workers are started again, all of them together.
        grace: Seconds from SIGTERM to SIGKILL.
        size: The number of workers with which the job starts.
        max_workers: The number of workers to which it may grow.
    """

    min_workers: int
    restarts: int
    grace: float
    size: int
    max_workers: int

    @property
    def grows(self) -> bool:
        """Whether workers may be added to the job."""
        return self.max_workers > self.size

    @property
    def environ(self) -> dict[str, str]:
        """The variables by which the strategy of a task knows the settings."""
        environ = {
            "KERASDIST_ELASTIC": "1",
            "KERASDIST_MIN_WORKERS": str(self.min_workers),
        }
        if self.grows:
            environ["KERASDIST_START_WORKERS"] = str(self.size)
        return environ


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to those of `run`."""
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="a worker that is lost doesn't end the job: the others go on, and the "
        "exit code is 0 if one of them finishes",
    )
    parser.add_argument(
        "--min-workers",
        metavar="M",
        help="with --elastic: the smallest number of workers that go on (default: 1)",
    )
    parser.add_argument(
        "--max-workers",
        metavar="M",
        help="with --elastic: the number of workers to which the job may grow; SIGUSR1 "
        "to the launcher adds one (default: N)",
    )
    parser.add_argument(
        "--restarts",
        metavar="R",
        help="with --elastic: how many times lost workers are started again, all of "
        "them together; the first time after 1 s, then 2 s, 4 s and so on (default: "
        "0). A worker that was sent SIGTERM isn't started again",
    )


def read_options(
    arguments: argparse.Namespace,
    size: int,
    number: Callable[[str, str, int], int],
    faults: list[str],
) -> ElasticOptions | None:
    """Return the settings; None without `--elastic`.

    Args:
        arguments: The parsed arguments.
        size: Number of workers.
        number: Returns an option's number, from its name, its text and its minimum.
        faults: Takes a message about each value that can't be used.
    """
    given = {
        "--min-workers": arguments.min_workers,
        "--max-workers": arguments.max_workers,
        "--restarts": arguments.restarts,
    }
    if not arguments.elastic:
        faults += [
            f"{name} is an option of elastic jobs. Received: {name} {text} without "
            "--elastic. Expected both or neither"
            for name, text in given.items()
            if text is not None
        ]
        return None
    least = number("--min-workers", given["--min-workers"] or "1", 1)
    if least > size:
        faults.append(
            "--min-workers must be at most the number of workers. Received: "
            f"--min-workers {least} and -n {size}"
        )
    most = number("--max-workers", given["--max-workers"] or str(size), 1)
    if most < size:
        faults.append(
            "--max-workers must be at least the number of workers. Received: "
            f"--max-workers {most} and -n {size}"
        )
    restarts = number("--restarts", given["--restarts"] or "0", 0)
    grace = 0.0
    try:
        grace = grace_seconds(os.environ)
    except ClusterError as error:
        faults.append(str(error))
    return ElasticOptions(
        min_workers=least,
        restarts=restarts,
        grace=grace,
        size=size,
        max_workers=max(most, size),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskProcess:
    """One process of a job.

    Attributes:
        kind: "worker" or "ps", as `TF_CONFIG` has it.
        index: Index among those; of a worker its rank.
    """

    kind: str
    index: int

    def __str__(self) -> str:
        """Return its name in messages: `rank 1` or `server 0`."""
        return f"{'server' if self.is_server else 'rank'} {self.index}"

    @property
    def is_server(self) -> bool:
        """Whether it's a parameter server."""
        return self.kind == "ps"

    @property
    def is_chief(self) -> bool:
        """Whether it's rank 0, which has the terminal."""
        return self.kind == "worker" and self.index == 0

    @property
    def tag(self) -> str:
        """The tag of its lines: `1` or `ps 0`."""
        return f"ps {self.index}" if self.is_server else f"{self.index}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job to run; everything is checked.

    Attributes:
        size: Number of workers of this launcher.
        servers: Number of its parameter servers.
        command: The arguments of the interpreter: the script or `-m module`, and its
            own arguments.
        log_dir: Folder of the logs, which exists. None: no logs.
        tagged: Whether the output of all but the chief is copied to standard output.
        cores: Cores by rank; empty: not bound. Servers never are.
        gpus: The division of each host's GPUs, by its name; "" for this one.
        environ: The user's environment.
        quiet: Whether the lines that TensorFlow writes at its start aren't shown.
        elastic: The settings of an elastic job; None: it isn't one.
        hosts: The tasks' hosts; None: all are on this one.
        part: The part of the job that this launcher runs; None: it runs all of it.
        function: The files of the function that it runs; None: it runs a script.
    """

    size: int
    servers: int
    command: tuple[str, ...]
    log_dir: Path | None
    environ: Mapping[str, str]
    tagged: bool = False
    quiet: bool = False
    cores: tuple[tuple[int, ...], ...] = ()
    gpus: Mapping[str, Division] = dataclasses.field(default_factory=dict)
    elastic: ElasticOptions | None = None
    hosts: TasksOnHosts | None = None
    part: LocalPart | None = None
    function: FunctionFiles | None = None

    def first(self, kind: str) -> int:
        """Return the index of the first task of a kind."""
        return 0 if self.part is None else self.part.first[kind]

    @property
    def tasks(self) -> tuple[TaskProcess, ...]:
        """The processes of the start: the workers by rank, then the servers."""
        return (
            *self._several("worker", self.size),
            *self._several("ps", self.servers),
        )

    def _several(self, kind: str, count: int) -> Iterator[TaskProcess]:
        first = self.first(kind)
        return (TaskProcess(kind=kind, index=i) for i in range(first, first + count))

    @property
    def all_tasks(self) -> tuple[TaskProcess, ...]:
        """`tasks`, and the workers that may be added to an elastic job."""
        if self.elastic is None or not self.elastic.grows:
            return self.tasks
        most = self.elastic.max_workers
        added = (
            TaskProcess(kind="worker", index=rank) for rank in range(self.size, most)
        )
        return (*self.tasks, *added)

    @property
    def world_size(self) -> int:
        """The largest number of workers, with those of other launchers."""
        if self.part is not None:
            return len(self.part.cluster["worker"])
        return sum(not task.is_server for task in self.all_tasks)

    def host_of(self, task: TaskProcess) -> str:
        """Return the name of a task's host; empty for this one, if all are on it."""
        if self.hosts is None:
            return ""
        return self.hosts.places[task.kind, task.index].host.name

    def workers_on_host_of(self, task: TaskProcess) -> list[TaskProcess]:
        """Return all workers that a task's host may have, by rank."""
        host = self.host_of(task)
        return [
            each
            for each in self.all_tasks
            if not each.is_server and self.host_of(each) == host
        ]

    @property
    def kinds(self) -> str:
        """The name of all of them together, in messages."""
        return "workers and servers" if self.servers else "workers"

    def log(self, task: TaskProcess, *, again: bool = False) -> Path | None:
        """Return the path of a task's log; None if it has none.

        Args:
            task: The task.
            again: Whether it is started again: then the chief has a log, too.
        """
        if self.log_dir is None or (task.is_chief and not again):
            return None
        kind = "ps" if task.is_server else "rank"
        return self.log_dir / f"{kind}-{task.index}.log"
