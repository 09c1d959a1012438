"""Real worker processes for tests.

    script = '''
        import json, os
        print("RESULT", json.dumps(os.environ["TF_CONFIG"]))
    '''
    with Workers(script, 2) as job:
        first, second = job.succeed()
    assert first.result == ...

Each worker is a session of its own, writes to a file of its own (so no pipe can
fill up), and carries a tag in its environment. On exit every process that
carries the tag is killed with SIGKILL, which ends stopped processes too, so
also grandchildren that made themselves a session of their own.

A script that imports TensorFlow is run by forks of processes that have done so
already, see `warm.py`; with `cold=True` by new interpreters.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pace import bound
from warm import Forked, WarmProcesses, imports_tensorflow

TAG = "KERASDIST_TEST_JOB"
# For scripts: standard error becomes a pipe that is full, and that nobody reads.
FULL_STDERR = """
import os

def fill_stderr():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, bytes(4096))
    except BlockingIOError:
        pass
    os.set_blocking(writing, True)
    os.dup2(writing, 2)

"""
# Below the range from which the kernel takes ports by itself (32768 and up on
# Linux), so that nobody gets one of them between the choice and the use. Each process
# that runs a part of the tests has some of them, see `pytest -n`.
_PART = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = range(20000 + _PART % 8, 32000, 8)
# Elsewhere than another run of the tests, whose number is the next one.
_next_port = itertools.count(os.getpid() * 397 % len(_PORTS))
_STARTUP = Path(__file__).with_name("startup")  # begun with by all processes
_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if str(_STARTUP) not in _paths:  # with `pytest -n` it is already
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_STARTUP), *_paths]))
# Each process compiles kernels, and makes graphs ready for them: a third of a small
# job. `make soak` and what has `OPTIMIZED` in its environment do so.
_LIGHT = {"TENSORFLOW_USE_CUSTOM_CONTRACTION_KERNEL": "0", "TF_ENABLE_ONEDNN_OPTS": "0"}
if "OPTIMIZED" not in os.environ:
    os.environ.update({**_LIGHT, **os.environ})
# Before anything was imported, or a test has begun, that changes it.
_SURROUNDINGS = dict(os.environ)
# `print` writes its arguments one by one, and a log line of another thread may get
# between them: a script's lines are written whole.
_WHOLE_LINES = (
    'out = __import__("sys").stdout; out._CHUNK_SIZE = 1 << 24; '
    "out.reconfigure(write_through=False, line_buffering=True); del out"
)
# How much of one worker's output a failure shows, in characters from the end.
_SHOWN = 20_000
# For the workers of a failed test to write their stacks.
_STACKS_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Finished:
    rank: int
    returncode: int
    output: str

    @property
    def results(self) -> list[Any]:
        """What the worker printed as `RESULT <json>`, in order."""
        # Another thread's line may stand before the end of this one.
        decode = json.JSONDecoder().raw_decode
        return [
            decode(line.removeprefix("RESULT "))[0]
            for line in self.output.splitlines()
            if line.startswith("RESULT ")
        ]

    @property
    def result(self) -> Any:
        """The one thing that the worker printed as `RESULT <json>`."""
        results = self.results
        if len(results) != 1:
            pytest.fail(
                f"Rank {self.rank} should print one line `RESULT <json>`. "
                f"Received: {len(results)} of them.\n{self.output}"
            )
        return results[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that are free at `host`, different at each call.

    For tests that need a port without a socket on it; where a socket may be
    handed over, bind port 0 instead.
    """
    ports: list[int] = []
    for number in itertools.islice(_next_port, len(_PORTS)):
        port = _PORTS[number % len(_PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    pytest.fail(f"{host} has fewer than {count} free ports in {_PORTS}.")


@functools.cache
def _import_root() -> str | None:
    """Where kerasdist must be imported from; None if it is installed."""
    installed = subprocess.run(
        [sys.executable, "-c", "import kerasdist._version"],
        cwd="/",
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    if installed.returncode == 0:
        return None
    spec = importlib.util.find_spec("kerasdist")
    if spec is None or not spec.submodule_search_locations:
        pytest.fail("kerasdist can't be imported. Run `make test`.")
    return str(Path(spec.submodule_search_locations[0]).parent)


def python_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a Python process of a test.

    It is the one that the tests were started in, without what they, or the import of
    TensorFlow, have set in theirs since. It holds no cluster settings, imports the same
    kerasdist, prints unbuffered, shows the stacks when it crashes, and keeps TensorFlow
    at one thread, so that several workers fit on two cores. What one process has
    compiled of kerasdist the next ones load: that's a quarter of a second for each.
    """
    env = {
        name: value
        for name, value in _SURROUNDINGS.items()
        if name not in ("PYTHONDONTWRITEBYTECODE", "TF_CONFIG")
        and not name.startswith(("KERASDIST_", "PYTEST_", "SLURM_"))
    }
    root = _import_root()
    if root is not None:
        paths = [root, *filter(None, [env.get("PYTHONPATH")])]
        env["PYTHONPATH"] = os.pathsep.join(paths)
    env |= {
        "CUDA_VISIBLE_DEVICES": "-1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_NUM_INTEROP_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
    }
    env |= extra or {}
    return {k: v for k, v in env.items() if "OPTIMIZED" not in env or k not in _LIGHT}


def ended(
    *command: str | Path, within: float = 120.0, **more: Any
) -> subprocess.CompletedProcess[str]:
    """A command with its output, at its end; `more`: see `subprocess.run`."""
    more = {"env": python_env(), "capture_output": True, "text": True, **more}
    return subprocess.run(command, timeout=bound(within), check=False, **more)


def output_of(*command: str | Path, within: float = 150.0, **extra: str) -> str:
    done = ended(*command, within=within, env=python_env(extra))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _namespace(prefix: Sequence[str]) -> str | None:
    """The network namespace that a command is run in by a prefix of `Hosts`."""
    begin, name = list(prefix[:-1]), prefix[-1:]
    return name[0] if begin == ["ip", "netns", "exec"] else None


# Those of this run of the tests; `conftest.py` ends them.
WARM = WarmProcesses(TAG, python_env)


def kill_tagged(value: str, *, timeout: float = 10.0) -> list[str]:
    """Kills every process that carries `TAG=value`, and waits for their end.

    Children of this process aren't reaped: who started them asks for their
    return codes.
    """
    killed: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    # Again until none is left: one may have forked while the others were killed.
    while found := list(_tagged(value)):
        for process in found:
            try:
                command = " ".join(process.cmdline())
                killed.setdefault(process.pid, f"process {process.pid}: {command}")
                process.kill()
            except psutil.Error:
                continue  # it has ended in between
        for process in found:
            _wait_for_end(process.pid, deadline)
    return list(killed.values())


def _wait_for_end(pid: int, deadline: float) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        remaining = max(0.0, deadline - time.monotonic())
        if not select.select([pidfd], [], [], remaining)[0]:
            pytest.fail(f"Process {pid} can't be killed.")
    finally:
        os.close(pidfd)


def _tagged(value: str) -> Iterable[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get(TAG) == value:
                yield process
        except (psutil.Error, OSError):
            continue  # it has ended, is a zombie, or isn't ours


class Workers:
    """A job of `size` worker processes, or more. Use it in a `with` statement.

    `script` is its source text (dedented), or its path. `env` is on top of
    `python_env`, or a function from a rank to that; a variable whose value is None is
    removed. `deadline`: seconds until the job must have ended, see `bound`. `cluster`:
    the host of each rank, if it isn't this one. Without `handover` the workers bind
    their ports themselves; otherwise each is handed its socket, as `kerasdist run`
    does, which needs the same network namespace. `prefix`: from a rank to the command
    that runs it; with any but `hosts.prefix` workers start cold. `servers` are
    parameter servers: what takes a rank here takes `size`, `size + 1` and so on for
    them.
    """

    def __init__(
        self,
        script: str | Path,
        size: int,
        args: Sequence[str] = (),
        env: Mapping[str, str | None]
        | Callable[[int], Mapping[str, str | None]]
        | None = None,
        deadline: float = 60.0,
        cluster: str | Sequence[str] = "loopback",
        *,
        handover: bool | None = None,
        prefix: Callable[[int], Sequence[str]] | None = None,
        cold: bool = False,
        servers: int = 0,
    ) -> None:
        self._workers = size
        size += servers
        loopback = cluster == "loopback"
        self.size = size
        self.tag = secrets.token_hex(8)
        self.secret = secrets.token_hex(16)
        self.processes: list[subprocess.Popen[bytes] | Forked] = []
        self.addresses: list[str] = []
        self._script = script
        self._args = list(args)
        self._env = env if callable(env) else (lambda rank: env or {})
        self._seconds = deadline
        self._hosts = ["127.0.0.1"] * size if loopback else list(cluster)
        self._handover = loopback if handover is None else handover
        self._prefix = prefix or (lambda rank: [])
        self._namespaces = [_namespace(self._prefix(rank)) for rank in range(size)]
        self._cold = cold or (prefix is not None and None in self._namespaces)
        self._reported = False

    def __enter__(self) -> Workers:
        if isinstance(self._script, Path):
            text = self._script.read_text(encoding="utf-8")
        else:
            text = textwrap.dedent(self._script)
            if text.startswith("\n"):  # else what fails would have another line
                text = _WHOLE_LINES + text
        # Before the clock runs: the first job that needs them waits for the import.
        self._cold = self._cold or not (
            imports_tensorflow(text) and WARM.prepare(self.size)
        )
        self.folder = Path(tempfile.mkdtemp(prefix="kerasdist-test-"))
        self._end = time.monotonic() + bound(self._seconds)
        listeners: list[socket.socket] = []
        try:
            if isinstance(self._script, Path):
                path = self._script
            else:
                path = self.folder / "script.py"
                path.write_text(text, encoding="utf-8")
            self._path = path
            if self._handover:
                for host in self._hosts:
                    listeners.append(socket.create_server((host, 0), backlog=128))
                ports = [listener.getsockname()[1] for listener in listeners]
            else:
                ports = free_ports(self.size)
            self.addresses = [
                f"{host}:{port}" for host, port in zip(self._hosts, ports, strict=True)
            ]
            for rank in range(self.size):
                fd = listeners[rank].fileno() if listeners else None
                self._start(rank, path, fd)
        except BaseException:
            self._clean_up()
            raise
        finally:
            # The workers have copies. Ours would keep a dead worker's port open.
            for listener in listeners:
                listener.close()
        return self

    def _start(self, rank: int, script: Path, listen_fd: int | None) -> None:
        workers = self._workers
        cluster = {"worker": self.addresses[:workers]}
        task: dict[str, Any] = {"type": "worker", "index": rank}
        if self.size > workers:
            cluster["ps"] = self.addresses[workers:]
        if rank >= workers:
            task = {"type": "ps", "index": rank - workers}
        env: dict[str, str | None] = {
            **python_env(),
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
            "KERASDIST_SECRET": self.secret,
            "KERASDIST_ALLOW_OPEN_SERVERS": "1",
            TAG: self.tag,
        }
        if listen_fd is not None:
            env["KERASDIST_LISTEN_FD"] = str(listen_fd)
        env |= self._env(rank)
        whole = {k: v for k, v in env.items() if v is not None}
        command = [str(script.absolute()), *self._args]
        pass_fds = () if listen_fd is None else (listen_fd,)
        with self._log(rank).open("wb") as log:
            if self._cold or WARM.differing(whole):
                process = subprocess.Popen(
                    [*self._prefix(rank), sys.executable, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=whole,
                    pass_fds=pass_fds,
                    start_new_session=True,
                )
            else:
                process = WARM.fork(
                    rank, command, whole, log, pass_fds, self._namespaces[rank]
                )
            self.processes.append(process)

    def wait(self, deadline: float | None = None) -> list[Finished]:
        """Waits until every worker has ended, or fails with the output of all."""
        return self._wait(range(self.size), deadline)

    def wait_one(self, rank: int, deadline: float | None = None) -> Finished:
        return self._wait([rank], deadline)[0]

    def _wait(self, ranks: Sequence[int], deadline: float | None) -> list[Finished]:
        end = self._end
        if deadline is not None:
            end = min(end, time.monotonic() + bound(deadline))
        for rank in ranks:
            try:
                self.processes[rank].wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                running = [r for r in ranks if self.is_running(r)]
                self._fail(f"Ranks {running} were still running at the deadline.")
        return [
            Finished(
                rank=rank,
                returncode=self.processes[rank].returncode,
                output=self.output(rank),
            )
            for rank in ranks
        ]

    def succeed(self) -> list[Finished]:
        finished = self.wait()
        bad = [worker.rank for worker in finished if worker.returncode != 0]
        if bad:
            self._fail(f"Ranks {bad} failed.")
        return finished

    def run(self) -> list[Finished]:
        """In place of a `with` statement, for a job that only has to succeed."""
        with self:
            return self.succeed()

    def results(self) -> list[Any]:
        """What each worker of such a job has printed as `RESULT <json>`."""
        return [finished.result for finished in self.run()[: self._workers]]

    def wait_for_lines(self, text: str, count: int | None = None) -> None:
        """Waits for such a line of each worker, or of the first `count`."""
        for rank in range(self._workers if count is None else count):
            self.wait_for_line(rank, text)

    def wait_for_line(self, rank: int, text: str) -> str:
        """Waits for a whole line with `text`; returns it without its end."""
        while True:
            # In this order: what an ended process wrote is all there.
            running = self.is_running(rank)
            for line in self.output(rank).splitlines(keepends=True):
                if text in line and line.endswith("\n"):
                    return line.rstrip("\n")
            if not running:
                self._fail(f"Rank {rank} ended before it printed {text!r}.")
            if time.monotonic() > self._end:
                self._fail(f"Rank {rank} didn't print {text!r} by the deadline.")
            try:
                # There is no way to wait for a file to grow; so look often.
                self.processes[rank].wait(0.02)
            except subprocess.TimeoutExpired:
                pass

    def extend(self, deadline: float) -> None:
        self._end = time.monotonic() + bound(deadline)

    def is_running(self, rank: int) -> bool:
        return self.processes[rank].poll() is None

    def output(self, rank: int) -> str:
        return self._log(rank).read_text(encoding="utf-8", errors="replace")

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(signum)

    def start_again(self, task: int) -> None:
        """Starts an ended task again; the job must be one with `handover=False`."""
        self._start(task, self._path, None)
        self.processes[task] = self.processes.pop()

    def restart(self, task: int) -> None:
        self.kill(task)
        self.wait_one(task)
        self.start_again(task)

    def report(self) -> str:
        return self._report([process.poll() for process in self.processes])

    def _report(self, codes: Sequence[int | None]) -> str:
        parts = []
        for rank, code in enumerate(codes):
            state = "running" if code is None else f"returned {code}"
            text = self.output(rank)
            if len(text) > _SHOWN:
                text = f"[... {len(text) - _SHOWN} characters]\n{text[-_SHOWN:]}"
            parts.append(f"---- rank {rank}, {self.addresses[rank]}, {state} ----\n")
            parts.append(text if text.endswith("\n") or not text else text + "\n")
        return "".join(parts)

    def __exit__(self, kind: object, *_: object) -> None:
        # A test that fails by itself: pytest shows what is printed here.
        if kind is not None and not self._reported:
            print(self.report())
        self._clean_up()

    def _clean_up(self) -> None:
        kill_tagged(self.tag)
        for process in self.processes:
            process.wait(10.0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _fail(self, reason: str) -> None:
        self._reported = True
        codes = [process.poll() for process in self.processes]
        self._show_stacks()
        report = self._report(codes)
        kill_tagged(self.tag)
        pytest.fail(f"{reason}\n{report}", pytrace=False)

    def _show_stacks(self) -> None:
        """Ends the workers that run; each writes the stacks of its threads before."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)
        end = time.monotonic() + _STACKS_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue  # stopped, or it has a handler of its own

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"
