"""Queues of batches: each number is assigned to the first worker that claims it.

With mode="async" the batches of an epoch are a queue. A worker that is free claims the
next number of it, and a slow one claims fewer:

    queue (0, 3)    0 1 2 3 4 5 6 7      of dataset 0, its third epoch, 8 batches
    worker 0        0   2 3   5 6
    worker 1          1     4     7 .    . the next claim gets none: the epoch is over

A restarted server doesn't know how far its queues were. Each worker that reconnects
reports its last claims: numbers that no worker has, because the reply was lost, are
assigned first; then the queue continues after the last one.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from kerasdist.errors import ProtocolError
from kerasdist.ps.layout import Layout

# The load of each server in bytes: counted, checked and put into words.
#
# With mode="async" that is its part of a table, known from the table's layout. With
# mode="sync" servers hold nothing: there it is the bytes that one worker sends to it in
# a step, known when the first step is finished.


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """The load of one server.

    Attributes:
        size: Bytes.
        pieces: Number of pieces: of variables, or of buffers.
    """

    size: int
    pieces: int


def loads_from_json(value: Any, servers: int) -> list[Load]:
    """Return the loads that the chief counted: size and pieces for each server.

    Raises:
        ProtocolError: The value is damaged.
    """
    try:
        loads = [Load(int(size), int(pieces)) for size, pieces in value]
    except (TypeError, ValueError, OverflowError):
        loads = []
    if len(loads) != servers or any(min(x.size, x.pieces) < 0 for x in loads):
        raise ProtocolError(f"A list of loads is damaged. Received: {value!r:.200}.")
    return loads


def loads_of(layout: Layout) -> list[Load]:
    """Return each server's part of a table."""
    pieces = [0] * layout.servers
    for piece in layout.pieces:
        pieces[piece.server] += 1
    return [
        Load(size, count)
        for size, count in zip(layout.server_bytes(), pieces, strict=True)
    ]


def share_in_words(loads: Sequence[Load], server: int) -> str:
    """Return one server's load and share as text.

    For instance `1,200 bytes in 2 pieces, 60.0 % of 2,000 bytes`.
    """
    mine, total = loads[server], sum(load.size for load in loads)
    share = 100 * mine.size / total if total else 0.0
    noun = "piece" if mine.pieces == 1 else "pieces"
    return (
        f"{mine.size:,} bytes in {mine.pieces:,} {noun}, "
        f"{share:.1f} % of {total:,} bytes"
    )


# No queue is this long.
END = 1 << 60
# Number of last claims that a worker reports to a restarted server: in that range no
# claim of another worker can be unknown.
REMEMBERED = 32

# A job has one or two datasets at once; older ones aren't claimed from any more.
_MOST_QUEUES = 256


class BatchQueue:
    """The queues of one job. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By dataset: its epoch, and the next number of that.
        self._queues: dict[int, tuple[int, int]] = {}
        # By dataset, after a restart: the last claims that the workers report, and the
        # numbers among those that no worker has.
        self._known: dict[int, set[int]] = {}
        self._unclaimed: dict[int, list[int]] = {}

    def claim(self, dataset: int, epoch: int, limit: int, last: int) -> int:
        """Return the next number of a queue.

        Args:
            dataset: Number of the dataset.
            epoch: Number of its epoch; once one has begun, the one before is over.
            limit: Length of the queue; -1: it's endless.
            last: The largest number of this queue that the claiming worker knows of,
                or -1: it gets a greater one. `END`: the queue ends here, for all.

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
            unclaimed = self._next_unclaimed(dataset, last)
            if unclaimed is not None:
                return unclaimed
            number = max(number, last + 1)
            if 0 <= limit <= number or number >= END:
                self._queues[dataset] = epoch, number
                return -1
            self._queues[dataset] = epoch, number + 1
            while len(self._queues) > _MOST_QUEUES:
                del self._queues[next(iter(self._queues))]
            return number

    def resume(self, dataset: int, epoch: int, numbers: Sequence[int]) -> None:
        """Add the claims of a worker that reconnects after a restart of the server.

        All of them reconnect before the next claim.

        Args:
            dataset: Number of the dataset.
            epoch: Number of its epoch of the worker's last claims.
            numbers: The last claims in that, up to `REMEMBERED` numbers.
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
        self._unclaimed.pop(dataset, None)

    def _next_unclaimed(self, dataset: int, last: int) -> int | None:
        known = self._known.pop(dataset, None)
        if known is not None:
            top = max(known)
            first = max(0, top - REMEMBERED + 1)
            self._unclaimed[dataset] = [n for n in range(first, top) if n not in known]
        unclaimed = self._unclaimed.get(dataset, [])
        found = next((n for n in unclaimed if n > last), None)
        if found is not None:
            unclaimed.remove(found)
        return found
