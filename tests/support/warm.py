"""Workers that needn't import TensorFlow and Keras: they are forked, not started.

The import takes 2 s of CPU, most of what a small job takes at all. So a process that
has done it once (`warm_process.py`) forks the workers. Such a worker differs from one
that is started cold only in that the two, and kerasdist's strategies, are imported
already, that operations of its graphs don't know where they were made, and that
Grappler leaves its graphs alone without `OPTIMIZED` in the environment (`make soak`,
`test_equivalence.py`) or a script that asks for it (`devices.py`). It has its own
session, environment, arguments, folder, output and random numbers, and ends like any
other.

Even ranks have one warm process and odd ranks another: as in reality the two have
different hashes of strings, hence orders of sets, and different addresses.

A fork is safe because a process that has imported TensorFlow, and not used it, has one
thread, if OpenBLAS is told so. Where it has more, workers are started cold, and the
end of pytest's output says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pace import bound

_PR_GET_CHILD_SUBREAPER = 37
# Each takes 3 s of CPU to begin with, and 250 MB as long as the tests run, in each of
# the processes that run tests. Two are the fewest of which ranks can differ.
_MOST = 2
# Seconds until a warm process has imported TensorFlow.
_IMPORT = 120.0
# Seconds until it has forked.
_FORK = 30.0
# What the interpreter, the C library, TensorFlow and Keras look at when they are
# started, loaded and imported: with other values a worker has to be started cold.
_IMPORT_TIME = re.compile(
    r"PYTHON|LD_|MALLOC_|GLIBC_|LANG|LC_|TZ|HOME$|PATH$|TMPDIR$|TF2?_(?!CONFIG$|NUM_)"
    r"|KERAS_|HDF5_|OMP_|OPENBLAS_|MKL_|KMP_|CUDA|TPU_|XLA_|NUMPY_|NPY_|GRPC_"
    r"|PROTOCOL_BUFFERS"
)


def imports_tensorflow(script: str) -> bool:
    return bool(re.search(r"\b(tensorflow|keras|\w+Strategy)\b", script))


class Forked:
    """A worker that was forked; to be used like a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """The return code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.poll() is None:
            select.select([self._pidfd], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, signum)


class WarmProcesses:
    """Warm processes for even and odd ranks, started when they are asked for."""

    def __init__(self, tag: str, env: Callable[[], Mapping[str, str]]) -> None:
        self.tag = tag
        self.why_cold: str | None = None
        self._make_env = env
        self._processes: list[_WarmProcess] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @functools.cached_property
    def _env(self) -> Mapping[str, str]:
        return self._make_env()

    def differing(self, env: Mapping[str, str]) -> list[str]:
        """The variables because of which a worker with `env` has to start cold."""
        names = self._env.keys() | env.keys()
        return sorted(
            name
            for name in names
            if _IMPORT_TIME.match(name) and env.get(name) != self._env.get(name)
        )

    def prepare(self, count: int) -> bool:
        """Makes sure that the first `count` ranks have theirs; False if they can't."""
        self.why_cold = self.why_cold or _why_not_here()
        if self.why_cold is not None:
            return False
        try:
            while len(self._processes) < min(count, _MOST):
                self._processes.append(_WarmProcess(self.tag, self._env))
            # Only now: they import at the same time.
            deadline = time.monotonic() + bound(_IMPORT)
            threads = max(process.threads(deadline) for process in self._processes)
        except BaseException:
            self.close()
            raise
        if threads != 1:
            self.why_cold = (
                f"a process that has imported TensorFlow has {threads} threads, so it "
                "can't be forked"
            )
            self.close()
        return self.why_cold is None

    def fork(
        self,
        rank: int,
        command: Sequence[str],
        env: Mapping[str, str],
        output: IO[bytes],
        pass_fds: Sequence[int] = (),
        namespace: str | None = None,
    ) -> Forked:
        request = {
            "script": command[0],
            "args": list(command[1:]),
            "env": dict(env),
            "tag": env[self.tag],
            "folder": os.getcwd(),
            "namespace": namespace,
            "fds": [1, 2, *pass_fds],
        }
        fds = [output.fileno(), output.fileno(), *pass_fds]
        process = self._processes[rank % _MOST]
        try:
            return Forked(process.fork(request, fds))
        except BaseException:
            # Also if pytest interrupts a test: an answer may be on its way, and
            # would be taken for the next one's.
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes, not the workers."""
        for process in self._processes:
            process.close()
        self._processes.clear()


def _why_not_here() -> str | None:
    subreaper = ctypes.c_int()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(subreaper), 0, 0, 0)
    if not subreaper.value:
        return "orphans don't become this process's children"
    return None


class _WarmProcess:
    """The end of `warm_process.py` in pytest's process."""

    def __init__(self, tag: str, env: Mapping[str, str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._threads: int | None = None
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, str(Path(__file__).with_name("warm_process.py"))),
                    *(str(theirs.fileno()), tag),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                # A place for the tags of jobs, which are as long.
                env={**env, tag: "0" * 16},
                pass_fds=(theirs.fileno(),),
                # Ctrl-C in the terminal is pytest's.
                start_new_session=True,
            )
        self.pid = self._process.pid

    def threads(self, deadline: float) -> int:
        if self._threads is None:
            self._threads = self._receive(deadline)["threads"]
        return self._threads

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        # If it is gone, what follows says so, and why.
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        return self._receive(time.monotonic() + bound(_FORK))["pid"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        self._socket.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            message = self._socket.recv(1 << 10)
        except (TimeoutError, ConnectionError):
            message = b""
        if not message:
            self._output.seek(0)
            said = self._output.read().decode(errors="replace")
            raise RuntimeError(
                f"The process that forks workers doesn't answer. Received: return code "
                f"{self._process.poll()}, output:\n{said}"
            )
        return json.loads(message)

    def close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)
        self._output.close()
