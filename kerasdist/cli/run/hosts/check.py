"""The check of all hosts before anything starts, and the ports of their tasks."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from kerasdist.cli.run.gpus import find
from kerasdist.cli.run.hosts import probe
from kerasdist.cli.run.hosts.options import HostOptions
from kerasdist.cli.run.hosts.places import Host, Place, assign
from kerasdist.cli.run.hosts.reach import Reach, program_text
from kerasdist.cli.run.hosts.tasks import TasksOnHosts

__all__ = ["HostsError", "on_hosts"]

# Seconds until all hosts must have answered; ssh gives up a connection earlier.
_SECONDS = 60.0
_END_SECONDS = 2.0
_MOST = 65536


class HostsError(Exception):
    """Hosts can't be used; `faults` has a message about each."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = list(faults)


class _Probe:
    """The process that answers for one host, and keeps its ports."""

    def __init__(
        self,
        host: Host,
        reach: Reach,
        command: Sequence[str],
        count: int,
        more: Mapping[str, Any],
    ) -> None:
        self.host = host
        self.answer = b""
        self._count = count
        # Not a pipe, which nothing would read while the job runs.
        self.errors: IO[bytes] = os.fdopen(os.memfd_create("kerasdist-errors"), "w+b")
        self.process = subprocess.Popen(
            reach.command(host, first=True),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            # Ctrl-C is for the tasks, whose connections these are.
            start_new_session=True,
            bufsize=0,
        )
        question = {
            "folder": os.getcwd(),
            "command": list(command),
            "host": host.name,
            "ports": count,
            "path": os.environ.get("PYTHONPATH", ""),
            **more,
        }
        text = program_text(str(probe.__file__)) + json.dumps(question).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            self._pipe(self.process.stdin).write(text)

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise RuntimeError("The process was started without pipes.")
        return pipe

    def fileno(self) -> int:
        """Return the descriptor of the answer."""
        return self._pipe(self.process.stdout).fileno()

    def read(self) -> bool:
        """Read what has arrived; return whether the answer isn't complete yet."""
        data = os.read(self.fileno(), _MOST)
        self.answer += data
        return bool(data) and not self.answer.endswith(b"\n")

    def result(self) -> dict[str, Any] | str:
        """Return the answer; if there's none, the reason."""
        with contextlib.suppress(ValueError):
            return dict(json.loads(self.answer.rpartition(b"\n")[0].split(b"\n")[-1]))
        try:
            code = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it hasn't answered within {_SECONDS:.0f} s"
        self.errors.seek(0)
        text = self.errors.read().decode(errors="replace").strip()
        return text.splitlines()[-1] if text else f"ssh has ended with {code}"

    def close(self) -> None:
        """End the process."""
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
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
    more = {
        "find_gpus": Path(find.__file__).read_text("utf-8") if finds_gpus else "",
        "exported": dict(options.exported),
    }
    # Not in TMPDIR: the paths of sockets may have 108 characters.
    with tempfile.TemporaryDirectory(prefix="kerasdist-ssh-", dir="/tmp") as folder:
        reach = Reach(ssh=options.ssh, python=options.python, control=Path(folder))
        hosts = assign(options.hosts, workers, servers)
        with _connected(hosts, reach, command, more) as (places, gpus):
            yield TasksOnHosts(places, reach, options.exported, gpus)


_Connected = tuple[
    Mapping[tuple[str, int], Place], Mapping[str, tuple[Sequence[str], str]]
]


@contextlib.contextmanager
def _connected(
    hosts: Mapping[tuple[str, int], Host],
    reach: Reach,
    command: Sequence[str],
    more: Mapping[str, Any],
) -> Iterator[_Connected]:
    """Connect to the hosts, and keep a port for each task in the block.

    Args:
        hosts: The host of each task.
        reach: How hosts are reached.
        command: The arguments of the tasks' interpreter.
        more: Further questions to each host.

    Yields:
        The place of each task; what `find_gpus` returns on each host, by its name.

    Raises:
        HostsError: Some can't be used; all of them are named.
    """
    tasks: dict[Host, list[tuple[str, int]]] = {}
    for task, host in hosts.items():
        tasks.setdefault(host, []).append(task)
    with contextlib.ExitStack() as undo:
        probes = []
        for host, some in tasks.items():
            probes.append(_Probe(host, reach, command, len(some), more))
            undo.callback(probes[-1].close)
        _await(probes)
        answers = {each.host: each.result() for each in probes}
        faults = _faults(answers, probe.facts(os.getcwd(), list(command)))
        if faults:
            raise HostsError(faults)
        found = {host: a for host, a in answers.items() if isinstance(a, dict)}
        places = {
            task: Place(host=host, family=family, address=tuple(address))
            for host, some in tasks.items()
            for task, (family, address) in zip(
                some, found[host]["addresses"], strict=True
            )
        }
        yield places, {host.name: answer["gpus"] for host, answer in found.items()}


def _await(probes: Sequence[_Probe]) -> None:
    end = time.monotonic() + _SECONDS
    with selectors.DefaultSelector() as selector:
        for each in probes:
            selector.register(each, selectors.EVENT_READ)
        while selector.get_map() and (rest := end - time.monotonic()) > 0:
            for key, _ in selector.select(rest):
                found: Any = key.fileobj
                if not found.read():
                    selector.unregister(found)


def _faults(
    answers: Mapping[Host, dict[str, Any] | str], here: dict[str, Any]
) -> list[str]:
    faults = []
    for host, answer in answers.items():
        if isinstance(answer, str):
            faults.append(f"{host.target} can't be used: {answer}")
            continue
        there = answer["facts"]
        faults += [
            f"{host.target} differs in its {name}: {there.get(name)}. Expected as on "
            f"this host: {expected}"
            for name, expected in here.items()
            if there.get(name, expected) != expected
        ]
        if "fault" in answer:
            faults.append(f"{host.target} can't be used: {answer['fault']}")
    return faults
