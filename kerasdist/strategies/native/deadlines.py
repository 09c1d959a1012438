"""Deadlines for TensorFlow's collectives.

TensorFlow can put a time-out on each of its collectives, but keeps some 20 KB for
each until that has expired, even if it has ended: with ten minutes, gigabytes. So
the deadlines are kept here, and a thread ends collectives that are late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kerasdist.transport.base import Aborted
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.wire.framing import Call

# Ending the late collective takes the thread at most about this long.
_JOIN_SECONDS = 10.0


class CollectiveDeadlines:
    """The pending collectives, and a thread that reports a late one.

    All have the same time limit, so that the first to begin is the first to be late.

    Args:
        name: Name of the thread.
        late: Called once, from the thread, with the first collective that isn't
            done at its deadline.
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
        """Register a collective that begins.

        Raises:
            Aborted: `stop` was called.
        """
        with self._changed:
            if self._stopped:
                raise Aborted
            self._pending[call.sequence] = call, deadline
            # Otherwise the thread checks again at an earlier deadline: soon enough.
            if self._idle:
                self._changed.notify()

    def end(self, sequence: int) -> None:
        """Unregister one that is done or has failed; unknown ones are ignored."""
        with self._changed:
            self._pending.pop(sequence, None)

    def stop(self) -> list[Call]:
        """Allow no further collectives; return those that are pending."""
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
