"""Which rank failed first: pure functions of what was seen and said.

When one rank fails, the others fail because of it, and the processes needn't end in
the order in which things went wrong: a rank with an exception closes its connections
first, its peers see that, fail and end at once, while it still tidies up. So what
the workers have agreed on counts (see `verdict`). Without it, as when they weren't
connected yet, their outputs may tell; the order of exits is only used where nothing
better is known, and of the chief nothing better is: its output isn't ours to see.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterable

from kerasdist.cli.run.output import is_consequence, last_traceback

__all__ = ["Failure", "exit_code", "first_failure", "in_words"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that ended by itself, and not well.

    Attributes:
        rank: The rank; servers come after the last one.
        code: Its exit code; negative for a signal, as `subprocess` has it.
        ended_at: When its process ended, in ns since the epoch.
        output: The end of its output; empty if we don't see it (the chief's).
        written_at: When it last wrote something, in ns since the epoch.
    """

    rank: int
    code: int
    ended_at: int
    output: str = ""
    written_at: int = 0

    @property
    def failed_at(self) -> int:
        """When it went wrong, as far as can be told, in ns since the epoch."""
        if last_traceback(self.output) is None:
            return self.ended_at
        return min(self.ended_at, self.written_at)


def first_failure(
    failures: Iterable[Failure], blamed: int | None = None
) -> Failure | None:
    """Return the failure that caused the others; None if there are none.

    A rank that says it has lost another one isn't it, unless all say so.

    Args:
        failures: All of them.
        blamed: The rank that the workers say is to blame. It counts if it has failed.
    """
    return min(
        failures,
        key=lambda failure: (
            failure.rank != blamed,
            is_consequence(failure.output),
            failure.failed_at,
        ),
        default=None,
    )


def exit_code(code: int) -> int:
    """Return what a shell would say: 128 + the number for a signal."""
    return 128 - code if code < 0 else code


def in_words(code: int) -> str:
    """Say how a process with this code (negative for a signal) ended."""
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        name = f"{signal.Signals(-code).name} ({-code})"
    except ValueError:
        name = str(-code)
    hint = ""
    if -code == signal.SIGKILL:
        hint = ", sent by someone else or by the system when memory ran out"
    return f"was ended by signal {name}{hint}"
