"""The process on a task's host: runs the task, and relays what it writes.

Its text is sent through ssh, so it uses the standard library alone, and the host's
version of kerasdist doesn't matter. On standard input it gets the task as JSON, with
its length in eight digits before it, then the call of the task's function, if it runs
one, then a byte for each signal, or zeros. On standard output it writes frames: one
letter, the length in four bytes, the data.

    O, E   output and error output of the task
    P      a line of the launcher's pipe
    R      a part of the result of the task's function
    X      JSON: how the task ended
    F      why it can't be started

When standard input ends, or is silent for too long, the launcher or the network is
gone: then everything below this process is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Iterator
from typing import IO, Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Seconds: without a line from the launcher, from SIGTERM to SIGKILL, and for the last
# output.
_SILENCE = 30.0
_TERM_TO_KILL = 2.0
_OUTPUT = 2.0
_MOST = 65536


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _name(descriptor: int) -> str:
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


# The processes below one. The supervisor takes these from here, because the text
# of this file alone is sent to a host.


def below(root: int) -> list[int]:
    """Return the ids of all living processes below `root`, parents first.

    Zombies aren't living: they only wait for their parent to look.
    """
    children: dict[int, list[tuple[int, bool]]] = {}
    for entry in os.listdir("/proc"):
        # It may end in between.
        if entry.isdigit() and (state := state_of(int(entry))):
            alive = state[0] not in (b"Z", b"X")
            children.setdefault(int(state[1]), []).append((int(entry), alive))
    found, todo = [], [root]
    while todo:
        for pid, alive in children.pop(todo.pop(0), []):
            todo.append(pid)
            if alive:
                found.append(pid)
    return found


def state_of(pid: int) -> list[bytes]:
    """Return a process's state, a letter, and its parent; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # "pid (name) state parent ...", where the name may hold anything.
            return file.read().rpartition(b")")[2].split()[:2]
    except OSError:
        return []


def signal_all(number: int, spare: frozenset[int] = frozenset()) -> None:
    """Send a signal to everything below this process, except to `spare`."""
    for pid in below(os.getpid()):
        if pid not in spare:
            # It ended in between, or has become another user's (sudo).
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def open_terminal(window: tuple[int, int]) -> tuple[int, int]:
    """Return both ends of a terminal that passes all as it is.

    Args:
        window: Its lines and columns.
    """
    outer, inner = pty.openpty()
    tty.setraw(inner)
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", *window, 0, 0))
    return outer, inner


def _received(length: int) -> Iterator[bytes]:
    """Yield what the launcher sends, up to this length; end if the launcher has."""
    while length:
        data = os.read(0, min(length, _MOST))
        if not data:
            raise SystemExit(1)
        length -= len(data)
        yield data


class Agent:
    """Runs one task. Its attributes are descriptors; `_out` takes the frames."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        # Whatever else this process writes isn't a frame.
        os.dup2(2, 1)
        os.set_inheritable(self._out, False)
        self._kinds: dict[int, bytes] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        # Of a function.
        self._call: IO[bytes] | None = None
        self._result: IO[bytes] | None = None
        self._heard = time.monotonic()

    def _frame(self, kind: bytes, data: bytes) -> None:
        view = memoryview(kind + struct.pack(">I", len(data)) + data)
        while view:
            view = view[os.write(self._out, view) :]

    def run(self) -> None:
        """Run the task to its end."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        length = int(b"".join(_received(8)))
        task = json.loads(b"".join(_received(length)))
        if task["call"] is not None:
            self._call = tempfile.TemporaryFile()  # noqa: SIM115
            self._result = tempfile.TemporaryFile()  # noqa: SIM115
            self._call.writelines(_received(task["call"]))
            self._call.flush()
        try:
            os.chdir(task["folder"])
            self._start(task)
        except OSError as error:
            self._frame(b"F", str(error).encode())
            return
        try:
            with contextlib.suppress(BrokenPipeError):
                self._relay()
        finally:
            self._end()
        with contextlib.suppress(OSError):
            if self._result is not None:
                self._result.seek(0)
                while data := self._result.read(_MOST):
                    self._frame(b"R", data)
            self._errors.seek(0)
            ending = {"code": self._code, "error": self._errors.read().decode()}
            self._frame(b"X", json.dumps(ending).encode())

    def _start(self, task: dict[str, Any]) -> None:
        family, address = task["family"], tuple(task["address"])
        listener = socket.socket(socket.AddressFamily(family))
        # The port is kept for the job by a socket that is bound to it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        self._errors = os.fdopen(os.memfd_create("kerasdist-errors"), "w+b")
        reading, writing = os.pipe()
        self._kinds[reading] = b"P"
        passed = [listener.fileno(), writing, self._errors.fileno()]
        environ = {
            **os.environ,
            **task["environ"],
            "KERASDIST_LISTEN_FD": str(listener.fileno()),
            "KERASDIST_REPORT_FD": _name(writing),
            "KERASDIST_ERROR_FD": _name(self._errors.fileno()),
        }
        for name, file in (("CALL", self._call), ("RESULT", self._result)):
            if file is not None:
                passed.append(file.fileno())
                environ[f"KERASDIST_{name}_FD"] = _name(file.fileno())
        window = task["window"]
        if window is None:
            output, inner = os.pipe()
        else:
            output, inner = open_terminal(window)
        self._kinds[output] = b"O"
        error, inner_error = inner, inner
        if task["errors"]:
            # Apart: the launcher takes TensorFlow's start out of it.
            error, inner_error = os.pipe() if window is None else open_terminal(window)
            self._kinds[error] = b"E"
        self._process = subprocess.Popen(
            [sys.executable, *task["command"]],
            stdin=subprocess.DEVNULL,
            stdout=inner,
            stderr=inner_error,
            env=environ,
            pass_fds=passed,
            start_new_session=True,
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        listener.close()
        for descriptor in {writing, inner, inner_error}:
            os.close(descriptor)

    def _relay(self) -> None:
        """Relay until the task has ended, and its output has."""
        wake, wake_write = os.pipe()
        for descriptor in (wake, wake_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        until: float | None = None
        while True:
            self._reap()
            now = time.monotonic()
            if self._code is not None and until is None:
                # Children of the task may hold its output, and its port.
                signal_all(signal.SIGTERM)
                until = now + _TERM_TO_KILL
            if until is not None and (
                not self._kinds or now > until or not below(os.getpid())
            ):
                self._drain()
                return
            if now - self._heard > _SILENCE:
                return
            ready = select.select(
                [0, wake, *self._kinds], [], [], 0.2 if until else 1.0
            )
            for descriptor in ready[0]:
                if descriptor == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, _MOST)
                elif descriptor:
                    self._copy(descriptor)
                elif not self._take():
                    return

    def _take(self) -> bool:
        """Take signals of the launcher; return False at their end."""
        data = os.read(0, _MOST)
        self._heard = time.monotonic()
        for number in filter(None, data):
            if self._process is not None and self._code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process.pid, number)
        return bool(data)

    def _copy(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, _MOST)
        except OSError:  # a terminal without processes
            data = b""
        if data:
            self._frame(self._kinds[descriptor], data)
        else:
            del self._kinds[descriptor]
            os.close(descriptor)

    def _drain(self) -> None:
        """Relay what has been written, though processes may hold the other end."""
        end = time.monotonic() + _OUTPUT
        while self._kinds and time.monotonic() < end:
            ready = select.select(list(self._kinds), [], [], 0.0)[0]
            if not ready:
                return
            for descriptor in ready:
                self._copy(descriptor)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if self._process is not None and pid == self._process.pid:
                self._code = os.waitstatus_to_exitcode(status)
                self._process.returncode = self._code

    def _end(self) -> None:
        """End everything below this process: first SIGTERM, then SIGKILL."""
        until = time.monotonic() + _TERM_TO_KILL
        signal_all(signal.SIGTERM)
        while below(os.getpid()) and time.monotonic() < 2 * _TERM_TO_KILL + until:
            self._reap()
            if time.monotonic() > until:
                signal_all(signal.SIGKILL)
            time.sleep(0.02)
        self._reap()


if __name__ == "__main__":
    Agent().run()
