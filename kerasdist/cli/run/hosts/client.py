"""The process on the launcher's host for a task of another one.

The launcher sees the task in it: it writes what the task writes, passes signals on,
and ends as the task does. If the connection ends first, it ends by SIGHUP.

It is a file of its own, run by its path, and imports the standard library alone: it
takes 20 ms for each task. What it is to do stands in `KERASDIST_REMOTE`, as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_PING_SECONDS = 5.0
_END_SECONDS = 2.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM)


def _prepare_child() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _descriptor(variable: str) -> int | None:
    number = os.environ.get(variable, "").partition(":")[0]
    return int(number) if number else None


class Client:
    """Follows one task; `run` returns when it has ended."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = facts
        self._reports = _descriptor("KERASDIST_REPORT_FD")
        self._errors = _descriptor("KERASDIST_ERROR_FD")
        # Of a job that runs a function.
        self._call = _descriptor("KERASDIST_CALL_FD")
        self._result = _descriptor("KERASDIST_RESULT_FD")
        self._ending: dict[str, Any] | None = None
        self._fault = ""
        # `_forward` takes them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        self._process = subprocess.Popen(
            facts["reach"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C must reach the task by way of this process alone.
            start_new_session=True,
            preexec_fn=_prepare_child,
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("The process was started without pipes.")
        self._commands, self._frames = self._process.stdin, self._process.stdout

    def run(self) -> int:
        """Follow the task to its end; return its exit code, negative for a signal."""
        length = None if self._call is None else os.fstat(self._call).st_size
        task = json.dumps({**self._facts["task"], "call": length}).encode()
        self._send(b"%08d%b" % (len(task), task))
        if self._call is not None:
            # Other processes read the file, too: its position is theirs.
            with mmap.mmap(self._call, 0, access=mmap.ACCESS_READ) as call:
                self._send(memoryview(call))
        threading.Thread(target=self._forward, daemon=True).start()
        # After the last frame nothing is waited for: the connection may stay open, for
        # one that was first carries others.
        while self._ending is None and not self._fault and self._take():
            pass
        return self._end()

    def _send(self, data: bytes | memoryview) -> None:
        with contextlib.suppress(ValueError):  # after the end it's closed
            self._write(self._commands.fileno(), data)

    def _forward(self) -> None:
        """Pass signals on, and zeros in between, by which the other side lives on."""
        while True:
            found = signal.sigtimedwait(_FORWARDED, _PING_SECONDS)
            self._send(bytes([0 if found is None else found.si_signo]))

    def _take(self) -> bool:
        """Take a frame; return False if the connection has ended."""
        head = self._frames.read(5)
        kind, length = head[:1], int.from_bytes(head[1:], "big")
        content = self._frames.read(length)
        if len(head) < 5 or len(content) < length:
            return False
        if kind == b"P" and self._reports is not None:
            # In single lines, each of which is written whole.
            for line in content.splitlines(keepends=True):
                self._write(self._reports, line)
        elif kind == b"F":
            self._fault = content.decode()
        elif kind == b"X":
            self._ending = json.loads(content)
        elif (to := {b"O": 1, b"E": 2, b"R": self._result}.get(kind)) is not None:
            self._write(to, content)
        return True

    @staticmethod
    def _write(descriptor: int, data: bytes | memoryview) -> None:
        with contextlib.suppress(OSError):  # it isn't read any more
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]

    def _end(self) -> int:
        with contextlib.suppress(OSError):
            self._commands.close()
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        host = self._facts["host"]
        if self._fault:
            self._say(f"the task can't be started on {host}: {self._fault}")
            return 1
        if self._ending is None:
            self._say(f"the connection to {host} has ended (ssh: exit code {code})")
            return -signal.SIGHUP
        if self._errors is not None:
            self._write(self._errors, self._ending["error"].encode())
        ended = self._ending["code"]
        return -signal.SIGHUP if ended is None else int(ended)

    def _say(self, text: str) -> None:
        self._write(2, f"kerasdist run: {text}\n".encode())


def main() -> None:
    """Run, and end as the task did."""
    code = Client(json.loads(os.environ.pop("KERASDIST_REMOTE"))).run()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        signal.raise_signal(-code)
        time.sleep(1.0)
        code = 128 - code
    sys.exit(code)


if __name__ == "__main__":
    main()
