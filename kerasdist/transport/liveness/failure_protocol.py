"""The failure detector's contract, and the format of failures in messages."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from kerasdist import errors
from kerasdist.transport.base import Peer
from kerasdist.transport.framing import Call, from_plain, to_object
from kerasdist.transport.liveness.launcher_pipe import (
    InheritedDescriptor,
    descriptor_in_words,
)

# The error that ends a script, passed to the launcher in a file.
#
# When one task fails, the others fail because of it. The chief writes to the terminal
# directly, so its traceback, of an error with no more content than "rank 1 was lost",
# would be printed before rank 1's own error, which the launcher shows. So `kerasdist
# run` gives each task whose error output is shown at once an unnamed file, and
#
#     1. task       writes its last traceback into the file
#     2. task       prints it too, unless the error follows from another task's loss
#     3. launcher   shows the first failure's traceback, then a line for each other task
#
# Without that file, as in a job that `kerasdist run` didn't start, nothing changes.

ERROR_VARIABLE = "KERASDIST_ERROR_FD"
# Of a longer traceback (for instance of a RecursionError) the end is kept.
_MOST_ERROR_CHARACTERS = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalError:
    """The uncaught exception of one task.

    Attributes:
        text: Its traceback, as Python prints it.
        message: Its class and message, the traceback's last lines.
        consequence: Whether it only reports that another task was lost.
    """

    text: str
    message: str
    consequence: bool

    def encode(self) -> bytes:
        """Return the file's content, for `decode`."""
        return json.dumps(to_object(self)).encode()

    @staticmethod
    def decode(data: bytes) -> FinalError | None:
        """Return the error in a file's content; None if there is none."""
        try:
            found: FinalError = from_plain(json.loads(data), FinalError)
        except (ValueError, TypeError, RecursionError):
            return None
        return found


def final_exception() -> BaseException | None:
    """Return the uncaught exception that has ended this script, in an exit handler."""
    # `last_exc` since Python 3.12.
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def hand_over_final_error() -> None:
    """Pass the exception that ends this process to the launcher.

    Does nothing without a launcher, and where the script has set a `sys.excepthook` of
    its own. Can be called twice.
    """
    file = InheritedDescriptor(ERROR_VARIABLE, stat.S_ISREG)
    if file.get() is None or sys.excepthook is not sys.__excepthook__:
        return

    def hook(
        kind: type[BaseException],
        error: BaseException,
        frames: TracebackType | None,
    ) -> None:
        consequence = isinstance(error, (errors.WorkerLost, errors.ServerLost))
        text = "".join(traceback.format_exception(kind, error, frames))
        message = "".join(traceback.format_exception_only(kind, error)).strip()
        final = FinalError(
            text=text[-_MOST_ERROR_CHARACTERS:],
            message=message[:_MOST_ERROR_CHARACTERS],
            consequence=consequence,
        )
        if not (_write(file, final.encode()) and consequence):
            sys.__excepthook__(kind, error, frames)

    sys.excepthook = hook


def _write(file: InheritedDescriptor, data: bytes) -> bool:
    """Write the file; return whether all of it was written."""
    descriptor = file.get()
    if descriptor is None:
        return False
    try:
        return os.pwrite(descriptor, data, 0) == len(data)
    except OSError:
        return False


# The launcher's list of tasks that have ended, and aren't started again.
#
# A worker of an elastic job that finds nothing at a task's address can't know whether
# the task has ended, or hasn't started yet. The launcher knows. It keeps a byte for
# each worker in a file without a name, which all tasks inherit: 1 if its process has
# ended for good. A byte is written and read as a whole, so the file needs no lock.

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
        self._file = InheritedDescriptor(ENDED_VARIABLE, stat.S_ISREG, environ)

    def read(self) -> frozenset[int]:
        """Return the ranks of the tasks that have ended for good."""
        descriptor = self._file.get()
        if descriptor is None:
            return frozenset()
        try:
            marks = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        except OSError:
            return frozenset()
        return frozenset(rank for rank, mark in enumerate(marks) if mark)


_MOST_CHARACTERS = 4000


class Supervisor:
    """Knows the state of all ranks of a job, of which one connection shows only a part.

    This one has no session: it takes every broken connection for a lost rank. Ranks in
    one process may share one: then they agree on the first failure.

    Attributes:
        step: This rank's step, for messages; set by the strategy.
        call: The collective this rank is in, or was in last; set by the
            communicator.
    """

    def __init__(self) -> None:
        self.step = 0
        self.call = Call(0)
        self._failure: errors.CollectiveError | None = None

    @property
    def failure(self) -> errors.CollectiveError | None:
        """The first failure of the job that this rank knows of, or None."""
        return self._failure

    def report(
        self, error: errors.CollectiveError, *, wait: bool = True
    ) -> errors.CollectiveError:
        """Report an error of this rank to all ranks; return the job's first one.

        Args:
            error: The error.
            wait: Whether to wait until the ranks agree on the first error.
        """
        self._failure = self._failure or error
        return self._failure

    def explain(self, peer: Peer, seen: str) -> errors.CollectiveError:
        """Find out why `peer` can't be reached any more, and report it to all ranks."""
        return self.report(errors.WorkerLost(peer.rank, peer.address, self.step, seen))

    def absent(self, call: Call) -> list[Peer] | None:
        """Return the ranks that haven't joined `call`; None if that isn't known."""
        return None


def encode(error: errors.CollectiveError, *, suspected: bool = False) -> bytes:
    """Return a failure as bytes: its class's name and its arguments.

    Args:
        error: The failure.
        suspected: Whether another failure may be the cause: the chief then waits
            a moment for it.
    """
    lost = isinstance(error, (errors.WorkerLost, errors.ServerLost))
    args: Any = error.__reduce__()[1] if lost else (str(error),)
    args = [each[:_MOST_CHARACTERS] if isinstance(each, str) else each for each in args]
    value = {"error": type(error).__name__, "args": args, "suspected": suspected}
    return json.dumps(value).encode()


def decode(payload: bytes | str) -> tuple[errors.CollectiveError, bool]:
    """Return the arguments of `encode`; other bytes are a plain, certain failure."""
    try:
        value = json.loads(payload)
        json.dumps(value, ensure_ascii=False).encode()  # else no log could have it
        kind, args = getattr(errors, value["error"]), value["args"]
        if issubclass(kind, (errors.WorkerLost, errors.ServerLost)):
            index, address, step, reason, *more = args
            lost = kind(
                *(int(index), str(address), int(step), str(reason)),
                *(flag is True for flag in more),
            )
            return lost, value["suspected"] is True
        if issubclass(kind, errors.CollectiveError):
            return kind(str(args[0])), value["suspected"] is True
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    except (OverflowError, RecursionError):  # Infinity, or very many brackets
        pass
    if isinstance(payload, bytes):
        payload = payload.decode("utf-8", "replace")
    return errors.CollectiveError(payload[:_MOST_CHARACTERS]), False
