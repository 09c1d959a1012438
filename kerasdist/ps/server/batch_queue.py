"""Deals out numbers: each one goes to the worker that asks for it first.

With mode="async" the batches of an epoch are a queue. A worker that is free claims the
next number of it, and whoever is slow claims fewer:

    queue (0, 3)    0 1 2 3 4 5 6 7      of dataset 0, its third epoch, 8 batches
    worker 0        0   2 3   5 6
    worker 1          1     4     7 .    . the next claim gets none: the epoch is over

A server that is restarted has forgotten how far it was. Each worker that comes back
says which numbers it has claimed last: what nobody has, because the answer never came,
is dealt out first, and then goes on behind the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

__all__ = ["END", "REMEMBERED", "BatchQueue"]

# No queue has so many numbers.
END = 1 << 60
# How many of its last claims a worker tells a server that was restarted: in that range
# nobody else's claim can be unknown.
REMEMBERED = 32

# A job has one or two datasets at once; what is older isn't asked for any more.
_MOST_QUEUES = 256


class BatchQueue:
    """The queues of one job. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By dataset: its epoch, and the next number of that.
        self._queues: dict[int, tuple[int, int]] = {}
        # By dataset, after a restart: what the workers say they have claimed last, and
        # the numbers among those that nobody has.
        self._known: dict[int, set[int]] = {}
        self._holes: dict[int, list[int]] = {}

    def claim(self, dataset: int, epoch: int, limit: int, last: int) -> int:
        """Return the next number of a queue.

        Args:
            dataset: Number of the dataset.
            epoch: Number of its epoch; once one has begun, the one before is over.
            limit: How many numbers the queue has; -1: there's no end of them.
            last: The largest number of this queue that the asking worker knows of,
                or -1: it gets a greater one. `END`: the queue shall end here, for all.

        Returns:
            The number, or -1: there are none left.
        """
        with self._lock:
            present, number = self._queues.get(dataset, (epoch, 0))
            if epoch < present:
                return -1
            if epoch > present:
                number = 0
                self._forget(dataset)
            hole = self._next_hole(dataset, last)
            if hole is not None:
                return hole
            number = max(number, last + 1)
            if 0 <= limit <= number or number >= END:
                self._queues[dataset] = epoch, number
                return -1
            self._queues[dataset] = epoch, number + 1
            while len(self._queues) > _MOST_QUEUES:
                del self._queues[next(iter(self._queues))]
            return number

    def resume(self, dataset: int, epoch: int, numbers: Sequence[int]) -> None:
        """A worker has come back after a restart of the server.

        All of them come back before the next claim.

        Args:
            dataset: Number of the dataset.
            epoch: Number of its epoch in which the worker has claimed last.
            numbers: What it has claimed last in that, up to `REMEMBERED` numbers.
        """
        with self._lock:
            present, number = self._queues.get(dataset, (epoch, 0))
            if epoch < present or not numbers:
                return
            if epoch > present:
                number = 0
                self._forget(dataset)
            self._queues[dataset] = epoch, max(number, max(numbers) + 1)
            self._known.setdefault(dataset, set()).update(numbers)

    def _forget(self, dataset: int) -> None:
        self._known.pop(dataset, None)
        self._holes.pop(dataset, None)

    def _next_hole(self, dataset: int, last: int) -> int | None:
        known = self._known.pop(dataset, None)
        if known is not None:
            top = max(known)
            first = max(0, top - REMEMBERED + 1)
            self._holes[dataset] = [n for n in range(first, top) if n not in known]
        holes = self._holes.get(dataset, [])
        hole = next((n for n in holes if n > last), None)
        if hole is not None:
            holes.remove(hole)
        return hole
