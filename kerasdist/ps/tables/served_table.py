"""One table at one server, with its clocks and its locks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kerasdist.collectives.ops import Array
from kerasdist.ps.channel.channel import Spec
from kerasdist.ps.layout import Layout
from kerasdist.ps.tables.clocks import Clocks
from kerasdist.ps.tables.table import Table

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
