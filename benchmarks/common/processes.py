"""Processes that take orders."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from common.places import cluster_env, quiet_env

__all__ = ["Driver", "Ended", "Team", "serve"]

# How long one order, or the start of a process, may take, in seconds.
_PATIENCE = 300.0


class Ended(RuntimeError):
    """A process that should take orders has ended."""


class Team:
    """The processes of one column, by rank. Made by `Driver.start`."""

    def __init__(self, name: str, lines: dict[int, Any], pids: Sequence[int]) -> None:
        self.name = name
        self._lines = lines
        self._pids = pids

    def order(
        self, order: Mapping[str, Any], ranks: Iterable[int] | None = None
    ) -> list[Any]:
        """Give these ranks (by default all) the same order at once.

        Returns:
            Their answers, by rank.
        """
        asked = sorted(self._lines if ranks is None else ranks)
        for rank in asked:
            self._lines[rank].write(json.dumps(order) + "\n")
            self._lines[rank].flush()
        answers = []
        for rank in asked:
            text = self._lines[rank].readline()
            if not text:
                raise Ended(f"Rank {rank} of {self.name} ended. See its output.")
            answers.append(json.loads(text))
        return answers

    def cpu(self) -> list[float]:
        """Processor seconds of each process so far, those without a rank too.

        In ticks of the system, of 10 ms.
        """
        tick = os.sysconf("SC_CLK_TCK")
        seconds = []
        for pid in self._pids:
            # The name of the program may hold anything, but for its last bracket.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds.append((int(fields[11]) + int(fields[12])) / tick)
        return seconds


class Driver:
    """Starts processes and gives them orders; ends all of them on exit."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: dict[str, Path] = {}

    def __enter__(self) -> Driver:
        self._folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self._folder.name, "control"))
        self._socket = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._socket.bind(self.path)
        self._socket.listen(64)
        self._socket.settimeout(_PATIENCE)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # First the lines: a process that reads the end of its line ends in good
        # order.
        self._stack.close()
        for process in self._processes:
            try:
                process.wait(0.5 if kind else 10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if kind is not None:
            for name, log in self._logs.items():
                if text := log.read_text(errors="replace").strip():
                    print(f"-- {name}\n{text[-3000:]}", file=sys.stderr)
        self._folder.cleanup()

    def start(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        size: int,
        env: Callable[[int], Mapping[str, str]] = lambda rank: quiet_env(),
        *,
        processes: int | None = None,
        fds: Callable[[int], Sequence[int]] = lambda rank: (),
    ) -> Team:
        """Start a column.

        Args:
            name: Of the column.
            command: Of each process; `serve(driver.path, ...)` must come of it.
            size: Number of ranks that will come.
            env: Of each process.
            processes: How many to start, if not one per rank (`mpirun`).
            fds: What each process inherits.
        """
        mine: list[subprocess.Popen[bytes]] = []
        for rank in range(size if processes is None else processes):
            label = f"{name}, process {rank}"
            log = Path(self._folder.name, f"{len(self._logs)}.log")
            self._logs[label] = log
            with log.open("wb") as output:
                process = subprocess.Popen(
                    list(command(rank)),
                    env=dict(env(rank)),
                    pass_fds=fds(rank),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            mine.append(process)
            self._processes.append(process)
        end = time.monotonic() + _PATIENCE
        lines: dict[int, Any] = {}
        while len(lines) < size:
            self._socket.settimeout(1.0)
            try:
                sock, _ = self._socket.accept()
            except TimeoutError:
                if any(process.poll() is not None for process in mine):
                    raise RuntimeError(f"A process of {name} ended.") from None
                if time.monotonic() > end:
                    raise RuntimeError(f"{name} didn't start.") from None
                continue
            sock.settimeout(_PATIENCE)
            line = self._stack.enter_context(sock.makefile("rw"))
            self._stack.callback(sock.close)
            self._stack.callback(_shut, sock)
            lines[json.loads(line.readline())["rank"]] = line
        return Team(name, lines, [process.pid for process in mine])

    def start_job(
        self,
        name: str,
        command: Sequence[str],
        size: int,
        env: Mapping[str, str] | None = None,
        *,
        servers: int = 0,
    ) -> Team:
        """Start workers, and servers, of one kerasdist job on this machine.

        Args:
            name: Of the column.
            command: Of each process. `serve(driver.path, ...)` must come of it in a
                worker; a server takes no orders.
            size: Number of workers.
            env: What is special about their environment.
            servers: Number of servers.
        """
        with contextlib.ExitStack() as stack:
            sockets = [
                stack.enter_context(socket.socket()) for _ in range(size + servers)
            ]
            for sock in sockets:
                sock.bind(("127.0.0.1", 0))
                sock.listen(64)
            addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
            secret = secrets.token_hex(32)

            def environ(index: int) -> dict[str, str]:
                kind, task = ("worker", index) if index < size else ("ps", index - size)
                workers, others = addresses[:size], addresses[size:]
                return {
                    **quiet_env(),
                    **cluster_env(workers, task, secret, servers=others, kind=kind),
                    "KERASDIST_LISTEN_FD": str(sockets[index].fileno()),
                    **(env or {}),
                }

            return self.start(
                name,
                lambda index: command,
                size,
                environ,
                processes=size + servers,
                fds=lambda index: (sockets[index].fileno(),),
            )


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def serve(path: str, rank: int, answer: Callable[[dict[str, Any]], Any]) -> None:
    """Take orders until the driver ends.

    Args:
        path: `Driver.path`.
        rank: This process's.
        answer: From an order to its answer, JSON values.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        with sock.makefile("rw") as line:
            line.write(json.dumps({"rank": rank}) + "\n")
            line.flush()
            for text in line:
                line.write(json.dumps(answer(json.loads(text))) + "\n")
                line.flush()
