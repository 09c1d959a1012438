"""The launcher's list of tasks that have ended, and aren't started again.

A worker of an elastic job that finds nothing at a task's address can't know whether the
task has ended, or hasn't started yet. The launcher knows. It keeps a byte for each
worker in a file without a name, which all tasks inherit: 1 if its process has ended for
good. A byte is written and read as a whole, so the file needs no lock.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping

from kerasdist.transport.liveness.launcher_pipe import (
    descriptor_in_words,
    descriptor_named,
)

ENDED_VARIABLE = "KERASDIST_ENDED_FD"


class EndedTaskList:
    """The list, as the launcher writes it.

    Args:
        size: Number of workers.
    """

    def __init__(self, size: int) -> None:
        self._file = os.fdopen(os.memfd_create("kerasdist-ended"), "w+b", buffering=0)
        self._file.write(bytes(size))

    def fileno(self) -> int:
        """Return the descriptor that tasks inherit."""
        return self._file.fileno()

    @property
    def environ(self) -> dict[str, str]:
        """The variable that names the list to a task that inherits it."""
        return {ENDED_VARIABLE: descriptor_in_words(self.fileno())}

    def mark(self, rank: int, *, ended: bool) -> None:
        """Note whether the process of a task has ended for good."""
        os.pwrite(self.fileno(), bytes([ended]), rank)

    def close(self) -> None:
        """Close the launcher's descriptor."""
        self._file.close()


class EndedTasks:
    """The list, as a worker reads it; empty if there is no launcher.

    Args:
        environ: The environment with `KERASDIST_ENDED_FD`; the process's by default.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._named = environ.get(ENDED_VARIABLE, "")
        descriptor = descriptor_named(self._named, stat.S_ISREG)
        if descriptor is not None:
            # This process had to inherit it; processes of the script mustn't.
            with contextlib.suppress(OSError):
                os.set_inheritable(descriptor, False)

    def read(self) -> frozenset[int]:
        """Return the ranks of the tasks that have ended for good."""
        # Checked again: the script may have closed it, and opened another file.
        descriptor = descriptor_named(self._named, stat.S_ISREG)
        if descriptor is None:
            return frozenset()
        try:
            marks = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        except OSError:
            return frozenset()
        return frozenset(rank for rank, mark in enumerate(marks) if mark)
