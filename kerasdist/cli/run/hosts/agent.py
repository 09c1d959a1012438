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
import threading
import time
import tty
from collections.abc import Iterator
from typing import IO, Any

# Options of `prctl`, see prctl(2): the signal at the end of the parent, and whether
# orphans below become children.
PDEATHSIG, CHILD_SUBREAPER = 1, 36
# Seconds: without a line from the launcher, from SIGTERM to SIGKILL, and for the last
# output.
_SILENCE = 30.0
_TERM_TO_KILL = 2.0
_OUTPUT = 2.0
_MOST = 65536


def prctl(option: int, value: int) -> None:
    """Set an option of this process."""
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


def open_output(window: tuple[int, int] | None) -> tuple[int, int]:
    """Return both ends of a pipe, or of a terminal that passes all as it is.

    Args:
        window: The terminal's lines and columns; None: a pipe.
    """
    if window is None:
        return os.pipe()
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
    """Runs one task.

    Threads copy its output and obey the launcher, while the main one waits for its end.
    """

    def __init__(self) -> None:
        self._out = os.dup(1)
        # Whatever else this process writes isn't a frame.
        os.dup2(2, 1)
        os.set_inheritable(self._out, False)
        self._writing = threading.Lock()
        self._written_at = 0.0
        self._kinds: dict[int, bytes] = {}
        # Of a function.
        self._call: IO[bytes] | None = None
        self._result: IO[bytes] | None = None

    def _frame(self, kind: bytes, data: bytes) -> None:
        view = memoryview(kind + struct.pack(">I", len(data)) + data)
        with self._writing:
            while view:
                view = view[os.write(self._out, view) :]
        self._written_at = time.monotonic()

    def run(self) -> None:
        """Run the task to its end."""
        prctl(CHILD_SUBREAPER, 1)
        length = int(b"".join(_received(8)))
        task = json.loads(b"".join(_received(length)))
        if task["call"] is not None:
            self._call = tempfile.TemporaryFile()  # noqa: SIM115
            self._result = tempfile.TemporaryFile()  # noqa: SIM115
            self._call.writelines(_received(task["call"]))
            self._call.flush()
        try:
            os.chdir(task["folder"])
            process = self._start(task)
        except OSError as error:
            self._frame(b"F", str(error).encode())
            return
        threading.Thread(target=_obey, args=(process,), daemon=True).start()
        copies = [
            threading.Thread(target=self._copy, args=each, daemon=True)
            for each in self._kinds.items()
        ]
        for each in copies:
            each.start()
        while process.returncode is None:
            pid, status = os.waitpid(-1, 0)  # orphans are given to this process
            if pid == process.pid:
                process.returncode = os.waitstatus_to_exitcode(status)
        # Children of the task may hold its output, and its port.
        _end_all()
        self._written_at = time.monotonic()
        while any(each.is_alive() for each in copies) and (
            self._writing.locked() or time.monotonic() < self._written_at + _OUTPUT
        ):
            time.sleep(0.01)
        with contextlib.suppress(OSError):
            if self._result is not None:
                self._result.seek(0)
                while data := self._result.read(_MOST):
                    self._frame(b"R", data)
            self._errors.seek(0)
            error_text = self._errors.read().decode()
            ending = {"code": process.returncode, "error": error_text}
            self._frame(b"X", json.dumps(ending).encode())

    def _start(self, task: dict[str, Any]) -> subprocess.Popen[bytes]:
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
        output, inner = open_output(task["window"])
        self._kinds[output] = b"O"
        inner_error = inner
        if task["errors"]:
            # Apart: the launcher takes TensorFlow's start out of it.
            error, inner_error = open_output(task["window"])
            self._kinds[error] = b"E"
        process = subprocess.Popen(
            [sys.executable, *task["command"]],
            stdin=subprocess.DEVNULL,
            stdout=inner,
            stderr=inner_error,
            env=environ,
            pass_fds=passed,
            start_new_session=True,
            preexec_fn=lambda: prctl(PDEATHSIG, signal.SIGKILL),
        )
        listener.close()
        for descriptor in {writing, inner, inner_error}:
            os.close(descriptor)
        return process

    def _copy(self, descriptor: int, kind: bytes) -> None:
        # At the end of a terminal without processes there is an error.
        with contextlib.suppress(OSError):
            while data := os.read(descriptor, _MOST):
                self._frame(kind, data)


def _obey(process: subprocess.Popen[bytes]) -> None:
    """Pass the launcher's signals on; when it is gone, end everything."""
    with contextlib.suppress(OSError):
        while select.select([0], [], [], _SILENCE)[0] and (data := os.read(0, _MOST)):
            for number in filter(None, data):
                # It may end in between.
                with contextlib.suppress(ProcessLookupError):
                    if process.returncode is None:
                        os.kill(process.pid, number)
    _end_all()
    os._exit(1)


def _end_all() -> None:
    """End everything below this process: first SIGTERM, then SIGKILL."""
    until = time.monotonic() + _TERM_TO_KILL
    signal_all(signal.SIGTERM)
    while below(os.getpid()) and time.monotonic() < 2 * _TERM_TO_KILL + until:
        if time.monotonic() > until:
            signal_all(signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    Agent().run()
