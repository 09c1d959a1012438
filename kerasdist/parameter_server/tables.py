"""The tables of one server, as its workers' threads use them.

    r: a worker that has finished step c     T: this server's part of a table

    1. r -> server   the changes of step c, and the version of its last read
    2. server        adds them to T, once: a change that was added before (its reply
                     was lost) isn't added again
    3. server        sets r's clock to c
    4. server        waits until r may continue (`parameter_server.served_table`)
    5. server -> r   T's dense values, and the rows changed since that version

All changes of a finished step are in T before its clock ticks: so a worker that may
continue reads them. If r may continue at once, 2. and 5. are one pass over the memory.

Locks: `Membership.changed` guards the clocks, `ServedTable.lock` the numbers. No thread
holds both, or one of them while it sends or receives.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kerasdist import errors
from kerasdist.collectives.row_exchange import Array
from kerasdist.parameter_server.channel import Channel, Message, checksum_of
from kerasdist.parameter_server.layout import Layout, ServerSettings, Variable
from kerasdist.parameter_server.membership import Membership, WorkerRecord
from kerasdist.parameter_server.served_table import ServedTable
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import to_object

Reply = tuple[dict[str, Any], list[Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """The reply to a worker that opens a table, beside that to a `Pull`.

    Attributes:
        crc: CRC-32 of the values' bytes.
        clock: The worker's clock.
    """

    crc: int
    clock: int


@dataclasses.dataclass(frozen=True)
class TableState:
    """The state of a table at a read, in the reply with the values.

    Attributes:
        version: The version of the values.
        staleness: Steps that the slowest worker was behind.
        least: The least clock of the live workers.
        waited: Seconds that the worker waited for slower ones.
    """

    version: int
    staleness: int
    least: int
    waited: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Open:
    """A request to begin to use a table; see `ServedTables.open`.

    Attributes:
        table: Its number.
        use: Number of the strategy that opens it.
        variables: Its variables.
        has_values: Whether their values follow.
    """

    table: int
    use: int
    variables: tuple[Variable, ...]
    has_values: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class First:
    """A request for the first value of a new variable, with the worker's own.

    Attributes:
        number: The variable's number: all create theirs in one order, from 0.
    """

    number: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Push:
    """A request to add a step's changes, and to read; see `ServedTables.push`."""

    table: int
    clock: int
    since: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pull:
    """A request to read; see `ServedTables.pull`."""

    table: int
    since: int


@dataclasses.dataclass(frozen=True)
class Asked:
    """The parts of a request beside its record."""

    worker: WorkerRecord
    message: Message
    channel: Channel
    deadline: Deadline


class ServedTables:
    """The tables of one server. Safe for threads.

    Args:
        server: Index of the server.
        settings: The job's settings.
        membership: The workers.

    Attributes:
        mode: As in `settings`.
        updates: Number of updates of all tables.
        seed: Random; that of server 0 is the workers'.
        first_values: Those of variables that steps create, by number, until all
            workers have them.
        on_table: Called with the layout of each table when the chief has sent its
            first values, or None.
    """

    def __init__(
        self,
        server: int,
        settings: ServerSettings,
        membership: Membership,
    ) -> None:
        self.mode = settings.mode
        self.updates = 0
        self.tables: dict[int, ServedTable] = {}
        self.seed = secrets.randbits(31)
        self.first_values: dict[int, Array] = {}
        # How many of them each worker has asked for.
        self._asked: dict[int, int] = {}
        self._server = server
        self._max_staleness = settings.max_staleness
        self._membership = membership
        self.on_table: Callable[[Layout], None] | None = None

    # For workers.

    def open(self, request: Open, asked: Asked, layout: Layout) -> Reply:
        """Open a table for a worker.

        Args:
            request: All workers open their tables in one order, from 0. Only the chief
                sends first values if all open the table together.
            asked: Its arrays are the first values (`Layout.cut`), which count only if
                the table is new; its deadline is for a worker that has values.
            layout: The worker's layout of it.

        Returns:
            `Opened`, and the present values.

        Raises:
            CollectiveError: The job's failure; workers have different models.
        """
        members, worker, number = self._membership, asked.worker, request.table
        has_values, deadline = request.has_values, asked.deadline
        made = None
        with members.changed:
            members.check(worker)
            self._check_joiner(worker, number, layout)
            if not 0 <= number <= len(self.tables) and has_values:
                raise errors.ProtocolError(
                    f"Tables are opened in order. Received: table={number}; there are "
                    f"{len(self.tables)}."
                )
            if number not in self.tables and has_values:
                ranks = [p.rank for p in members.live() if not p.joining]
                made = ServedTable(layout, self._server, ranks, self._max_staleness)
                made.table.load(asked.message.arrays)
                self.tables[number] = made
                members.changed.notify_all()
            while number not in self.tables:
                members.check(worker)
                if members.workers[0].state in ("lost", "finished"):
                    chief = members.workers[0]
                    raise members.fail(
                        errors.WorkerLost(
                            0,
                            chief.address,
                            0,
                            "it left before it sent the first values of a table",
                        )
                    )
                if deadline.expired:
                    raise members.fail(
                        errors.CollectiveTimeout(
                            f"The chief, {members.workers[0]}, sent no first values "
                            f"of table {number} within {deadline.seconds:g} s; "
                            f"{worker} waited. Do all workers build the same models in "
                            "the same order? Give it more time with `timeout=`."
                        )
                    )
                members.changed.wait(deadline.remaining())
            served = self.tables[number]
            if served.layout.fingerprint != layout.fingerprint:
                raise members.fail(
                    errors.CollectiveMismatch(
                        f"{worker} has another model than the server's table "
                        f"{number}. Received: {layout.difference(served.layout)}. All "
                        "workers must build the same model; a server that continues "
                        "from a snapshot of another model needs another "
                        "`snapshot_dir`, or an empty one."
                    )
                )
            clock = served.clocks.clock(worker.rank)
            if clock is None:
                clock = served.clocks.join(worker.rank)
        if made is not None and self.on_table is not None:
            self.on_table(layout)
        # All of it: it's newer than any version before the first.
        state, values = self.pull(Pull(table=number, since=-1), asked)
        opened = Opened(crc=checksum_of(values), clock=clock)
        return {**state, **to_object(opened)}, values

    def first_value(self, request: First, asked: Asked) -> Reply:
        """Return the first value that a worker has sent for a new variable.

        Steps create variables at different times on different workers.

        Args:
            request: The variable.
            asked: Its only array is the worker's own value.

        Returns:
            The value alone; nothing if all workers of that time have it: then
            a table has newer ones.

        Raises:
            CollectiveError: The job's failure; workers have different models.
            ProtocolError: There isn't one value.
        """
        if len(asked.message.arrays) != 1:
            raise errors.ProtocolError(
                "A request is damaged. "
                f"Received: {len(asked.message.arrays)} first values."
            )
        (value,) = asked.message.arrays
        members, worker, number = self._membership, asked.worker, request.number
        with members.changed:
            members.check(worker)
            if number < self._asked.get(worker.rank, 0):
                return {}, []  # a process that was started again
            self._asked[worker.rank] = number + 1
            known = self.first_values.setdefault(number, np.array(value))
            if (known.shape, known.dtype) != (value.shape, value.dtype):
                raise members.fail(
                    errors.CollectiveMismatch(
                        f"{worker} creates another variable {number} in a step than "
                        f"the others. Received: shape {value.shape}, dtype "
                        f"{value.dtype}; theirs has shape {known.shape}, dtype "
                        f"{known.dtype}. All workers must build the same model."
                    )
                )
            counts = [self._asked.get(each.rank, 0) for each in members.live()]
            for done in [n for n in self.first_values if n < min(counts)]:
                del self.first_values[done]
        return {}, [known]

    def push(self, request: Push, asked: Asked) -> Reply:
        """Add a step's changes, wait until the worker may continue, read.

        Args:
            request: The step that the worker has finished with these changes, and the
                version of its last read; -1: none, it needs all rows.
            asked: Its arrays are the changes, see `Table.add`; its channel makes arrays
                in the next reply; its deadline is for slower workers.

        Raises:
            CollectiveError: The job's failure; others were too slow.
            ProtocolError: The changes don't fit.
        """
        worker, clock, since = asked.worker, request.clock, request.since
        parts, place = asked.message.arrays, asked.channel.place
        served = self._find(request.table)
        served.table.check(parts)
        began = time.monotonic()
        with self._membership.changed:
            self._membership.check(worker)
            at_once = served.clocks.may_read(worker.rank, clock)
            staleness = served.clocks.staleness(worker.rank, clock)
            least = served.clocks.least
        answer: list[Array] = []
        with served.lock:
            seen = served.applied.get(worker.rank)
            again = (
                seen is not None and seen[0] == worker.incarnation and seen[1] >= clock
            )
            if at_once:
                answer = place(served.dense_specs())
            if again and at_once:
                served.table.read(answer)
            elif not again:
                served.table.add(parts, answer if at_once else None)
                served.applied[worker.rank] = (worker.incarnation, clock)
                self.updates += 1
            if at_once:
                answer += served.changed_rows(since)
                version = served.table.version
        with self._membership.changed:
            served.clocks.tick(worker.rank, clock)
            worker.clock = max(worker.clock, clock)
            self._membership.changed.notify_all()
            if not at_once:
                self._wait(served, worker, clock, asked.deadline)
                staleness = served.clocks.staleness(worker.rank, clock)
                least = served.clocks.least
            served.clocks.observe(worker.rank, staleness)
        if not at_once:
            version, answer = served.read(since, place)
        waited = 0.0 if at_once else time.monotonic() - began
        return to_object(TableState(version, staleness, least, waited)), answer

    def pull(self, request: Pull, asked: Asked) -> Reply:
        """Read without pushing: it doesn't wait, and no clock ticks.

        Args and raises as `push`.
        """
        worker, served = asked.worker, self._find(request.table)
        with self._membership.changed:
            self._membership.check(worker)
            least = served.clocks.least
            staleness = served.clocks.staleness(worker.rank, worker.clock)
        version, answer = served.read(request.since, asked.channel.place)
        return to_object(TableState(version, staleness, least)), answer

    def stats(self) -> list[dict[str, Any]]:
        """Return statistics of each table, as JSON values."""
        with self._membership.changed:
            return [
                {
                    "table": number,
                    "bytes": served.table.nbytes,
                    "version": served.table.version,
                    "clocks": {str(r): c for r, c in served.clocks.live.items()},
                    "observed": {
                        str(rank): {str(s): n for s, n in sorted(counts.items())}
                        for rank, counts in sorted(served.clocks.observed.items())
                    },
                }
                for number, served in sorted(self.tables.items())
            ]

    # For collectives and for workers' events; all under `Membership.changed`.

    def park(self, rank: int) -> None:
        """Park the clocks of a worker that waits in a collective."""
        for served in self.tables.values():
            served.clocks.park(rank)

    def align(self, ranks: Sequence[int]) -> None:
        """Let these workers go on after a collective."""
        for served in self.tables.values():
            served.clocks.align(ranks)

    def drop(self, rank: int) -> None:
        """Remove a worker from the clocks of all tables."""
        for served in self.tables.values():
            served.clocks.drop(rank)

    def clocks_of(self, rank: int) -> dict[int, int]:
        """Return a worker's clock in each table that it uses."""
        found = {n: served.clocks.clock(rank) for n, served in self.tables.items()}
        return {number: clock for number, clock in found.items() if clock is not None}

    def return_at(self, rank: int, clocks: Mapping[int, int]) -> None:
        """Restore a worker's clocks when it reconnects to a restarted server."""
        for number, clock in clocks.items():
            served = self.tables.get(number)
            if served is not None:
                known = served.clocks.clock(rank) or 0
                served.clocks.join(rank, max(known, clock))

    # Inside.

    def _find(self, number: int) -> ServedTable:
        served = self.tables.get(number)
        if served is None:
            raise errors.ProtocolError(
                f"There is no such table. Received: table={number}; known are "
                f"{sorted(self.tables)}."
            )
        return served

    def _check_joiner(self, worker: WorkerRecord, number: int, layout: Layout) -> None:
        """Refuse a joining worker whose model differs; the others continue.

        Raises:
            CollectiveMismatch: It differs.
        """
        if not worker.joining:
            return
        served = self.tables.get(number)
        if served is None or served.layout.fingerprint != layout.fingerprint:
            raise errors.CollectiveMismatch(
                f"{worker} can't join: it has another model than the others, or trains "
                "it at another place. All workers must run the same script."
            )

    def _wait(
        self, served: ServedTable, worker: WorkerRecord, clock: int, deadline: Deadline
    ) -> None:
        while not served.clocks.may_read(worker.rank, clock):
            self._membership.check(worker)
            if deadline.expired:
                slow = served.clocks.blocking(worker.rank, clock)
                names = " and ".join(str(self._membership.workers[r]) for r in slow)
                raise self._membership.fail(
                    errors.CollectiveTimeout(
                        f"{worker} has finished step {clock} and waited for {names} "
                        f"for {deadline.seconds:g} s (max_staleness="
                        f"{served.clocks.max_staleness}). The process is alive: is it "
                        "still busy with work of its own? Give it more time with "
                        "`timeout=`."
                    )
                )
            self._membership.changed.wait(deadline.remaining())
        self._membership.check(worker)
