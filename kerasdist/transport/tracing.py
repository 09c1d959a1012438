"""What a worker's communication spends its time on, for whoever wants to know.

A communicator has a recorder while somebody listens, see `Communicator.listen`; else
None, and all that it costs is to find that out. A span has one of these names; the
others lie within the collective's own:

    all_reduce, ...     one collective, see `framing.KINDS`: a bucket of gradients, say
    push_pull           one exchange of weights with parameter servers
    pack                this worker's numbers are copied to where they are sent from
    send                from the first to the last byte that goes to another process
    wait                nothing has come yet from the process that this one waits for
    receive             from the first to the last byte, or copying from shared memory
    reduce              adding up

Sending goes on while the worker waits and receives: its spans overlap theirs. All
others of one thread follow each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

__all__ = ["NAMES", "Laps", "Recorder", "Several", "now"]

NAMES = ("pack", "send", "wait", "receive", "reduce")

# Nanoseconds of a clock that never goes back. On Linux all processes of a machine have
# the same one.
now = time.monotonic_ns


class Recorder(Protocol):
    """Takes spans. It's called by the threads that communicate, and must be quick."""

    def add(
        self, name: str, begin: int, end: int, size: int = 0, what: str = ""
    ) -> None:
        """A span has ended.

        Args:
            name: See above.
            begin: When it began, as `now` says.
            end: When it ended.
            size: How many bytes it was about; 0 if that isn't known.
            what: More of it in words, e.g. which collective.
        """


class Several:
    """Several recorders as one."""

    def __init__(self, recorders: Iterable[Recorder]) -> None:
        self._recorders = tuple(recorders)

    def add(
        self, name: str, begin: int, end: int, size: int = 0, what: str = ""
    ) -> None:
        """See `Recorder.add`."""
        for recorder in self._recorders:
            recorder.add(name, begin, end, size, what)


class Laps:
    """Spans that follow each other: each begins where the last one has ended."""

    __slots__ = ("_begin", "_recorder")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._begin = now()

    def end(
        self, name: str, size: int = 0, what: str = "", until: int | None = None
    ) -> None:
        """What was done since the last call was this, until now or this time."""
        end = now() if until is None else until
        self._recorder.add(name, self._begin, end, size, what)
        self._begin = end

    def skip(self) -> None:
        """What was done since the last call is recorded elsewhere."""
        self._begin = now()
