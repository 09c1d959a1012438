"""The specification of a job of `kerasdist run`: its tasks, and what each gets."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import socket
import stat
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from kerasdist.cli.console import print_line
from kerasdist.cli.run.hosts.places import TasksOnHosts
from kerasdist.cli.run.hosts.probe import GPU_VARIABLE
from kerasdist.cli.run.nodes import LocalPart
from kerasdist.cli.run.options import ElasticOptions
from kerasdist.placement.plan import counted
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
        # The caller sees that a message is missing, or doesn't exist any more.
        with contextlib.suppress(OSError):
            socket.send_fds(self.outcome, [data], passed)


# The division of the GPUs of all hosts of a job, and the lines about it.


def divide_all(
    option: str,
    found: Mapping[str, tuple[Sequence[str], str]],
    workers: Mapping[str, int],
    faults: list[str],
) -> dict[str, Division]:
    """Divide the GPUs of each host among its workers, and tell the user.

    Args:
        option: The value of `--gpus`, which has been checked.
        found: By host, "" for this one, what `find_gpus` returns there.
        workers: The largest number of workers of each host.
        faults: Takes a message about each host where that isn't possible.
    """
    divisions = {}
    for host, count in workers.items():
        names, reason = found.get(host, ((), ""))
        if reason and option != "auto":
            faults.append(
                f"{host or 'this host'} can't list its GPUs: {reason}. Received: "
                f"--gpus {option}. Expected a working nvidia-smi, or "
                "CUDA_VISIBLE_DEVICES with the GPUs of the job"
            )
            continue
        if reason:
            print_line(
                f"the GPUs of {host or 'this host'} aren't divided among the workers: "
                f"{reason}. Set CUDA_VISIBLE_DEVICES, or --gpus all or none",
                logging.WARNING,
            )
        divisions[host] = divide(option, names, count, faults, host)
    text = divisions_in_words(list(divisions.values()))
    if text and not faults:
        print_line(text)
    return divisions


# What CUDA reads as no GPU.
_NONE = "-1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """The GPUs of the workers of one host.

    Attributes:
        host: The host's name in messages; empty: this one.
        found: The GPUs that the host has for the job.
        shares: The GPUs of each of its workers, in their order; None: the tasks see
            what they see without a launcher.
    """

    host: str = ""
    found: tuple[str, ...] = ()
    shares: tuple[tuple[str, ...], ...] | None = None

    def environ(self, worker: int | None) -> dict[str, str]:
        """Return the variable of a task.

        Args:
            worker: The worker's index on its host; None: a server.
        """
        if self.shares is None:
            return {}
        names = () if worker is None else self.shares[worker]
        return {GPU_VARIABLE: ",".join(names) or _NONE}


def divide(
    option: str, found: Sequence[str], workers: int, faults: list[str], host: str = ""
) -> Division:
    """Divide a host's GPUs.

    Args:
        option: The value of `--gpus`, which has been checked.
        found: The host's GPUs.
        workers: The largest number of its workers.
        faults: Takes a message if that isn't possible.
        host: The host's name in messages; empty: this one.
    """
    count, names = len(found), tuple(found)
    undivided = Division(host=host, found=names)
    if option == "all" or (option == "auto" and not found) or not workers:
        return undivided
    if option in ("none", "0"):
        return Division(host=host, found=names, shares=((),) * workers)
    here = f"{host} has" if host else "this host has"
    have = f"{here} {counted(count, 'GPU')} for {counted(workers, 'worker')}"
    parts = any(name.startswith("MIG") for name in found)
    fault = ""
    if option == "auto" and count < workers:
        # Two processes on one GPU each take all of its memory.
        fault = (
            f"{have}. Expected at least one for each worker. Start {count} of them "
            "there, or hide the GPUs with --gpus none, or let the workers share them "
            "with --gpus all (TF_FORCE_GPU_ALLOW_GROWTH=true lets several processes "
            "share the memory of one)"
        )
    elif parts and option not in ("auto", "1"):
        fault = (
            f"{here} parts of GPUs (MIG), of which CUDA gives a process only one. "
            f"Received: --gpus {option}. Expected --gpus 1 or --gpus auto"
        )
    elif option != "auto" and count < workers * int(option):
        fault = (
            f"{have}, which isn't enough. Received: --gpus {option}. Expected "
            f"{workers * int(option)} GPUs or more there, fewer workers, or --gpus auto"
        )
    if fault:
        faults.append(fault)
        return undivided
    if option != "auto" or parts:
        count = workers * (1 if option == "auto" else int(option))
    bounds = [rank * count // workers for rank in range(workers + 1)]
    shares = tuple(names[first:last] for first, last in itertools.pairwise(bounds))
    return Division(host=host, found=names, shares=shares)


def divisions_in_words(divisions: Sequence[Division]) -> str:
    """Return the line for the user; empty if nothing is divided.

    Args:
        divisions: That of each host.
    """
    texts: dict[str, list[str]] = {}
    for each in divisions:
        if each.shares is not None and each.found:
            texts.setdefault(_of_host(each), []).append(each.host)
    parts = [
        f"{', '.join(filter(None, hosts))}: {text}" if any(hosts) else text
        for text, hosts in texts.items()
    ]
    return "; ".join(parts)


def _of_host(division: Division) -> str:
    shares = division.shares or ()
    used = sum(map(len, shares))
    all_of_them = len(division.found)
    gpus = counted(all_of_them, "GPU")
    if not used:
        return f"no worker uses the {gpus}"
    most, least = max(map(len, shares)), min(map(len, shares))
    each = f"{least} each" if most == least else f"{least} or {most} each"
    rest = "" if used == all_of_them else f"; {all_of_them - used} not used"
    return f"{gpus} for {counted(len(shares), 'worker')}, {each}{rest}"


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
        part: The part of the job that this launcher runs, and the ports.
        function: The files of the function that it runs; None: it runs a script.
        secret: The secret of all tasks.
        group: The launcher's process group, which the chief joins.
    """

    size: int
    servers: int
    command: tuple[str, ...]
    log_dir: Path | None
    environ: Mapping[str, str]
    part: LocalPart
    tagged: bool = False
    quiet: bool = False
    cores: tuple[tuple[int, ...], ...] = ()
    gpus: Mapping[str, Division] = dataclasses.field(default_factory=dict)
    elastic: ElasticOptions | None = None
    hosts: TasksOnHosts | None = None
    function: FunctionFiles | None = None
    secret: str = dataclasses.field(default="", repr=False)
    group: int = 0

    @property
    def tasks(self) -> tuple[TaskProcess, ...]:
        """The processes of the start: the workers by rank, then the servers."""
        return tuple(
            TaskProcess(kind=kind, index=self.part.first[kind] + i)
            for kind, count in (("worker", self.size), ("ps", self.servers))
            for i in range(count)
        )

    @property
    def all_tasks(self) -> tuple[TaskProcess, ...]:
        """`tasks`, and the workers that may be added to an elastic job."""
        most = self.elastic.max_workers if self.elastic and self.grows else 0
        ranks = range(self.size, most)
        return (*self.tasks, *(TaskProcess(kind="worker", index=i) for i in ranks))

    @property
    def grows(self) -> bool:
        """Whether workers may be added to the job."""
        return self.elastic is not None and self.elastic.grows

    @property
    def world_size(self) -> int:
        """The largest number of workers, with those of other launchers."""
        return len(self.part.cluster["worker"])

    def address(self, task: TaskProcess) -> str:
        """Return the address of a task, `"host:port"`."""
        return self.part.cluster[task.kind][task.index]

    def host_of(self, task: TaskProcess) -> str:
        """Return the name of a task's host; empty for this one, if all are on it."""
        if self.hosts is None:
            return ""
        return self.hosts.places[task.kind, task.index].host.name

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
