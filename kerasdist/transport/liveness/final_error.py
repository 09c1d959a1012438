"""The error that ends a script, passed to the launcher in a file.

When one task fails, the others fail because of it. The chief writes to the terminal
directly, so its traceback, of an error with no more content than "rank 1 was lost",
would be printed before rank 1's own error, which the launcher shows. So
`kerasdist run` gives each task whose error output is shown at once an unnamed file, and

    1. task       writes its last traceback into the file
    2. task       prints it too, unless the error follows from another task's loss
    3. launcher   shows the first failure's traceback, then one line for each other task

Without that file, as in a job that `kerasdist run` didn't start, nothing changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import sys
import traceback
from types import TracebackType

from kerasdist import errors
from kerasdist.transport.liveness.launcher_pipe import descriptor_named

ERROR_VARIABLE = "KERASDIST_ERROR_FD"
# Of a longer traceback (for instance of a RecursionError) the end is kept.
_MOST_CHARACTERS = 100_000


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
        return json.dumps(dataclasses.asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> FinalError | None:
        """Return the error in a file's content; None if there is none."""
        try:
            value = json.loads(data)
            return FinalError(
                text=str(value["text"]),
                message=str(value["message"]),
                consequence=bool(value["consequence"]),
            )
        except (ValueError, LookupError, TypeError, RecursionError):
            return None


def final_exception() -> BaseException | None:
    """Return the uncaught exception that has ended this script, in an exit handler."""
    # `last_exc` since Python 3.12.
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def hand_over_final_error() -> None:
    """Pass the exception that ends this process to the launcher.

    Does nothing without a launcher, and where the script has set a `sys.excepthook` of
    its own. Can be called twice.
    """
    named = os.environ.get(ERROR_VARIABLE, "")
    descriptor = descriptor_named(named, stat.S_ISREG)
    if descriptor is None or sys.excepthook is not sys.__excepthook__:
        return
    with contextlib.suppress(OSError):
        os.set_inheritable(descriptor, False)

    def hook(
        kind: type[BaseException],
        error: BaseException,
        frames: TracebackType | None,
    ) -> None:
        consequence = isinstance(error, (errors.WorkerLost, errors.ServerLost))
        text = "".join(traceback.format_exception(kind, error, frames))
        message = "".join(traceback.format_exception_only(kind, error)).strip()
        final = FinalError(
            text=text[-_MOST_CHARACTERS:],
            message=message[:_MOST_CHARACTERS],
            consequence=consequence,
        )
        if not (_write(named, final.encode()) and consequence):
            sys.__excepthook__(kind, error, frames)

    sys.excepthook = hook


def _write(named: str, data: bytes) -> bool:
    """Write the file; return whether all of it was written."""
    # Checked again: the script may have closed it, and opened another file.
    descriptor = descriptor_named(named, stat.S_ISREG)
    if descriptor is None:
        return False
    try:
        return os.pwrite(descriptor, data, 0) == len(data)
    except OSError:
        return False
