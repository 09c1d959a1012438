"""The end of one task: how it ended, whose fault that was, and the error to show."""

from __future__ import annotations

import logging
import shlex
import signal
import sys

from kerasdist.cli.console import print_line
from kerasdist.cli.run.output import end_of, last_traceback
from kerasdist.cli.run.processes import ENDING_SIGNALS
from kerasdist.cli.run.spawn import Started

# Sent by a user, a batch system or an administrator. A signal that a process sends
# itself when it crashes (SIGSEGV, SIGABRT) is an error of its own.
_FROM_OUTSIDE = (signal.SIGKILL, *ENDING_SIGNALS)


def how(task: Started) -> str:
    """Return how a task ended, for instance `rank 1 failed with exit code 3`."""
    return f"{task.task} {in_words(task.code or 0)}"


def is_own_error(worker: Started) -> bool:
    """Return whether a worker was ended by an error of its own."""
    if not worker.code or worker.ended_by_us:
        return False
    if worker.code < 0:
        return -worker.code not in _FROM_OUTSIDE
    return not worker.gave_up


def failed_at(task: Started) -> int:
    """Return the estimated time of a task's failure, in ns since the epoch."""
    output, written_at = task.evidence()
    if last_traceback(output) is None:
        return task.ended_at
    return min(task.ended_at, written_at)


def show_end(task: Started, *, with_log: bool = True) -> None:
    """Show the end of a task's output, the traceback if there is one.

    Args:
        task: The task.
        with_log: Whether the path of its log is printed.
    """
    output = task.evidence()[0]
    whose = f"the end of {task.task}'s output:"
    if last_traceback(output) is None:
        left = whose if output.strip() else "and no output"
        whose = f"{task.task} left no traceback; {left}"
    print_line(whose, logging.ERROR)
    shown = end_of(output)
    if shown:
        print(shown, file=sys.stderr, flush=True)
    if with_log and task.log is not None:
        print_line(f"all of its output: {shlex.quote(str(task.log))}", logging.ERROR)


def exit_code(code: int) -> int:
    """Return a code as a shell shows it: 128 + the number for a signal."""
    return 128 - code if code < 0 else code


def in_words(code: int) -> str:
    """Describe how a process with this code (negative for a signal) ended."""
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        name = f"{signal.Signals(-code).name} ({-code})"
    except ValueError:
        name = str(-code)
    hint = ""
    if -code == signal.SIGKILL:
        hint = ", sent by another process, or by the system when memory ran out"
    return f"was ended by signal {name}{hint}"
