"""One table at one server, with its clocks and its locks."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from kerasdist.collectives.ops import Array
from kerasdist.ps.channel.channel import Spec
from kerasdist.ps.layout import Layout
from kerasdist.ps.tables.table import Table

# The clocks of the workers of one table, which bound staleness.
#
# A worker's clock is the number of the last step that it has finished. With
# `max_staleness = s` a worker that has finished step c continues only when the slowest
# live one has finished at least step c - s (stale synchronous parallel: Ho et al.,
# "More effective distributed ML via a stale synchronous parallel parameter server",
# NIPS 2013):
#
#     s = 2     worker 0  1 2 3 4 5 6 .        has finished 6: may continue
#               worker 1  1 2 3 4 .            the slowest: may always continue
#               worker 2  1 2 3 4 5 6 7 |      has finished 7: waits for worker 1's 5
#
# s = 0: in step. None: no worker waits for another.
#
# A worker that waits in a collective (the end of an epoch) is parked: it has nothing
# left to finish, and no worker waits for its clock. After the collective all clocks are
# equal again. A worker that joins begins at the least live clock; none waits for a
# dropped one.


class Clocks:
    """The clocks of the workers of one table. Not safe for threads.

    Args:
        ranks: The workers that begin.
        max_staleness: Steps that a worker may be ahead of the slowest; None: any.

    Attributes:
        observed: For each rank that was ever a member, the number of its reads by
            staleness: the steps that the slowest was behind it.
    """

    def __init__(self, ranks: Iterable[int], max_staleness: int | None) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(
                "A staleness is a number of steps. "
                f"Received: max_staleness={max_staleness}; expected >= 0 or None."
            )
        self.max_staleness = max_staleness
        self._clocks = dict.fromkeys(ranks, 0)
        self._parked: set[int] = set()
        self.observed: dict[int, collections.Counter[int]] = {}

    @property
    def live(self) -> Mapping[int, int]:
        """The clock of each live worker, parked ones among them."""
        return dict(self._clocks)

    @property
    def least(self) -> int:
        """The least clock of workers that aren't parked; if all are, the greatest."""
        active = [c for r, c in self._clocks.items() if r not in self._parked]
        return min(active) if active else max(self._clocks.values(), default=0)

    def clock(self, rank: int) -> int | None:
        """Return a worker's clock; None if it isn't a member."""
        return self._clocks.get(rank)

    def tick(self, rank: int, clock: int) -> None:
        """Note that the worker has finished step `clock`. Clocks never decrease."""
        if rank in self._clocks:
            self._clocks[rank] = max(self._clocks[rank], clock)

    def may_read(self, rank: int, clock: int) -> bool:
        """Return whether a worker that has finished `clock` may continue now.

        True too for one that isn't a member (any more): no bound applies to it.
        """
        if self.max_staleness is None or rank not in self._clocks:
            return True
        return self._others(rank, clock) >= clock - self.max_staleness

    def staleness(self, rank: int, clock: int) -> int:
        """Return the steps that the slowest is behind one that has finished `clock`."""
        return max(0, clock - self._others(rank, clock))

    def observe(self, rank: int, staleness: int) -> None:
        """Note that a worker has read at this staleness."""
        self.observed.setdefault(rank, collections.Counter())[staleness] += 1

    def blocking(self, rank: int, clock: int) -> list[int]:
        """Return the workers that this one has to wait for."""
        bound = clock - (self.max_staleness or 0)
        return sorted(
            r
            for r, c in self._clocks.items()
            if r != rank and r not in self._parked and c < bound
        )

    def join(self, rank: int, clock: int | None = None) -> int:
        """Add a worker, perhaps once more; return its clock.

        Args:
            rank: The worker.
            clock: Its clock if it has one (from before a server's restart); None: the
                least live one.
        """
        if clock is None:
            self.drop(rank)
            clock = self.least
        self._parked.discard(rank)
        self._clocks[rank] = clock
        return clock

    def drop(self, rank: int) -> int | None:
        """Remove a worker that is lost or has finished; return its clock, if any."""
        self._parked.discard(rank)
        return self._clocks.pop(rank, None)

    def park(self, rank: int) -> None:
        """Let no worker wait for this one, which waits in a collective."""
        if rank in self._clocks:
            self._parked.add(rank)

    def align(self, ranks: Iterable[int]) -> None:
        """Set workers to one clock, at the end of their collective."""
        met = [rank for rank in ranks if rank in self._clocks]
        top = max((self._clocks[rank] for rank in met), default=0)
        for rank in met:
            self._clocks[rank] = top
            self._parked.discard(rank)

    def _others(self, rank: int, clock: int) -> int:
        return min(
            (c for r, c in self._clocks.items() if r != rank and r not in self._parked),
            default=clock,
        )


# Makes arrays in the next reply.
Place = Callable[[Sequence[Spec]], list[Array]]


class ServedTable:
    """One table at one server.

    Attributes:
        layout: Its layout.
        table: This server's part of it; guarded by `lock`.
        clocks: Guarded by `Membership.changed`.
        applied: By rank the process that pushed last and its last step; guarded by
            `lock`.
        lock: Held for as long as numpy needs, never across the network.
    """

    def __init__(
        self,
        layout: Layout,
        server: int,
        ranks: Iterable[int],
        max_staleness: int | None,
    ) -> None:
        self.layout = layout
        self.table = Table(layout, server)
        self.clocks = Clocks(ranks, max_staleness)
        self.applied: dict[int, tuple[str, int]] = {}
        self.lock = threading.Lock()

    def dense_specs(self) -> list[Spec]:
        """Return the dtypes and shapes of `table.dense`."""
        return [(str(a.dtype.name), a.shape) for a in self.table.dense]

    def whole(self) -> list[Array]:
        """Copy all values; the caller holds `lock`."""
        return [array.copy() for array in (*self.table.dense, *self.table.rows)]

    def changed_rows(self, since: int) -> list[Array]:
        """Return indices and rows, for each sparse piece; the caller holds `lock`."""
        found: list[Array] = []
        changed = self.table.changed(since)
        for indices, rows in zip(changed, self.table.rows, strict=True):
            narrow = np.int32 if len(rows) < 2**31 else np.int64
            found += [indices.astype(narrow), rows[indices]]
        return found

    def read(self, since: int, place: Place) -> tuple[int, list[Array]]:
        """Copy the table into a reply; return its version and the arrays.

        Args:
            since: The version of the worker's last read; -1: none, it needs all rows.
            place: Makes arrays in the reply.
        """
        with self.lock:
            answer = place(self.dense_specs())
            self.table.read(answer)
            answer += self.changed_rows(since)
            return self.table.version, answer
