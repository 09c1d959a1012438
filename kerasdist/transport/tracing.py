"""Tracing of communication: the names of spans, and the recorder protocol.

A communicator has a recorder while one is registered (`Communicator.add_recorder`);
else None, and a span costs a test. A span has one of these names; the others are within
the collective's own:

    all_reduce, ...     one collective, see `framing.KINDS`, e.g. a bucket of gradients
    push_pull           one exchange of weights with parameter servers
    pack                copying this worker's numbers to the memory they are sent from
    send                from the first to the last byte sent to another process
    wait                until the first byte from the process that this one waits for
    receive             from the first to the last byte, or copying from shared memory
    reduce              adding up

Sending continues while the worker waits and receives: its spans overlap theirs. All
others of one thread follow each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

NAMES = ("pack", "send", "wait", "receive", "reduce")

# Nanoseconds of a monotonic clock. On Linux all processes of a machine have the same
# one.
now = time.monotonic_ns


class Recorder(Protocol):
    """A receiver of spans, called by the threads that communicate: it must be quick."""

    def add(
        self, name: str, begin: int, end: int, size: int = 0, what: object = ""
    ) -> None:
        """Record a span that has ended.

        Args:
            name: Its name, see above.
            begin: When it began, by `now`.
            end: When it ended.
            size: Its number of bytes; 0 if that isn't known.
            what: Its details, e.g. the collective; `str` returns them in words, which
                takes longer than all else here.
        """


class FanOutRecorder:
    """Several recorders as one."""

    def __init__(self, recorders: Iterable[Recorder]) -> None:
        self._recorders = tuple(recorders)

    def add(
        self, name: str, begin: int, end: int, size: int = 0, what: object = ""
    ) -> None:
        """See `Recorder.add`."""
        for recorder in self._recorders:
            recorder.add(name, begin, end, size, what)


class SpanTimer:
    """Spans that follow each other: each begins where the last one ended.

    Args:
        recorder: Gets them; or None.
    """

    __slots__ = ("_begin", "_recorder")

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._begin = 0 if recorder is None else now()

    def end(
        self, name: str, size: int = 0, what: object = "", until: int | None = None
    ) -> None:
        """Record the time since the last call, until now or `until`, as one span."""
        if self._recorder is not None:
            end = now() if until is None else until
            self._recorder.add(name, self._begin, end, size, what)
            self._begin = end

    def skip(self) -> None:
        """Leave out the time since the last call: it is recorded elsewhere."""
        if self._recorder is not None:
            self._begin = now()
