"""Deadlines for TensorFlow's collectives.

TensorFlow can put a time-out on each of its collectives, but keeps some 20 KB of
each until its time is over, also when it's done: with ten minutes, gigabytes. So
the deadlines are kept here, and a thread ends what is too late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kerasdist.transport.base import Aborted
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.wire.framing import Call

__all__ = ["CollectiveDeadlines"]

# What the thread does when something is late takes a while at most.
_JOIN_SECONDS = 10.0


class CollectiveDeadlines:
    """Knows which collectives are pending, and says when one is late.

    All have the same time, so that the first to begin is the first to be late.

    Args:
        name: Of the thread.
        late: Called once, from the thread, with the first collective that isn't
            done when its time is over.
    """

    def __init__(self, name: str, late: Callable[[Call], None]) -> None:
        self._late = late
        self._changed = threading.Condition()
        self._pending: dict[int, tuple[Call, Deadline]] = {}
        self._stopped = False
        self._closed = False
        self._idle = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, call: Call, deadline: Deadline) -> None:
        """A collective begins.

        Raises:
            Aborted: `stop` was called.
        """
        with self._changed:
            if self._stopped:
                raise Aborted
            self._pending[call.sequence] = call, deadline
            # Else it looks again when an earlier one's time is over: soon enough.
            if self._idle:
                self._changed.notify()

    def end(self, sequence: int) -> None:
        """It is done, or has failed. Can be called for what never began."""
        with self._changed:
            self._pending.pop(sequence, None)

    def stop(self) -> list[Call]:
        """Let no collective begin any more; return those that are pending."""
        with self._changed:
            self._stopped = True
            return [call for call, _ in self._pending.values()]

    def close(self) -> None:
        """End the thread. Can be called twice."""
        with self._changed:
            self._stopped = self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        late = self._wait()
        if late is not None:
            self._late(late)

    def _wait(self) -> Call | None:
        with self._changed:
            while not self._closed:
                self._idle = not self._pending
                if self._idle:
                    self._changed.wait()
                    continue
                call, deadline = next(iter(self._pending.values()))
                if deadline.expired:
                    return call
                self._changed.wait(deadline.remaining())
        return None
