"""Deals out numbers: each one goes to the worker that asks for it first.

With mode="async" the batches of an epoch are a queue. A worker that is free claims the
next number of it, and whoever is slow claims fewer:

    queue (0, 3)    0 1 2 3 4 5 6 7      of dataset 0, its third epoch, 8 batches
    worker 0        0   2 3   5 6
    worker 1          1     4     7 .    . the next claim gets none: the epoch is over
"""

from __future__ import annotations

import threading

__all__ = ["END", "Dealer"]

# No queue has so many numbers.
END = 1 << 60

# A job has one or two datasets at once; what is older isn't asked for any more.
_MOST_QUEUES = 256


class Dealer:
    """The queues of one job. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By dataset: its epoch, and the next number of that.
        self._queues: dict[int, tuple[int, int]] = {}

    def claim(self, dataset: int, epoch: int, limit: int, last: int) -> int:
        """Return the next number of a queue.

        Args:
            dataset: Number of the dataset.
            epoch: Number of its epoch; once one has begun, the one before is over.
            limit: How many numbers the queue has; -1: there's no end of them.
            last: The largest number of this queue that the asking worker knows of,
                or -1. A server that was restarted has forgotten how far it was.
                `END`: the queue shall end here, for all.

        Returns:
            The number, or -1: there are none left.
        """
        with self._lock:
            present, number = self._queues.get(dataset, (epoch, 0))
            if epoch < present:
                return -1
            if epoch > present:
                number = 0
            number = max(number, last + 1)
            if 0 <= limit <= number or number >= END:
                self._queues[dataset] = epoch, number
                return -1
            self._queues[dataset] = epoch, number + 1
            while len(self._queues) > _MOST_QUEUES:
                del self._queues[next(iter(self._queues))]
            return number
