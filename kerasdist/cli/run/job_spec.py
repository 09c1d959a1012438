"""The specification of a job of `kerasdist run`: its tasks, and what each gets."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import itertools
import json
import logging
import os
import signal
import socket
import stat
import struct
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TypeVar

from kerasdist.cli.console import print_line
from kerasdist.cli.run.hosts import agent
from kerasdist.cli.run.hosts.places import TaskProcess, TasksOnHosts
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

# The assignment of cores to workers: pure functions, and one look at the machine.

_Unit = TypeVar("_Unit")
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


def shares(units: Sequence[_Unit], size: int) -> list[tuple[_Unit, ...]]:
    """Divide cores or GPUs among workers, in order.

    Args:
        units: At least one of them, neighbours next to each other.
        size: Number of workers.

    Returns:
        One tuple per rank. With enough units they are disjoint, use all, and differ
        by at most one unit; with fewer units than workers each worker has one, and
        the workers are spread evenly.
    """
    count = len(units)
    bounds = [rank * count // size for rank in range(size + 1)]
    return [
        tuple(units[first : max(first + 1, last)])
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


# The signals with which a job is ended from outside, beside SIGKILL.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# The signal with which a worker is added to an elastic job.
GROW_SIGNAL = signal.SIGUSR1

# The files of a job that runs a function: its call, and the result of each task.

# The caller reads all the time, unless it is stopped.
_SEND_SECONDS = 60.0


def _end_with_caller(sock: socket.socket) -> None:
    """Let this process end the job when the caller ends, in whatever way.

    Args:
        sock: A socket that the caller has made.
    """
    # A notebook's server may run under `nohup`; this process isn't ended by a terminal.
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            interrupt = number == signal.SIGINT
            default = signal.default_int_handler if interrupt else signal.SIG_DFL
            signal.signal(number, default)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # The kernel of a notebook is often killed.
    agent.prctl(agent.PDEATHSIG, signal.SIGHUP)
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if os.getppid() != struct.unpack("3i", credentials)[0]:
        raise SystemExit(1)


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
        _end_with_caller(sock)
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

    def refuse(self, faults: Sequence[str]) -> int:
        """Report why nothing was started; return the launcher's exit code."""
        self.send({"faults": list(faults)})
        return 2

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

# What CUDA reads as no GPU.
_NONE = "-1"
_Shares = tuple[tuple[str, ...], ...]


def divide_all(
    option: str,
    found: Mapping[str, tuple[Sequence[str], str]],
    workers: Mapping[str, int],
    faults: list[str],
) -> dict[str, _Shares]:
    """Divide the GPUs of each host among its workers, and tell the user.

    Args:
        option: The value of `--gpus`, which has been checked.
        found: By host, "" for this one, what `find_gpus` returns there.
        workers: The largest number of workers of each host.
        faults: Takes a message about each host where that isn't possible.

    Returns:
        By host the GPUs of each of its workers, in their order, without the hosts whose
        tasks see what they see without a launcher.
    """
    divided = {}
    texts: dict[str, list[str]] = {}
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
        mine = divide(option, names, count, faults, host)
        if mine is not None:
            divided[host] = mine
        if mine is not None and names:
            texts.setdefault(division_in_words(len(names), mine), []).append(host)
    parts = [
        f"{', '.join(hosts)}: {text}" if any(hosts) else text
        for text, hosts in texts.items()
    ]
    if parts and not faults:
        print_line("; ".join(parts))
    return divided


def divide(
    option: str, found: Sequence[str], workers: int, faults: list[str], host: str = ""
) -> _Shares | None:
    """Return the GPUs of each worker of a host; None: they aren't divided.

    Args:
        option: The value of `--gpus`, which has been checked.
        found: The host's GPUs.
        workers: The largest number of its workers.
        faults: Takes a message if that isn't possible.
        host: The host's name in messages; empty: this one.
    """
    count = len(found)
    if option == "all" or (option == "auto" and not found) or not workers:
        return None
    if option in ("none", "0"):
        return ((),) * workers
    here = f"{host} has" if host else "this host has"
    have = f"{here} {counted(count, 'GPU')} for {counted(workers, 'worker')}"
    parts = any(name.startswith("MIG") for name in found)
    wanted = None if option == "auto" else workers * int(option)
    if wanted is None and count < workers:
        # Two processes on one GPU each take all of its memory.
        faults.append(
            f"{have}. Expected at least one for each worker. Start {count} of them "
            "there, or hide the GPUs with --gpus none, or let the workers share them "
            "with --gpus all (TF_FORCE_GPU_ALLOW_GROWTH=true lets several processes "
            "share the memory of one)"
        )
        return None
    if parts and option not in ("auto", "1"):
        faults.append(
            f"{here} parts of GPUs (MIG), of which CUDA gives a process only one. "
            f"Received: --gpus {option}. Expected --gpus 1 or --gpus auto"
        )
        return None
    if wanted is not None and count < wanted:
        faults.append(
            f"{have}, which isn't enough. Received: --gpus {option}. Expected "
            f"{wanted} GPUs or more there, fewer workers, or --gpus auto"
        )
        return None
    if wanted is None:
        wanted = workers if parts else count
    return tuple(shares(found[:wanted], workers))


def division_in_words(found: int, shares: _Shares) -> str:
    """Describe the division of the GPUs of a host.

    Args:
        found: The number of its GPUs.
        shares: The GPUs of each of its workers.
    """
    used, gpus = sum(map(len, shares)), counted(found, "GPU")
    if not used:
        return f"no worker uses the {gpus}"
    most, least = max(map(len, shares)), min(map(len, shares))
    each = f"{least} each" if most == least else f"{least} or {most} each"
    rest = "" if used == found else f"; {found - used} not used"
    return f"{gpus} for {counted(len(shares), 'worker')}, {each}{rest}"


# As other launchers (torchrun) name the variables of a task's place. Strategies don't
# read them.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


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
        gpus: By host, "" for this one, the GPUs of each of its workers; without the
            hosts whose GPUs aren't divided.
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
    gpus: Mapping[str, _Shares] = dataclasses.field(default_factory=dict)
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

    def host_of(self, task: TaskProcess) -> str:
        """Return the name of a task's host; empty for this one, if all are on it."""
        if self.hosts is None:
            return ""
        return self.hosts.places[task].host.name

    def place_variables(self, task: TaskProcess) -> dict[str, str]:
        """Return a task's variables: its rank, that on its host, and its GPUs.

        Sizes count all workers that the job may have: those that an elastic job may
        add, too. A server has no rank.

        Args:
            task: One of the tasks, also one that is started again.
        """
        host = self.host_of(task)
        gpus = self.gpus.get(host)
        if task.is_server:
            return {} if gpus is None else {GPU_VARIABLE: _NONE}
        workers = [each for each in self.all_tasks if not each.is_server]
        beside = [each for each in workers if self.host_of(each) == host]
        local = beside.index(task)
        return {
            "RANK": str(task.index),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(len(self.part.cluster["worker"])),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            **({} if gpus is None else {GPU_VARIABLE: ",".join(gpus[local]) or _NONE}),
        }

    @property
    def hash_seed(self) -> str:
        """The PYTHONHASHSEED of all tasks.

        The order of a `set` of strings is the same in all of them, on all hosts and
        after a restart.
        """
        digest = hmac.digest(self.secret.encode(), b"PYTHONHASHSEED", "sha256")
        own = str(int.from_bytes(digest[:4], "big"))
        return self.environ.get("PYTHONHASHSEED") or own

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
