"""Totals of communication: sums of the spans of `transport.tracing`."""

from __future__ import annotations

import threading

from kerasdist.transport.tracing import NAMES

_NANO = 1e-9


class SpanSums:
    """A recorder of a communicator's work; see `transport.tracing`.

    Args:
        size: Number of workers.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._now = Work(size)

    def add(
        self, name: str, begin: int, end: int, size: int = 0, what: object = ""
    ) -> None:
        """See `transport.tracing.Recorder.add`."""
        del what
        with self._lock:
            self._now.add(name, end - begin, size)

    def take(self) -> Work:
        """Return the work since the last call."""
        with self._lock:
            taken, self._now = self._now, Work(self._size)
        return taken

    def give_back(self, work: Work) -> None:
        """Restore work that was taken; later work is dropped."""
        with self._lock:
            self._now = work


class Work:
    """Sums of spans.

    Args:
        size: Number of workers.

    Attributes:
        late: Seconds until the first byte arrived, over all collectives.
        sent: Bytes sent to other processes, including those through memory.
        count: Number of collectives.
        reduced: Bytes of all buffers that were reduced.
    """

    def __init__(self, size: int) -> None:
        self.late = 0.0
        self.sent = 0
        self.count = 0
        self.reduced = 0
        # The bytes that each rank sends per byte of a buffer in a ring.
        self._ring = 2 * (size - 1) / size
        self._nanoseconds: dict[str, int] = {}
        self._packed = self._sending = 0
        self._begun = False

    def add(self, name: str, duration: int, size: int) -> None:
        """Add a span with its nanoseconds and bytes."""
        total = self._nanoseconds
        total[name] = total.get(name, 0) + duration
        if name == "send":
            self._sending += size
        elif name == "pack":
            self._packed += size
        elif name == "wait":
            if not self._begun:
                self.late += duration * _NANO
            self._begun = True
        elif name not in NAMES:
            self.count += 1
            self._begun = False
            # Within a host nothing is sent: the others read the packed bytes. And of
            # TensorFlow's own collectives only the size is known.
            self.sent += self._sending or self._packed or int(self._ring * size)
            self._sending = self._packed = 0
            if name == "all_reduce":
                self.reduced += size

    def seconds(self, name: str) -> float:
        """Return the seconds of all spans of this name."""
        return self._nanoseconds.get(name, 0) * _NANO

    def share(self, name: str) -> float:
        """Return the part of all collectives' time that has this name, 0 to 1.

        Sending runs in parallel to the others.
        """
        parts = {part: self.seconds(part) for part in NAMES if part != "send"}
        total = sum(parts.values())
        return parts[name] / total if total else 0.0

    @property
    def communicating(self) -> float:
        """Return the seconds of all collectives and exchanges with servers."""
        return sum(
            value * _NANO
            for name, value in self._nanoseconds.items()
            if name not in NAMES
        )
