"""The request handler of one server, over any kind of connection.

A thread per worker reads its requests (`serve`), one after the other; each is replied
to before the next one is read. A request's JSON object has under "do" its type:

    Meet    a collective of all workers                (server.collectives)
    Open    begin to use a table                       (parameter_server.tables)
    First   get the first value of a new variable      (the same)
    Push    add a step's changes, and read             (the same)
    Pull    read                                       (the same)
    Claim   get the next number of a queue             (here)
    Enter   join the others                            (server.collectives)
    Split   report each server's share of a step       (here)
    Stats   statistics of tables and workers

The reply is a REPLY, or a FAILURE whose "failure" the worker raises.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kerasdist import errors
from kerasdist.collectives.row_exchange import Array
from kerasdist.errors import ProtocolError
from kerasdist.parameter_server.channel import (
    Channel,
    ChannelEnded,
    ChannelSilent,
    Message,
)
from kerasdist.parameter_server.layout import Layout, ServerSettings
from kerasdist.parameter_server.membership import (
    Event,
    Goodbye,
    Membership,
    WorkerRecord,
)
from kerasdist.parameter_server.server.collectives import Entry, ServerCollectives
from kerasdist.parameter_server.snapshots import Snapshotter
from kerasdist.parameter_server.tables import (
    Asked,
    First,
    Open,
    Pull,
    Push,
    Reply,
    ServedTables,
)
from kerasdist.transport import log
from kerasdist.transport.base import Aborted
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.framing import (
    Call,
    Count,
    FrameType,
    read_record,
    to_object,
    unexpected,
)
from kerasdist.transport.liveness.failure_protocol import decode, encode

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

    size: Count
    pieces: Count


def loads_of(layout: Layout) -> list[Load]:
    """Return each server's part of a table."""
    pieces = collections.Counter(piece.server for piece in layout.pieces)
    sizes = layout.server_bytes()
    return [Load(size, pieces[server]) for server, size in enumerate(sizes)]


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

# No queue is this long.
END = 1 << 60
# Number of last claims that a worker reports to a restarted server: in that range no
# claim of another worker can be unknown.
REMEMBERED = 32

# A job has one or two datasets at once; older ones aren't claimed from any more.
_MOST_QUEUES = 256


@dataclasses.dataclass
class _EpochQueue:
    """The queue of a dataset's present epoch.

    Attributes:
        epoch: Number of the epoch.
        number: The next one to be assigned.
        known: After a restart: the claims that workers report, and those below `top`
            since then.
        top: The largest claim before the restart; -1 without one.
    """

    epoch: int
    number: int = 0
    known: set[int] = dataclasses.field(default_factory=set)
    top: int = -1


class BatchQueue:
    """The queues of one job. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By dataset.
        self._queues: dict[int, _EpochQueue] = {}

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
            queue = self._present(dataset, epoch)
            if queue is None:
                return -1
            # First those that no worker has, because the reply was lost.
            for number in range(max(last, queue.top - REMEMBERED) + 1, queue.top):
                if number not in queue.known:
                    queue.known.add(number)
                    return number
            number = queue.number = max(queue.number, last + 1)
            if 0 <= limit <= number or number >= END:
                return -1
            queue.number += 1
            return number

    def resume(self, dataset: int, epoch: int, numbers: Sequence[int]) -> None:
        """Add the claims of a worker that reconnects after a restart of the server.

        All of them reconnect before the next claim, or are late: then no number between
        their claims is assigned, since another worker may have got it meanwhile.

        Args:
            dataset: Number of the dataset.
            epoch: Number of its epoch of the worker's last claims.
            numbers: The last claims in that, up to `REMEMBERED` numbers.
        """
        with self._lock:
            queue = self._present(dataset, epoch) if numbers else None
            if queue is None:
                return
            queue.known.update(numbers)
            if queue.number == queue.top + 1:
                queue.top = max(queue.top, *numbers)
            queue.number = max(queue.number, max(numbers) + 1)

    def _present(self, dataset: int, epoch: int) -> _EpochQueue | None:
        """Return the queue of an epoch; None if that is over."""
        queue = self._queues.get(dataset)
        if queue is None or epoch > queue.epoch:
            queue = self._queues[dataset] = _EpochQueue(epoch)
            while len(self._queues) > _MOST_QUEUES:
                del self._queues[next(iter(self._queues))]
        return queue if epoch == queue.epoch else None


# No message has more numbers than this: 256 GB, or what the machine has.
MOST_BYTES = min(1 << 38, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
# Requests may be arbitrarily far apart; liveness is checked on the control connection.
_FOREVER = 1e9


# Requests and replies.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meet:
    """A request to take part in a collective.

    Attributes:
        step: The worker's step.
        use: Number of the strategy that calls it.
        join_barrier: The values for workers that join here, if they may.
    """

    step: int
    use: int
    join_barrier: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Met:
    """The reply to `Meet`, with the result.

    Attributes:
        ranks: The ranks that took part.
        clocks: The worker's clock in each table that it uses.
        joined: The ranks that have joined here.
    """

    ranks: tuple[int, ...] = ()
    clocks: Mapping[int, int] = dataclasses.field(default_factory=dict)
    joined: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A request for the next number of a queue; see `BatchQueue.claim`."""

    dataset: int
    epoch: int
    limit: int
    last: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Enter:
    """A request to join the others in the `fit` of this number."""

    fit: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entered:
    """The reply to `Enter`.

    Attributes:
        entry: The point at which the worker has joined; None: it waits longer.
        requests: Number of the others' requests so far.
    """

    entry: Entry | None
    requests: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """A report of each server's share of a step."""

    loads: tuple[Load, ...]


@dataclasses.dataclass(frozen=True)
class Stats:
    """A request for the statistics of tables and workers."""


def request_of(
    record: Any, arrays: Sequence[Array] = (), call: Call | None = None
) -> Message:
    """Return a request as a message."""
    meta = {"do": type(record).__name__, **to_object(record)}
    return Message(FrameType.REQUEST, call or Call(0), meta, arrays)


class RequestHandler:
    """One server without its connections. Safe for threads.

    Args:
        server: Its index.
        servers: Number of servers.
        size: Number of workers.
        settings: The job's settings.
        timeouts: `collective` bounds every wait for other workers.

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
        self.tables = ServedTables(server, settings, self.membership)
        self._operations: dict[type[Any], Callable[[Any, Asked], Reply]] = {
            **{Meet: self._meet, Open: self._open, First: self.tables.first_value},
            **{Push: self.tables.push, Pull: self.tables.pull, Claim: self._claim},
            **{Enter: self._enter, Split: self._split},
            Stats: lambda request, asked: (self.stats(), []),
        }
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
        # A strategy's goodbye has another connection than requests: it may arrive after
        # the first ones of the worker's next strategy.
        use = self.membership.workers[event.rank].use
        late = event.kind == "left" and use > event.use
        if event.kind in ("lost", "finished", "left") and not late:
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
        cause = None if goodbye.cause is None else decode(goodbye.cause)[0]
        if cause is not None and self.settings.mode == "sync":
            self.membership.fail(cause)
        if isinstance(cause, errors.ServerLost):
            self.server_lost = self.server_lost or cause
        if goodbye.failed:
            self.membership.lose(worker, goodbye.reason)
        else:
            self.membership.finish(worker, goodbye.reason, goodbye.successor)

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
                self._answer_failure(channel, Call(0), errors.CollectiveError(seen))
                return seen
            except MemoryError as error:
                seen = f"server {self.server} has no memory for its message ({error})"
                log.log_in_background(logging.ERROR, "kerasdist: %s: %s.", worker, seen)
                self._answer_failure(channel, Call(0), errors.CollectiveError(seen))
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
        if message.frame is not FrameType.REQUEST:
            raise unexpected(message.frame)
        do = message.meta.get("do")
        kind = next((each for each in self._operations if each.__name__ == do), None)
        if kind is None:
            raise ProtocolError(f"Unknown request. Received: do={do!r:.100}.")
        request = read_record(message.meta, kind, "A request")
        # The requests of a joiner that waits for the others don't count as progress.
        self._requests += kind is not Enter
        asked = Asked(worker, message, channel, Deadline(self._timeouts.collective))
        meta, arrays = self._operations[kind](request, asked)
        if self.snapshotter is not None and kind in (Open, Push):
            # A table's first values at once: from then on it can be restarted.
            self.snapshotter.request(at_once=kind is Open)
        return Message(FrameType.REPLY, message.call, meta, arrays)

    def _meet(self, request: Meet, asked: Asked) -> Reply:
        worker, call = asked.worker, asked.message.call
        self.membership.note_use(worker, request.use)
        if self.settings.mode == "sync":
            # There are no tables whose clocks have it.
            worker.clock = max(worker.clock, request.step)
        shared = asked.channel.kind == "shared_memory"
        result, ranks = self.collectives.join_round(
            *(worker, call, asked.message.arrays),
            asked.channel.place if shared else None,
            asked.deadline,
            request.join_barrier,
            request.use,
        )
        with self.membership.changed:
            clocks = self.tables.clocks_of(worker.rank)
            joined = self.collectives.join_barrier.joined_at(call.sequence)
        met = Met(ranks=tuple(ranks), clocks=clocks, joined=tuple(joined))
        return to_object(met), result

    def _open(self, request: Open, asked: Asked) -> Reply:
        self.membership.note_use(asked.worker, request.use)
        layout = Layout(request.variables, self.servers)
        return self.tables.open(request, asked, layout)

    def _claim(self, request: Claim, asked: Asked) -> Reply:
        self._await_claims(asked.deadline)
        number = self.batch_queue.claim(
            request.dataset, request.epoch, request.limit, request.last
        )
        return {"number": number}, []

    def _enter(self, request: Enter, asked: Asked) -> Reply:
        barrier = self.collectives.join_barrier
        entry = barrier.enter(asked.worker, request.fit, asked.deadline)
        return to_object(Entered(entry=entry, requests=self._requests)), []

    def _split(self, request: Split, asked: Asked) -> Reply:
        if len(request.loads) != self.servers:
            raise ProtocolError(
                f"A request is damaged. Received: {len(request.loads)} loads."
            )
        if self.on_split is not None:
            self.on_split(list(request.loads))
        return {}, []

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
            names = ("rank", "address", "state", "clock")
            workers = [
                {name: getattr(worker, name) for name in names}
                for worker in self.membership.workers
            ]
            events = [to_object(event) for event in self.events]
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
