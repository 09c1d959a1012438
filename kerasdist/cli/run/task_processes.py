"""The specification of a job of `kerasdist run`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from kerasdist.cli.run.elastic.options import ElasticOptions
from kerasdist.cli.run.function.files import FunctionFiles
from kerasdist.cli.run.gpus.division import Division
from kerasdist.cli.run.hosts.tasks import TasksOnHosts
from kerasdist.cli.run.nodes.rendezvous import LocalPart


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

    def workers_beside(self, task: TaskProcess) -> list[TaskProcess]:
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
