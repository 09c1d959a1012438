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
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_PING_SECONDS = 5.0
_END_SECONDS = 2.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_MOST = 65536


def _end_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
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
        self._wake, wake = os.pipe()
        for descriptor in (self._wake, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in _FORWARDED:
            signal.signal(number, lambda number, frame: None)
        self._process = subprocess.Popen(
            facts["reach"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # Ctrl-C must reach the task by way of this process alone.
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    def run(self) -> int:
        """Follow the task to its end; return its exit code, negative for a signal."""
        length = None if self._call is None else os.fstat(self._call).st_size
        task = json.dumps({**self._facts["task"], "call": length}).encode()
        program = self._facts["program"].encode()
        self._send(b"%b%08d%b" % (program, len(task), task))
        self._send_call(length or 0)
        pings = threading.Thread(target=self._ping, daemon=True)
        pings.start()
        if self._process.stdout is None:
            raise RuntimeError("The process was started without pipes.")
        reading = self._process.stdout.fileno()
        data = b""
        # After the last frame nothing is waited for: the connection may stay open, for
        # one that was first carries others.
        while self._ending is None and not self._fault:
            ready = select.select([reading, self._wake], [], [])[0]
            if self._wake in ready:
                numbers = os.read(self._wake, _MOST)
                self._send(bytes(each for each in numbers if each in _FORWARDED))
            if reading in ready:
                part = os.read(reading, _MOST)
                if not part:
                    break
                data = self._take(data + part)
        return self._end()

    def _send_call(self, length: int) -> None:
        """Send the file of the function's call, which other processes read, too."""
        begin = 0
        while self._call is not None and begin < length:
            part = os.pread(self._call, _MOST, begin)
            if not part:
                raise OSError("The file of the function's call has been cut off.")
            self._send(part)
            begin += len(part)

    def _send(self, data: bytes) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(ValueError):  # a ping after the end: it's closed
                self._write(self._process.stdin.fileno(), data)

    def _ping(self) -> None:
        while True:
            time.sleep(_PING_SECONDS)
            self._send(b"\0")

    def _take(self, data: bytes) -> bytes:
        """Take whole frames; return the rest."""
        while len(data) >= 5:
            kind, length = data[:1], struct.unpack(">I", data[1:5])[0]
            if len(data) < 5 + length:
                break
            content, data = data[5 : 5 + length], data[5 + length :]
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
        return data

    @staticmethod
    def _write(descriptor: int, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it isn't read any more
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]

    def _end(self) -> int:
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
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
        os.kill(os.getpid(), -code)
        time.sleep(1.0)
        code = 128 - code
    sys.exit(code)


if __name__ == "__main__":
    main()
