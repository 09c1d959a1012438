"""The processes below one, found and ended: children, their children, and orphans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator

from kerasdist.cli.run.hosts.agent import below, signal_all, state_of

# The signals with which a job is ended from outside, beside SIGKILL.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# The signal with which a worker is added to an elastic job.
GROW_SIGNAL = signal.SIGUSR1

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


@contextlib.contextmanager
def adopt_orphans() -> Iterator[None]:
    """Become the parent of descendants whose own parents end, inside the block.

    Otherwise an orphan becomes a child of init, and its origin is unknown. So no
    process escapes, whatever session or process group it made for itself.
    """
    prctl = ctypes.CDLL(None).prctl
    before = ctypes.c_int(0)
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal; False if it has ended.

    A process that a debugger holds isn't.
    """
    return state_of(pid)[:1] == [b"T"]


def kill_all(seconds: float, spare: frozenset[int] = frozenset()) -> list[int]:
    """Send SIGKILL to everything below this process until nothing is left.

    The signal is repeated, because one may fork while the others are being killed.
    Children of this process are reaped.

    Args:
        seconds: How long to go on.
        spare: Processes that are left alone.

    Returns:
        The ids of processes that still run; empty if there are none.
    """
    until = time.monotonic() + seconds
    while True:
        left = [pid for pid in below(os.getpid()) if pid not in spare]
        if not left or time.monotonic() > until:
            return left
        signal_all(signal.SIGKILL, spare)
        for pid in left:
            # Only our own children can be reaped; the others have parents or are
            # given to us when those end.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def kill_left_behind(pid: int, group: int | None = None) -> None:
    """Send SIGKILL to what an ended process has left below this one.

    Args:
        pid: The ended process.
        group: The process group that it shared with others above this process; None:
            it had a session of its own.
    """
    for each in below(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            own_session = group is None and os.getsid(each) == pid
            if own_session or os.getpgid(each) == group:
                os.kill(each, signal.SIGKILL)


def in_foreground(group: int) -> bool:
    """Return whether the terminal's keys send signals to this process group."""
    with contextlib.suppress(OSError):  # there is no terminal
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == group
        finally:
            os.close(terminal)
    return False
