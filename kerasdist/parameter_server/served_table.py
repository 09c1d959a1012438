"""One table at one server, with its clocks and its locks."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kerasdist.collectives.row_exchange import Array
from kerasdist.errors import ProtocolError
from kerasdist.parameter_server.channel import Spec
from kerasdist.parameter_server.layout import Layout

# One server's part of a table: an additive store of numbers.
#
# Dense pieces of one dtype are in one flat buffer. A piece of a sparse variable is an
# array of rows, and each row has the version at which it was last changed: so the rows
# that are new to a reader are found by one vectorized comparison.
#
# Versions count the updates of this part, from 1. A reader keeps the version of its
# last read, and next time requests the rows that have changed since.

Indices = npt.NDArray[np.integer]
# Bytes that are added and read at once: they stay in the caches in between.
_BLOCK_BYTES = 256 << 10


def merge_rows(indices: npt.ArrayLike, values: Array) -> tuple[Indices, Array]:
    """Sum the rows of equal indices.

    Args:
        indices: Indices of rows, of shape `(n,)`, in any order, with repetitions.
        values: The rows, of shape `(n, row_elements)`.

    Returns:
        Increasing indices, and the sum of each one's rows. Rows of one index are
        added in the order in which they are given.
    """
    flat = np.asarray(indices).reshape(-1)
    if flat.size < 2 or bool((flat[1:] > flat[:-1]).all()):
        return flat, values
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    starts = np.flatnonzero(first)
    # ufunc.at takes ten times as long.
    return ordered[starts], np.add.reduceat(values[order], starts, axis=0)


class Table:
    """One server's part of a table, all zeros at first. Not safe for threads.

    Args:
        layout: The layout of the table.
        server: Index of the server.

    Attributes:
        version: Number of updates so far.
        dense: One flat array per dtype, in the order of `Layout.dense`.
        rows: One array of shape `(rows, row_elements)` per piece of `Layout.sparse`.
        versions: For each of `rows`, the version at which each row changed last;
            int64.
    """

    def __init__(self, layout: Layout, server: int) -> None:
        self.version = 0
        self.dense: list[Array] = [
            np.zeros(sum(map(layout.elements, pieces)), name)
            for name, pieces in layout.dense(server).items()
        ]
        self.rows: list[Array] = []
        self.versions: list[npt.NDArray[np.int64]] = []
        for piece in layout.sparse(server):
            variable = layout.variables[piece.variable]
            shape = (piece.rows, variable.row_elements)
            self.rows.append(np.zeros(shape, variable.held))
            self.versions.append(np.zeros(piece.rows, np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(array.nbytes for array in (*self.dense, *self.rows))

    def load(self, parts: Sequence[Array]) -> None:
        """Take over values as `Layout.cut` returns them; that counts as an update.

        Raises:
            ProtocolError: They don't fit this part.
        """
        own = [*self.dense, *self.rows]
        _check_like(parts, own, "values")
        for mine, part in zip(own, parts, strict=True):
            np.copyto(mine, part)
        self.version += 1
        for versions in self.versions:
            versions[:] = self.version

    def check(self, parts: Sequence[Array]) -> None:
        """Check that `add` can take these parts.

        Raises:
            ProtocolError: It can't. The sender has another model, or another version
                of kerasdist.
        """
        count = len(self.dense)
        _check_like(parts[:count], self.dense, "changes")
        if len(parts) != count + 2 * len(self.rows):
            raise ProtocolError(
                "An update has the wrong number of parts. "
                f"Received: {len(parts)}, expected {count + 2 * len(self.rows)}."
            )
        updates = zip(self.rows, parts[count::2], parts[count + 1 :: 2], strict=True)
        for rows, indices, values in updates:
            fits = (
                indices.ndim == 1
                and indices.dtype.kind in "iu"
                and values.dtype == rows.dtype
                and values.shape == (indices.size, rows.shape[1])
            )
            if fits and indices.size:
                # Increasing: so no index is there twice, and the ends are the bounds.
                fits = bool((indices[1:] > indices[:-1]).all())
                fits = fits and indices[0] >= 0 and indices[-1] < len(rows)
            if not fits:
                raise ProtocolError(
                    f"Changed rows don't fit their table of shape {rows.shape}. "
                    f"Received: indices of shape {indices.shape}, dtype "
                    f"{indices.dtype}, rows of shape {values.shape}, dtype "
                    f"{values.dtype}; expected increasing indices from 0 to "
                    f"{len(rows) - 1} and a row of dtype {rows.dtype} for each."
                )

    def add(self, parts: Sequence[Array], out: Sequence[Array] | None = None) -> None:
        """Add checked changes; that is one update.

        Args:
            parts: One flat array per dtype of `dense`, then increasing indices and
                rows for each of `rows`.
            out: Arrays for the new values of `dense` in the same pass, or None.
        """
        self.version += 1
        # An overflow is infinite: the model's script has to deal with it.
        with np.errstate(all="ignore"):
            for number, mine in enumerate(self.dense):
                delta = parts[number]
                if out is None:
                    np.add(mine, delta, out=mine)
                    continue
                step = max(1, _BLOCK_BYTES // mine.itemsize)
                for start in range(0, mine.size, step):
                    block = mine[start : start + step]
                    np.add(block, delta[start : start + step], out=block)
                    out[number][start : start + step] = block
            sparse = iter(parts[len(self.dense) :])
            for rows, versions in zip(self.rows, self.versions, strict=True):
                indices, values = next(sparse), next(sparse)
                if indices.size:
                    rows[indices] += values
                    versions[indices] = self.version

    def read(self, out: Sequence[Array]) -> None:
        """Copy the values of `dense` into `out`, arrays of the same sizes."""
        for mine, copy in zip(self.dense, out, strict=True):
            np.copyto(copy, mine)


def _check_like(parts: Sequence[Array], own: Sequence[Array], what: str) -> None:
    given = [(part.dtype, part.shape) for part in parts]
    expected = [(array.dtype, array.shape) for array in own]
    if given != expected:
        raise ProtocolError(
            f"The {what} don't fit this server's part of the table. "
            f"Received: {given}, expected {expected}."
        )


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
        greatest = max(self._clocks.values(), default=0)
        return min(self._others(None).values(), default=greatest)

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
        return not self.blocking(rank, clock)

    def staleness(self, rank: int, clock: int) -> int:
        """Return the steps that the slowest is behind one that has finished `clock`."""
        return max(0, clock - min(self._others(rank).values(), default=clock))

    def observe(self, rank: int, staleness: int) -> None:
        """Note that a worker has read at this staleness."""
        self.observed.setdefault(rank, collections.Counter())[staleness] += 1

    def blocking(self, rank: int, clock: int) -> list[int]:
        """Return the workers that this one has to wait for."""
        bound = clock - (self.max_staleness or 0)
        return sorted(r for r, c in self._others(rank).items() if c < bound)

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

    def _others(self, rank: int | None) -> dict[int, int]:
        """Return the clocks of the workers beside this one that aren't parked."""
        away = {rank, *self._parked}
        return {r: c for r, c in self._clocks.items() if r not in away}


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
        for versions, rows in zip(self.table.versions, self.table.rows, strict=True):
            indices = np.flatnonzero(versions > since)
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
