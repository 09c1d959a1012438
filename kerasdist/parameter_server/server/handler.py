"""The request handler of one server, over any kind of connection.

A thread per worker reads its requests (`serve`), one after the other; each is replied
to before the next one is read. A request's JSON object has under "do" the operation:

    meet    a collective of all workers                (server.collectives)
    open    begin to use a table                       (parameter_server.tables)
    first   get the first value of a new variable      (the same)
    push    add a step's changes, and read             (the same)
    pull    read                                       (the same)
    claim   get the next number of a queue             (here)
    enter   join the others                            (server.collectives)
    split   report each server's share of a step       (here)
    stats   statistics of tables and workers

The reply is a REPLY, or a FAILURE whose "failure" the worker raises.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kerasdist import errors
from kerasdist.errors import ProtocolError
from kerasdist.parameter_server.channel import (
    Channel,
    ChannelEnded,
    ChannelSilent,
    Message,
)
from kerasdist.parameter_server.layout import Layout, ServerSettings
from kerasdist.parameter_server.membership import Event, Membership, WorkerRecord
from kerasdist.parameter_server.server.collectives import ServerCollectives
from kerasdist.parameter_server.snapshots import Snapshotter
from kerasdist.parameter_server.tables import ServedTables
from kerasdist.transport import log
from kerasdist.transport.base import Aborted
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.framing import Call, FrameType, to_json, unexpected
from kerasdist.transport.liveness.failure_protocol import decode, encode

# Queues of batches: each number is assigned to the first worker that claims it.
#
# With mode="async" the batches of an epoch are a queue. A worker that is free claims
# the next number of it, and a slow one claims fewer:
#
#     queue (0, 3)    0 1 2 3 4 5 6 7      of dataset 0, its third epoch, 8 batches
#     worker 0        0   2 3   5 6
#     worker 1          1     4     7 .    . the next claim gets none: the epoch is over
#
# A restarted server doesn't know how far its queues were. Each worker that reconnects
# reports its last claims: numbers that no worker has, because the reply was lost, are
# assigned first; then the queue continues after the last one.

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


# No message has more numbers than this: 256 GB, or what the machine has.
MOST_BYTES = min(1 << 38, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
# No number in a request is larger.
_MOST = 1 << 62
# Requests may be arbitrarily far apart; liveness is checked on the control connection.
_FOREVER = 1e9
_NO_CALL = Call(0)


class Goodbye:
    """The content of a worker's GOODBYE frame, with which it leaves.

    Args:
        reason: In words, without a full stop.
        failed: Whether its script ended with an error.
        cause: The job's failure, if the worker leaves because of it.
        use: The number of the strategy that it leaves, if it stays itself; else 0.
    """

    def __init__(
        self,
        reason: str,
        failed: bool,
        cause: errors.CollectiveError | None = None,
        use: int = 0,
    ) -> None:
        self.reason = reason
        self.failed = failed
        self.cause = cause
        self.use = use

    def to_json(self) -> dict[str, Any]:
        """Return the goodbye as a JSON object."""
        cause = None if self.cause is None else encode(self.cause).decode()
        return {
            "reason": self.reason[:1000],
            "failed": self.failed,
            "cause": cause,
            "use": self.use,
        }

    @classmethod
    def from_payload(cls, payload: bytes) -> Goodbye:
        """Return the goodbye that `to_json` wrote.

        Raises:
            ProtocolError: It isn't a JSON object.
        """
        value = to_json(payload)
        cause = value.get("cause")
        return cls(
            str(value.get("reason")),
            value.get("failed") is True,
            decode(cause)[0] if isinstance(cause, str) else None,
            _whole({"use": value.get("use", 0)}, "use"),
        )


class RequestHandler:
    """One server without its connections. Safe for threads.

    Args:
        server: Its index.
        servers: Number of servers.
        size: Number of workers.
        settings: The job's settings.
        timeouts: `collective` bounds every wait for other workers.
        on_table: Called with the layout of each new table.

    Attributes:
        server: As given.
        servers: As given.
        settings: As given.
        membership: The workers.
        batch_queue: The queues of batches.
        tables: The tables.
        collectives: The collectives.
        snapshotter: Keeps snapshots; None without.
        resumed: Whether it continues from a snapshot.
        events: The events of workers, in order.
        on_split: Called with each server's share of a step of a "sync" job, when its
            first step is finished.
        server_lost: Another server without which a worker couldn't go on, or None.
        logs: Whether it logs the losses of workers.

    Raises:
        SnapshotError: There is a snapshot that can't be used.
    """

    def __init__(
        self,
        server: int,
        servers: int,
        size: int,
        settings: ServerSettings,
        timeouts: Timeouts,
        on_table: Callable[[Layout], None] | None = None,
    ) -> None:
        self.server = server
        self.servers = servers
        self.settings = settings
        self.events: list[Event] = []
        self.server_lost: errors.ServerLost | None = None
        self.logs = True
        self._timeouts = timeouts
        self.on_split: Callable[[list[Load]], None] | None = None
        self._requests = 0
        self.batch_queue = BatchQueue()
        self.membership = Membership(size, settings.mode)
        self.tables = ServedTables(server, servers, settings, self.membership, on_table)
        first = server == 0 or settings.mode == "sync"
        self.collectives = ServerCollectives(
            self.membership, self.tables, coordinates=first
        )
        self.membership.on_event.append(self._note)
        self.snapshotter: Snapshotter | None = None
        self.resumed = False
        if settings.snapshot_dir is not None:
            self.snapshotter = Snapshotter(
                server, servers, settings, self.membership, self.tables
            )
            self.resumed = self.snapshotter.resume()

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if event.kind == "joined" and self.snapshotter is not None:
            # A restarted server refuses workers that aren't in its snapshot.
            self.snapshotter.request(at_once=True)
        if event.kind in ("lost", "finished", "left"):
            self.tables.drop(event.rank)
            self.collectives.forget(event.rank)
        if event.kind == "lost" and self.logs:
            log.log_in_background(
                logging.WARNING,
                "kerasdist: rank %d (%s) was lost at step %d: %s.",
                event.rank,
                event.address,
                event.clock,
                event.reason,
            )

    def on_goodbye(self, worker: WorkerRecord, goodbye: Goodbye) -> None:
        """Handle a worker's goodbye."""
        if goodbye.use:
            self.membership.leave(worker, goodbye.use, goodbye.reason)
            return
        if goodbye.cause is not None and self.settings.mode == "sync":
            self.membership.fail(goodbye.cause)
        if isinstance(goodbye.cause, errors.ServerLost):
            self.server_lost = self.server_lost or goodbye.cause
        if goodbye.failed:
            self.membership.lose(worker, goodbye.reason)
        else:
            self.membership.finish(worker, goodbye.reason)

    def serve(self, worker: WorkerRecord, channel: Channel) -> str:
        """Serve a worker's requests until its connection ends; return the reason."""
        while True:
            try:
                message = channel.receive(Deadline(_FOREVER), MOST_BYTES)
            except (ChannelEnded, ChannelSilent) as error:
                return f"its data connection ended ({error})"
            except Aborted:
                return "the server dropped it"
            except errors.ProtocolError as error:
                seen = f"it violated the protocol ({str(error).rstrip('.')})"
                self._answer_failure(channel, _NO_CALL, errors.CollectiveError(seen))
                return seen
            except MemoryError as error:
                seen = f"server {self.server} has no memory for its message ({error})"
                log.log_in_background(logging.ERROR, "kerasdist: %s: %s.", worker, seen)
                self._answer_failure(channel, _NO_CALL, errors.CollectiveError(seen))
                return seen
            try:
                reply = self._answer(worker, message, channel)
                channel.send(reply, Deadline(self._timeouts.collective))
                del reply, message
            except errors.CollectiveError as error:
                self._answer_failure(channel, message.call, error)
            except errors.ProtocolError as error:
                failure = errors.CollectiveError(
                    f"Server {self.server} can't handle a request of {worker}: {error}"
                )
                if self.settings.mode == "sync":
                    self.membership.fail(failure)
                self._answer_failure(channel, message.call, failure)
                if self.settings.mode == "async":
                    # The sender of an invalid request is lost; the others continue.
                    return f"it sent an invalid request ({str(error).rstrip('.')})"
            except (ChannelEnded, ChannelSilent) as error:
                return f"its data connection ended ({error})"
            except Aborted:
                return "the server dropped it"
            except Exception as error:
                # A bug or a full memory: no worker may wait for a reply in vain.
                failure = errors.CollectiveError(
                    f"Server {self.server} failed during a request of {worker}: "
                    f"{type(error).__name__}: {error}. Its output has the traceback."
                )
                self.membership.fail(failure)
                self._answer_failure(channel, message.call, failure)
                log.log_in_background(
                    *(logging.ERROR, "kerasdist: server %d failed", self.server),
                    exc_info=True,
                )

    def _answer_failure(
        self, channel: Channel, call: Call, error: errors.CollectiveError
    ) -> None:
        meta = {"failure": encode(error).decode()}
        try:
            channel.send(
                Message(FrameType.FAILURE, call, meta, ()), Deadline(_LAST_SECONDS)
            )
        except (ChannelEnded, ChannelSilent, Aborted):
            return  # the connection ended: `receive` raises that

    def _answer(
        self, worker: WorkerRecord, message: Message, channel: Channel
    ) -> Message:
        deadline = Deadline(self._timeouts.collective)
        meta, call, arrays = message.meta, message.call, message.arrays
        do = meta.get("do")
        # The requests of a joiner that waits for the others don't count as progress.
        self._requests += do != "enter"
        if message.frame is not FrameType.REQUEST:
            raise unexpected(message.frame)
        if do == "meet":
            if self.settings.mode == "sync":
                # There are no tables whose clocks have it.
                worker.clock = max(worker.clock, _whole(meta, "step"))
            place = channel.place if channel.kind == "shared_memory" else None
            facts = (
                meta.get("join_barrier")
                if isinstance(meta.get("join_barrier"), dict)
                else None
            )
            use = _whole(meta, "use")
            result, ranks = self.collectives.join_round(
                worker, call, arrays, place, deadline, facts, use
            )
            with self.membership.changed:
                clocks = self.tables.clocks_of(worker.rank)
                joined = self.collectives.join_barrier.joined_at(call.sequence)
            answer = {"ranks": ranks, "clocks": clocks, "joined": joined}
            return Message(FrameType.REPLY, call, answer, result)
        if do == "stats":
            return Message(FrameType.REPLY, call, self.stats(), ())
        if do == "claim":
            names = ("dataset", "epoch", "limit", "last")
            self._await_claims(deadline)
            claimed = self.batch_queue.claim(*[_whole(meta, name) for name in names])
            return Message(FrameType.REPLY, call, {"number": claimed}, ())
        if do == "enter":
            fit = _whole(meta, "fit")
            entered = self.collectives.join_barrier.enter(worker, fit, deadline)
            told = {"entered": entered, "requests": self._requests}
            return Message(FrameType.REPLY, call, told, ())
        if do == "split":
            loads = loads_from_json(meta.get("loads"), self.servers)
            if self.on_split is not None:
                self.on_split(loads)
            return Message(FrameType.REPLY, call, {}, ())
        if do == "first":
            if len(arrays) != 1:
                raise errors.ProtocolError(
                    f"A request is damaged. Received: {len(arrays)} first values."
                )
            number = _whole(meta, "number")
            first = self.tables.first_value(worker, number, arrays[0])
            return Message(FrameType.REPLY, call, {}, first)
        number = _whole(meta, "table")
        if do == "open":
            answer, parts = self.tables.open(
                *(worker, number, meta.get("variables"), arrays, deadline),
                has_values=meta.get("has_values") is True,
            )
            if self.snapshotter is not None:
                self.snapshotter.request(at_once=True)
        elif do == "push":
            answer, parts = self.tables.push(
                worker,
                number,
                _whole(meta, "clock"),
                _whole(meta, "since"),
                arrays,
                channel.place,
                deadline,
            )
            if self.snapshotter is not None:
                self.snapshotter.request()
        elif do == "pull":
            since = _whole(meta, "since")
            answer, parts = self.tables.pull(worker, number, since, channel.place)
        else:
            raise errors.ProtocolError(f"Unknown request. Received: do={do!r}.")
        return Message(FrameType.REPLY, call, answer, parts)

    def _await_claims(self, deadline: Deadline) -> None:
        """Wait after a restart until all workers have reported their claims.

        A worker that isn't back in time may be training on a batch that another one is
        assigned, too.
        """
        if not self.resumed:
            return
        members = self.membership
        with members.changed:
            members.changed.wait_for(
                lambda: (
                    members.failure is not None
                    or all(worker.state != "away" for worker in members.workers)
                ),
                min(deadline.remaining(), _RETURN_SECONDS),
            )

    def stats(self) -> dict[str, Any]:
        """Return this server's statistics, as a JSON object."""
        with self.membership.changed:
            workers = [
                {
                    "rank": worker.rank,
                    "address": worker.address,
                    "state": worker.state,
                    "clock": worker.clock,
                }
                for worker in self.membership.workers
            ]
            events = [event.to_json() for event in self.events]
        return {
            "server": self.server,
            "tables": self.tables.stats(),
            "workers": workers,
            "events": events,
            "requests": self._requests,
            "updates": self.tables.updates,
            "snapshots": 0 if self.snapshotter is None else self.snapshotter.written,
            "resumed": self.resumed,
        }

    def close(self) -> None:
        """End the snapshotter's thread."""
        if self.snapshotter is not None:
            self.snapshotter.close(finished=self._finished_well())

    def _finished_well(self) -> bool:
        members = self.membership
        with members.changed:
            states = {worker.state for worker in members.workers}
            return members.failure is None and members.over and "finished" in states


# Seconds that claims wait for workers to reconnect after a restart.
_RETURN_SECONDS = 10.0
# Seconds for sending a failure to a worker.
_LAST_SECONDS = 5.0


def _whole(meta: Any, name: str) -> int:
    value = meta.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MOST:
        raise errors.ProtocolError(f"A request is damaged. Received: {name}={value!r}.")
    return value
