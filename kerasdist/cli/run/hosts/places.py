"""The hosts of a job: how they are reached, their check, and the tasks on each."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import json
import os
import select
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from kerasdist.cli.run.hosts import agent, client, probe
from kerasdist.cli.run.options import Host, HostOptions
from kerasdist.cluster.address import is_this_host
from kerasdist.transport.deadline import Deadline


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


# The commands by which a Python program runs on a host.

# Programs by one connection besides the first: sshd's MaxSessions is 10 by default.
MOST_SHARED = 9

_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
    """The way to run programs on hosts.

    Attributes:
        options: The settings.
        control: The folder of the sockets by which connections to a host are shared.
    """

    options: HostOptions
    control: Path

    def command(
        self,
        host: Host,
        program: ModuleType,
        *options: str,
        first: bool = False,
        alone: bool = False,
    ) -> list[str]:
        """Return the command that runs a program on a host.

        Args:
            host: The host.
            program: A module that uses the standard library alone: its text is sent.
            *options: Options of the interpreter.
            first: Whether other commands share its connection.
            alone: Whether it has a connection of its own.
        """
        arguments = ["-P", *options, "-c", inspect.getsource(program)]
        if is_here(host):
            return [sys.executable, *arguments]
        shared = f"ControlPath={'none' if alone else f'{self.control}/%C'}"
        return [
            *(*self.options.ssh, *_OPTIONS),
            *("-o", f"ControlMaster={'yes' if first else 'no'}", "-o", shared),
            *("--", host.target),
            shlex.join([self.options.python, *arguments]),
        ]


def is_here(host: Host) -> bool:
    """Return whether a host is this one, which needs no ssh."""
    if host.user:
        return False
    return host.name == socket.gethostname() or is_this_host(host.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one task.

    Attributes:
        host: Its host.
        family: The family of its socket's address.
        address: The address to which its host binds that socket.
    """

    host: Host
    family: int
    address: tuple[str | int, ...]

    @property
    def text(self) -> str:
        """The address for the other tasks, `"host:port"`."""
        return f"{self.host.in_address}:{self.address[1]}"


def assign(
    hosts: Sequence[Host], workers: int, servers: int
) -> dict[Host, list[TaskProcess]]:
    """Return the tasks of each host: workers by slots, then servers in turn.

    Args:
        hosts: The hosts; there are enough slots.
        workers: Number of workers.
        servers: Number of parameter servers, which need no slots.
    """
    slots = [host for host in hosts for _ in range(host.slots)]
    found: dict[Host, list[TaskProcess]] = {}
    for rank, host in enumerate(slots[:workers]):
        found.setdefault(host, []).append(TaskProcess(kind="worker", index=rank))
    in_turn = itertools.cycle(list(found))
    for index, host in zip(range(servers), in_turn, strict=False):
        found[host].append(TaskProcess(kind="ps", index=index))
    return found


# The start of a task that runs on one of several hosts.

# Of the launcher's environment, what tasks on other hosts get, besides `-x`.
_PREFIXES = (
    *("KERASDIST_", "KERAS_", "TF_", "XLA_", "OMP_", "NCCL_", "MKL_", "OPENBLAS_"),
    "PYTHON",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasksOnHosts:
    """The commands of tasks on their hosts.

    Attributes:
        places: The place of each task.
        reach: How hosts are reached.
        gpus: What `find_gpus` returns on each host, by its name.
    """

    places: Mapping[TaskProcess, Place]
    reach: Reach
    gpus: Mapping[str, tuple[Sequence[str], str]]

    @property
    def cluster(self) -> dict[str, tuple[str, ...]]:
        """The addresses of all tasks, as `TF_CONFIG` has them."""
        cluster: dict[str, tuple[str, ...]] = {}
        for task in sorted(self.places, key=lambda task: task.index):
            addresses = cluster.get(task.kind, ())
            cluster[task.kind] = (*addresses, self.places[task].text)
        return cluster

    def workers_by_host(self) -> dict[str, int]:
        """Return the largest number of workers of each host, by its name."""
        found: dict[str, int] = {}
        for task, place in self.places.items():
            found.setdefault(place.host.name, 0)
            found[place.host.name] += not task.is_server
        return found

    def command(
        self,
        task: TaskProcess,
        command: Sequence[str],
        environ: Mapping[str, str],
        window: tuple[int, int] | None,
        mine: Collection[str],
    ) -> tuple[list[str], dict[str, str]]:
        """Return the arguments and the environment of the process on this host.

        Args:
            task: The task.
            command: The arguments of its interpreter.
            environ: Its environment, as if it were on this host.
            window: The terminal's lines and columns, if its output is shown there.
            mine: The names of variables that are the task's own.
        """
        place = self.places[task]
        exported = {
            name: value
            for name, value in environ.items()
            # Descriptors are of this host alone.
            if not (name.startswith("KERASDIST_") and name.endswith("_FD"))
            and (
                name.startswith(_PREFIXES)
                or name == "LD_PRELOAD"
                or name in self.reach.options.exported
                or name in mine
            )
        }
        there = [each for each in self.places if self.places[each].host == place.host]
        alone = task in there[MOST_SHARED:]
        facts = {
            "host": place.host.target,
            "reach": self.reach.command(place.host, agent, "-I", "-S", alone=alone),
            "task": {
                "folder": os.getcwd(),
                "command": list(command),
                "environ": exported,
                "family": place.family,
                "address": place.address,
                "window": window,
                "errors": task.is_chief,
            },
        }
        return [client.__file__], {**environ, "KERASDIST_REMOTE": json.dumps(facts)}


# Seconds until all hosts must have answered; ssh gives up a connection earlier.
ANSWER_SECONDS = 60.0
_END_SECONDS = 2.0
_MOST = 65536


class HostsError(Exception):
    """Hosts can't be used; `faults` has a message about each."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = list(faults)


class HostProbe:
    """The process that answers for one host, and keeps its ports.

    Args:
        host: The host.
        reach: How it is reached.
        question: The first question, see `kerasdist.cli.run.hosts.probe`.
    """

    def __init__(self, host: Host, reach: Reach, question: Mapping[str, Any]) -> None:
        self.host = host
        # Not a pipe, which nothing would read while the job runs.
        self.errors: IO[bytes] = os.fdopen(os.memfd_create("kerasdist-errors"), "w+b")
        self.process = subprocess.Popen(
            reach.command(host, probe, first=True),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            # Ctrl-C is for the tasks, whose connections these are.
            start_new_session=True,
            bufsize=0,
        )
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("The process was started without pipes.")
        self._questions, self._answers = self.process.stdin, self.process.stdout
        self.ask(question)

    def ask(self, question: Mapping[str, Any], seconds: float = ANSWER_SECONDS) -> None:
        """Ask a question, which must be answered in `seconds`."""
        self._deadline = Deadline(seconds)
        with contextlib.suppress(BrokenPipeError):
            self._questions.write(json.dumps(question).encode() + b"\n")

    def result(self) -> dict[str, Any] | str:
        """Wait for the answer; return it, or the reason why there is none."""
        written, left = b"", self._deadline.remaining
        while select.select([self._answers], [], [], left())[0] and (
            data := os.read(self._answers.fileno(), _MOST)
        ):
            written += data
            # What the host's shell has written may stand before the answer.
            line = written.rpartition(b"\n")[0].split(b"\n")[-1]
            with contextlib.suppress(ValueError):
                return dict(json.loads(line))
        try:
            code = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it hasn't answered within {self._deadline.seconds:g} s"
        self.errors.seek(0)
        text = self.errors.read().decode(errors="replace").strip()
        return text.splitlines()[-1] if text else f"ssh has ended with {code}"

    def close(self) -> None:
        """End the process."""
        for pipe in (self._questions, self._answers, self.errors):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def on_hosts(
    options: HostOptions,
    workers: int,
    servers: int,
    command: Sequence[str],
    *,
    finds_gpus: bool = False,
) -> Iterator[TasksOnHosts]:
    """Check the hosts, and keep connections to them in the block.

    Args:
        options: The settings.
        workers: The largest number of workers.
        servers: The number of parameter servers.
        command: The arguments of the tasks' interpreter.
        finds_gpus: Whether each lists its GPUs.

    Raises:
        HostsError: Some can't be used; all of them are named.
    """
    tasks = assign(options.hosts, workers, servers)
    counts = {host: len(some) for host, some in tasks.items()}
    with asking(options, counts, command, finds_gpus=finds_gpus) as (reach, probes):
        answers = {each.host: each.result() for each in probes}
        here = probe.facts(os.getcwd(), list(command))
        faults = [faults_of(host, answer, here) for host, answer in answers.items()]
        if any(faults):
            raise HostsError([*itertools.chain(*faults)])
        found = {host: a for host, a in answers.items() if isinstance(a, dict)}
        places = {
            task: Place(host=host, family=family, address=tuple(address))
            for host, some in tasks.items()
            for task, (family, address) in zip(
                some, found[host]["addresses"], strict=True
            )
        }
        gpus = {host.name: answer["gpus"] for host, answer in found.items()}
        yield TasksOnHosts(places=places, reach=reach, gpus=gpus)


@contextlib.contextmanager
def asking(
    options: HostOptions,
    counts: Mapping[Host, int],
    command: Sequence[str],
    *,
    finds_gpus: bool,
    listens: bool = False,
) -> Iterator[tuple[Reach, list[HostProbe]]]:
    """Ask the hosts, and keep connections and ports in the block.

    Args:
        options: The settings.
        counts: The number of ports that each host keeps.
        command: The arguments of the tasks' interpreter; empty: none is compared.
        finds_gpus: Whether each lists its GPUs.
        listens: Whether the ports can be connected to, as those of tasks can.

    Yields:
        How the hosts are reached; a probe for each.
    """
    question = {
        "folder": os.getcwd(),
        "command": list(command),
        "path": os.environ.get("PYTHONPATH", ""),
        "finds_gpus": finds_gpus,
        "exported": dict(options.exported),
        "listens": listens,
    }
    with contextlib.ExitStack() as undo:
        # Not in TMPDIR: the paths of sockets may have 108 characters.
        folder = undo.enter_context(
            tempfile.TemporaryDirectory(prefix="kerasdist-ssh-", dir="/tmp")
        )
        reach = Reach(options=options, control=Path(folder))
        probes = []
        for host, count in counts.items():
            asked = {**question, "host": host.name, "ports": count}
            probes.append(HostProbe(host, reach, asked))
            undo.callback(probes[-1].close)
        yield reach, probes


def faults_of(
    host: Host, answer: dict[str, Any] | str, here: Mapping[str, Any]
) -> list[str]:
    """Return why a host can't be used, or differs; empty if all is well.

    Args:
        host: The host.
        answer: The result of its probe.
        here: The facts of this host.
    """
    if isinstance(answer, str):
        return [f"{host.target} can't be used: {answer}"]
    faults = differences(host.target, answer["facts"], here)
    if "fault" in answer:
        faults.append(f"{host.target} can't be used: {answer['fault']}")
    return faults


def differences(
    name: str, there: Mapping[str, Any], here: Mapping[str, Any]
) -> list[str]:
    """Return in what a host with this name differs from this one, by both's facts."""
    return [
        f"{name} differs in its {fact}: {there.get(fact)}. Expected as on this host: "
        f"{expected}"
        for fact, expected in here.items()
        if there.get(fact, expected) != expected
    ]
