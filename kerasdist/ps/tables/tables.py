"""The tables of one server, as its workers' threads use them.

    r: a worker that has finished step c     T: this server's part of a table

    1. r -> server   the changes of step c, and the version it has read last
    2. server        adds them to T, once: a change that was added before (its answer
                     was lost on its way) isn't added again
    3. server        r's clock is c
    4. server        waits until r may go on (`kerasdist.ps.tables.clocks`)
    5. server -> r   T's dense values, and the rows changed since that version

Everything of a step that is finished is in T before its clock ticks: so who may go on
reads it. If r may go on at once, 2. and 5. are done in one pass over the memory.

Locks: `Membership.changed` guards the clocks, `ServedTable.lock` the numbers. Nobody
holds both, or one of them while a message is on its way.
"""

from __future__ import annotations

import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kerasdist import errors
from kerasdist.collectives.ops import Array, octets
from kerasdist.ps.channel.channel import Spec
from kerasdist.ps.layout import Layout
from kerasdist.ps.server.membership import Membership, WorkerRecord
from kerasdist.ps.settings import ServerSettings
from kerasdist.ps.tables.clocks import Clocks
from kerasdist.ps.tables.table import Table
from kerasdist.transport.deadline import Deadline

__all__ = ["Place", "ServedTable", "ServedTables"]

# Makes arrays in the next answer.
Place = Callable[[Sequence[Spec]], list[Array]]
Answer = tuple[dict[str, Any], list[Array]]


class ServedTable:
    """One table at one server.

    Attributes:
        layout: Its layout.
        table: This server's part of it; guarded by `lock`.
        clocks: Guarded by `Membership.changed`.
        applied: By rank the process that has pushed last and its last step; guarded by
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
        """What `table.dense` is made of."""
        return [(str(a.dtype.name), a.shape) for a in self.table.dense]

    def whole(self) -> list[Array]:
        """Copy all values; the caller holds `lock`."""
        return [array.copy() for array in (*self.table.dense, *self.table.rows)]

    def changed_rows(self, since: int) -> list[Array]:
        """Indices and rows, for each sparse piece; the caller holds `lock`."""
        found: list[Array] = []
        changed = self.table.changed(since)
        for indices, rows in zip(changed, self.table.rows, strict=True):
            narrow = np.int32 if len(rows) < 2**31 else np.int64
            found += [indices.astype(narrow), rows[indices]]
        return found


class ServedTables:
    """The tables of one server. Safe for threads.

    Args:
        server: Index of the server.
        servers: Number of servers.
        settings: What the job was asked for.
        crew: The workers.
        on_table: Called with the layout of each new table.

    Attributes:
        mode: As in `settings`.
        updates: Number of updates of all tables.
        seed: Random; that of server 0 is the workers'.
    """

    def __init__(
        self,
        server: int,
        servers: int,
        settings: ServerSettings,
        crew: Membership,
        on_table: Callable[[Layout], None] | None = None,
    ) -> None:
        self.mode = settings.mode
        self.updates = 0
        self.tables: dict[int, ServedTable] = {}
        self.seed = secrets.randbits(31)
        self._server = server
        self._servers = servers
        self._max_staleness = settings.max_staleness
        self._crew = crew
        self._on_table = on_table

    # For workers.

    def open(
        self,
        person: WorkerRecord,
        number: int,
        variables: Any,
        parts: Sequence[Array],
        deadline: Deadline,
    ) -> Answer:
        """A worker begins to use a table; the chief brings its first values.

        Args:
            person: The worker.
            number: Which table: all workers open theirs in the same order, from 0.
            variables: `Layout.to_json` of its layout.
            parts: The chief's first values (`Layout.cut`); of others nothing.
            deadline: When to give up waiting for the chief.

        Returns:
            The present values, with "crc" (of their bytes), "version" and "clock". The
            chief's first values count only if the table is new.

        Raises:
            CollectiveError: The job's failure; workers have different models.
        """
        crew = self._crew
        layout = Layout.from_json(variables, self._servers)
        made = None
        with crew.changed:
            self._check(person)
            self._check_joiner(person, number, layout)
            if not 0 <= number <= len(self.tables) and person.rank == 0:
                raise errors.ProtocolError(
                    f"Tables are opened in order. Received: table={number}; there are "
                    f"{len(self.tables)}."
                )
            if number not in self.tables and person.rank == 0:
                ranks = [p.rank for p in crew.live() if not p.joining]
                made = ServedTable(layout, self._server, ranks, self._max_staleness)
                made.table.load(parts)
                self.tables[number] = made
                crew.changed.notify_all()
            while number not in self.tables:
                self._check(person)
                if crew.people[0].state in ("lost", "finished"):
                    chief = crew.people[0]
                    raise crew.fail(
                        errors.WorkerLost(
                            0,
                            chief.address,
                            0,
                            "it has gone before it brought the first values of a table",
                        )
                    )
                if deadline.expired:
                    raise crew.fail(
                        errors.CollectiveTimeout(
                            f"The chief, {crew.people[0]}, brought no first values of "
                            f"table {number} within {deadline.seconds:g} s; {person} "
                            "waited. Do all workers build the same models in the same "
                            "order? Give it more time with `timeout=`."
                        )
                    )
                crew.changed.wait(deadline.remaining())
            store = self.tables[number]
            if store.layout.fingerprint != layout.fingerprint:
                raise crew.fail(
                    errors.CollectiveMismatch(
                        f"{person} has another model than the server's table "
                        f"{number}. Received: {layout.difference(store.layout)}. All "
                        "workers must build the same model; a server that has gone on "
                        "from a snapshot of another model needs another "
                        "`snapshot_dir`, or an empty one."
                    )
                )
            if store.clocks.clock(person.rank) is None:
                store.clocks.join(person.rank)
            clock = store.clocks.clock(person.rank)
        if made is not None and self._on_table is not None:
            self._on_table(layout)
        with store.lock:
            values = store.whole()
            version = store.table.version
        crc = 0
        for array in values:
            crc = zlib.crc32(octets(array), crc)
        return {"crc": crc, "version": version, "clock": clock}, values

    def push(
        self,
        person: WorkerRecord,
        number: int,
        clock: int,
        since: int,
        parts: Sequence[Array],
        place: Place,
        deadline: Deadline,
    ) -> Answer:
        """Add a step's changes, wait until the worker may go on, read.

        Args:
            person: The worker.
            number: Which table.
            clock: The step that it has finished with these changes.
            since: The version that it has read last; -1: none, it wants all rows.
            parts: The changes, see `Table.add`.
            place: Makes arrays in the next answer.
            deadline: When to give up waiting for slower workers.

        Raises:
            CollectiveError: The job's failure; others were too slow.
            ProtocolError: The changes don't fit.
        """
        store = self._find(number)
        store.table.check(parts)
        began = time.monotonic()
        with self._crew.changed:
            self._check(person)
            at_once = store.clocks.may_read(person.rank, clock)
            staleness = store.clocks.staleness(person.rank, clock)
            least = store.clocks.least
        answer: list[Array] = []
        with store.lock:
            seen = store.applied.get(person.rank)
            again = (
                seen is not None and seen[0] == person.incarnation and seen[1] >= clock
            )
            if at_once:
                answer = place(store.dense_specs())
            if again:
                store.table.read(answer) if at_once else None
            else:
                store.table.add(parts, answer if at_once else None)
                store.applied[person.rank] = (person.incarnation, clock)
                self.updates += 1
            if at_once:
                answer += store.changed_rows(since)
                version = store.table.version
        with self._crew.changed:
            store.clocks.tick(person.rank, clock)
            person.clock = max(person.clock, clock)
            self._crew.changed.notify_all()
            if not at_once:
                self._wait(store, person, clock, deadline)
                staleness = store.clocks.staleness(person.rank, clock)
                least = store.clocks.least
            store.clocks.observe(person.rank, staleness)
        if not at_once:
            with store.lock:
                answer = place(store.dense_specs())
                store.table.read(answer)
                answer += store.changed_rows(since)
                version = store.table.version
        meta = {
            "version": version,
            "staleness": staleness,
            "least": least,
            "waited": 0.0 if at_once else time.monotonic() - began,
        }
        return meta, answer

    def pull(
        self, person: WorkerRecord, number: int, since: int, place: Place
    ) -> Answer:
        """Read without pushing: waits for nobody, and no clock ticks.

        Args and raises as `push`.
        """
        store = self._find(number)
        with self._crew.changed:
            self._check(person)
            least = store.clocks.least
            staleness = store.clocks.staleness(person.rank, person.clock)
        with store.lock:
            answer = place(store.dense_specs())
            store.table.read(answer)
            answer += store.changed_rows(since)
            version = store.table.version
        meta = {
            "version": version,
            "staleness": staleness,
            "least": least,
            "waited": 0.0,
        }
        return meta, answer

    def stats(self) -> list[dict[str, Any]]:
        """What is known of each table, as JSON values."""
        with self._crew.changed:
            return [
                {
                    "table": number,
                    "bytes": store.table.nbytes,
                    "version": store.table.version,
                    "clocks": {str(r): c for r, c in store.clocks.live.items()},
                    "observed": {
                        str(rank): {str(s): n for s, n in sorted(counts.items())}
                        for rank, counts in sorted(store.clocks.observed.items())
                    },
                }
                for number, store in sorted(self.tables.items())
            ]

    # For meetings and for the crew's events; all under `Membership.changed`.

    def park(self, rank: int) -> None:
        """A worker waits at a meeting."""
        for store in self.tables.values():
            store.clocks.park(rank)

    def align(self, ranks: Sequence[int]) -> None:
        """These workers go on from a meeting."""
        for store in self.tables.values():
            store.clocks.align(ranks)

    def drop(self, rank: int) -> None:
        """A worker is gone."""
        for store in self.tables.values():
            store.clocks.drop(rank)

    def clocks_of(self, rank: int) -> dict[str, int]:
        """A worker's clock in each table that it uses."""
        found = {str(n): store.clocks.clock(rank) for n, store in self.tables.items()}
        return {number: clock for number, clock in found.items() if clock is not None}

    def return_at(self, rank: int, clocks: dict[int, int]) -> None:
        """A worker has come back after a restart with these clocks."""
        for number, clock in clocks.items():
            store = self.tables.get(number)
            if store is not None:
                known = store.clocks.clock(rank) or 0
                store.clocks.join(rank, max(known, clock))

    # Inside.

    def _find(self, number: int) -> ServedTable:
        store = self.tables.get(number)
        if store is None:
            raise errors.ProtocolError(
                f"There is no such table. Received: table={number}; known are "
                f"{sorted(self.tables)}."
            )
        return store

    def _check_joiner(self, person: WorkerRecord, number: int, layout: Layout) -> None:
        """Who doesn't fit can't join; the others go on."""
        if not person.joining:
            return
        store = self.tables.get(number)
        if store is None or store.layout.fingerprint != layout.fingerprint:
            raise errors.CollectiveMismatch(
                f"{person} can't join: it has another model than the others, or trains "
                "it at another place. All workers must run the same script."
            )

    def _check(self, person: WorkerRecord) -> None:
        if self._crew.failure is not None:
            raise self._crew.failure
        if self._crew.people[person.rank] is not person or person.state != "live":
            raise errors.TransportClosed(f"{person} was lost.")

    def _wait(
        self, store: ServedTable, person: WorkerRecord, clock: int, deadline: Deadline
    ) -> None:
        while not store.clocks.may_read(person.rank, clock):
            self._check(person)
            if deadline.expired:
                slow = store.clocks.blocking(person.rank, clock)
                names = " and ".join(str(self._crew.people[r]) for r in slow)
                raise self._crew.fail(
                    errors.CollectiveTimeout(
                        f"{person} has finished step {clock} and waited for {names} "
                        f"for {deadline.seconds:g} s (max_staleness="
                        f"{store.clocks.max_staleness}). The process is alive: is it "
                        "still busy with something that only it does? Give it more "
                        "time with `timeout=`."
                    )
                )
            self._crew.changed.wait(deadline.remaining())
        self._check(person)
