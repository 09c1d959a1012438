"""A worker's client: all servers of its job as if they were one.

client = connect_servers(cluster, settings, timeouts=timeouts)
table = client.open_table(variables, values)      # the chief's values count
...
pulled = table.push_pull(deltas)                  # one message per server and step
sums = client.communicator.all_reduce(gradients)                # mode="sync"
client.close()
"""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.collectives.checked import CheckedCommunicator
from kerasdist.collectives.communicator import copy_to_raise
from kerasdist.collectives.fused_buffer import BufferPool, FusedBuffer
from kerasdist.collectives.row_exchange import Array, check_dtype, equal_part
from kerasdist.parameter_server.channel import Channel, Message, Traffic
from kerasdist.parameter_server.client.remote_table import RemoteTable
from kerasdist.parameter_server.client.server_job import Build, ServerJob
from kerasdist.parameter_server.layout import Layout, ServerSettings, Variable
from kerasdist.parameter_server.membership import (
    Event,
    Goodbye,
    ServerRoster,
    Successor,
)
from kerasdist.parameter_server.server.collectives import Entry
from kerasdist.parameter_server.server.handler import (
    REMEMBERED,
    Claim,
    Enter,
    Entered,
    Load,
    Meet,
    Met,
    Split,
    Stats,
    request_of,
)
from kerasdist.parameter_server.tables import First
from kerasdist.transport.base import Collective
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.framing import (
    Call,
    FrameType,
    read_record,
    to_json,
    unexpected,
)
from kerasdist.transport.liveness.announcements import Announcements
from kerasdist.transport.liveness.failure_protocol import decode, encode
from kerasdist.transport.liveness.heartbeat import Frame, Heartbeat
from kerasdist.transport.tracing import Recorder, SpanTimer

TRANSPORTS = ("auto", "tcp")


class ServerClient(ServerJob):
    """All servers of a job, as one worker sees them. Made by `connect_servers`.

    Calls of several threads are executed one after the other. After an exception of
    class `CollectiveError` it can only be closed.

    Attributes:
        cluster: The cluster with this worker's rank.
        settings: The job's settings.
        timeouts: The time limit of each phase.
        replicas: Each worker's number of replicas, by rank.
        joined: Whether the job had begun without this worker: its tables then hold
            the weights that the others have trained.
        joining: See `ServerJob`.
        seed: Random; the same on all workers, also on one that joins later.
        connections: The connections to the servers.
        communicator: Collectives between all live workers, through the servers.
        events: The events of other workers, in order, as server 0 reports them.
        tables: The tables that were opened.
        use: Number of the newest strategy that uses it, from 1.
        fits: How often `fit` was called.
        datasets: The number of datasets whose batches are claimed.
        has_servers: Whether parameter servers connect the workers.
    """

    has_servers = True

    def __init__(
        self,
        cluster: Cluster,
        settings: ServerSettings,
        timeouts: Timeouts,
        on_event: Callable[[Event], None] | None = None,
        on_failure: Callable[[errors.CollectiveError], None] | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__(cluster, settings, timeouts, on_failure, traffic)
        # Number of variables that steps have created.
        self._created = 0
        self.replicas: tuple[int, ...] = (1,)
        self.joined = False
        self.seed = 0
        self.events: list[Event] = []
        self.tables: list[RemoteTable] = []
        self.fits = self.datasets = 0
        self._on_event = on_event
        self._started = False
        self._heartbeat: Heartbeat | None = None
        self.communicator: ServerCommunicator
        self._announcements = Announcements(
            self.rank,
            self._send_notice,
            lambda: self._place,
            self._chief_is_gone,
            timeouts.collective,
        )

    # Made by `connect_servers`.

    def heartbeat(self) -> Heartbeat:
        """Begin to watch the control connections of this worker."""
        self._heartbeat = Heartbeat(
            f"kerasdist-watch rank {self.rank}",
            self.timeouts,
            self._on_frame,
            self.connections.ended,
        )
        return self._heartbeat

    def start(self, roster: ServerRoster) -> None:
        """Begin with the first server's roster, when all have admitted this worker."""
        self.replicas = roster.replicas
        self.joined = roster.joined
        self.joining = roster.joining
        self.seed = roster.seed
        self._met = roster.met
        self.connections.start()
        self.communicator = ServerCommunicator(self, roster.met)
        self._started = True

    @property
    def announcements(self) -> Announcements | None:
        """The chief's announcements, through server 0; None for one worker."""
        return self._announcements if len(self.peers) > 1 else None

    def open_table(
        self,
        variables: Sequence[Variable],
        values: Sequence[Array],
        *,
        together: bool = True,
    ) -> RemoteTable:
        """Begin to use a table; all workers open the same tables in the same order.

        Args:
            variables: The variables, the same on all workers.
            values: Their values, one array of the variable's shape each; none of them
                counts if the job continues from a snapshot.
            together: Whether all workers open it at the same point: the chief's values
                count, and the others wait for them. Otherwise those of the first worker
                that opens it count; the values are the same on all.

        Returns:
            The table, whose `initial` are the values that all begin with.

        Raises:
            ValueError: The values don't fit the variables; nothing was sent.
            CollectiveError: See `kerasdist.errors`.
        """
        layout = Layout(variables, self.servers)
        layout.check(values)
        table = RemoteTable(self, len(self.tables), layout)
        with self.calling(f"opening table {table.number}"):
            table.open(None if together and self.rank > 0 else values)
            self.tables.append(table)
        return table

    def enter(self, fit: int) -> Entry:
        """Wait until the others are between two epochs, and join their job.

        The protocol is in `kerasdist.parameter_server.server.collectives`.

        Args:
            fit: Number of the `fit` that this worker is in, from 1.

        Returns:
            The point at which it has joined: from now on the others wait for it.

        Raises:
            CollectiveTimeout: The others have sent no requests for as long as a
                collective may take.
            CollectiveError: It is too late; see `kerasdist.errors`.
        """
        seen = -1
        deadline = Deadline(self.timeouts.collective)
        while True:
            reply = self.request("joining the others", Enter(fit=fit))
            found = read_record(reply.meta, Entered, "A reply")
            if found.entry is not None:
                break
            # An epoch may take longer than any wait inside of it.
            if found.requests != seen:
                seen = found.requests
                deadline = Deadline(self.timeouts.collective)
            if deadline.expired:
                raise self.fail(
                    errors.CollectiveTimeout(
                        f"Rank {self.rank} waited for the end of the others' epoch, "
                        f"and none of them took a step in {deadline.seconds:g} s. Are "
                        "they busy with other work? Give them more time with "
                        "`timeout=`."
                    )
                )
        self.joining = False
        self._met = found.entry.met
        self.communicator.enter(found.entry.met, found.entry.ranks)
        return found.entry

    # Requests to server 0 besides gradients and weights: it assigns batches, and keeps
    # first values. Each server has statistics of its own.

    def claim(
        self, dataset: int, epoch: int, *, limit: int | None = None, last: int = -1
    ) -> int | None:
        """Get the next number of a queue: each is assigned to one worker only.

        Args:
            dataset: Number of the dataset, the same on all workers.
            epoch: Number of its epoch: it only increases, and has a queue of its own.
            limit: Length of the queue; None: it's endless.
            last: The last one that this worker got of this queue, or -1; `END` ends the
                queue for all.

        Returns:
            The number, from 0; None: there are none left.

        Raises:
            CollectiveError: See `kerasdist.errors`.
        """
        claim = Claim(
            dataset=dataset,
            epoch=epoch,
            limit=-1 if limit is None else limit,
            last=last,
        )
        with self.calling("claiming a batch"):
            number = int(self.request("claiming a batch", claim).meta["number"])
            if number < 0:
                return None
            present, before = self._claims.get(dataset, (epoch, ()))
            kept = before[1 - REMEMBERED :] if present == epoch else ()
            self._claims[dataset] = epoch, (*kept, number)
        return number

    def first_value(self, value: Array) -> Array:
        """Return the first value of a variable that a step creates: any worker's.

        Workers don't wait for each other. All create such variables in one order.

        Args:
            value: This worker's value, of a numeric dtype.

        Raises:
            CollectiveError: See `kerasdist.errors`.
        """
        first = First(number=self._created)
        with self.calling("creating a variable"):
            self._created += 1
            reply = self.request("creating a variable", first, (value,))
            return np.array(reply.arrays[0]) if reply.arrays else value

    def request(self, what: str, record: Any, arrays: Sequence[Array] = ()) -> Message:
        """Send server 0 a request; return the reply.

        Args:
            what: In words, for messages.
            record: The request.
            arrays: Its arrays.

        Raises:
            CollectiveError: See `kerasdist.errors`.
        """
        request = request_of(record, arrays)
        with self.calling(what):
            return self.connections.request_all([lambda _: request])[0]

    def stats(self) -> list[dict[str, Any]]:
        """Return each server's statistics of its tables and workers.

        Returns:
            A dictionary per server: "tables" (each with "bytes", "version", "clocks" by
            rank and "observed": by rank the number of its reads by staleness),
            "workers", "events", "requests", "updates", "snapshots". Keys are texts.
        """
        request = request_of(Stats())
        with self.calling("a request for statistics"):
            replies = self.connections.request_all([lambda _: request] * self.servers)
            return [dict(reply.meta) for reply in replies]

    # The end.

    def use_again(self) -> None:
        """Let another strategy of this process use it."""
        with self._changed:
            self.use += 1
            self._uses.add(self.use)

    def leave(self, use: int) -> None:
        """End the use by a strategy of this process that has been closed.

        After the last one, others that wait for this worker, in the same strategy of
        theirs, don't wait any longer. Doesn't wait itself.

        Args:
            use: The strategy's number.
        """
        with self._changed:
            self._uses.discard(use)
            if self.closed or self._failing is not None or self._uses:
                return
        left = Goodbye(reason="it closed its strategy", use=self.use)
        self.connections.send_goodbye(left)

    def close(
        self,
        error: BaseException | None = None,
        cause: errors.CollectiveError | None = None,
        successor: Successor | None = None,
    ) -> None:
        """Leave the job; release sockets, threads and memory. Can be called twice.

        Args:
            error: The error that ended this worker's script, if there was one: in
                "sync" the others then fail at once, in "async" they continue.
            cause: The cause of that error, if it's known.
            successor: What the script continues with, at the same servers.
        """
        with self._changed:
            if self.closed:
                return
            self.closed = True
            self._changed.notify_all()
        reason = "it has finished"
        if error is not None:
            shown = f"its script ended with {type(error).__name__}: {error}"
            reason = shown[:1000].rstrip(". \n")
        if self._failing is None:
            why = None if cause is None else encode(cause).decode()
            self.connections.send_goodbye(
                Goodbye(
                    reason=reason,
                    failed=error is not None,
                    cause=why,
                    successor=successor,
                )
            )
        self.connections.abort()
        if self._heartbeat is not None:
            self._heartbeat.close()
        self.connections.close()

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self.close(error)

    # Announcements.

    def _send_notice(self, value: dict[str, Any], rank: int | None) -> None:
        if self._heartbeat is not None:
            payload = json.dumps({"to": rank, "value": value}).encode()
            self._heartbeat.post(0, FrameType.NOTICE, payload)

    @property
    def _place(self) -> int:
        # Requests of others may arrive before this worker has started.
        return self.communicator.sequence if self._started else 0

    def _chief_is_gone(self) -> str | None:
        if self._failure is not None:
            raise copy_to_raise(self._failure)
        if self.closed:
            return "this worker has left the job"
        if self.joining:
            return "this worker hasn't joined the others yet"
        for event in reversed(self.events):
            if event.rank == 0 and (event.kind != "left" or event.use >= self.use):
                gone = event.kind in ("lost", "finished", "left")
                return event.reason if gone else None
        return None

    # Frames on control connections.

    def _on_frame(self, key: Hashable, frame: Frame) -> None:
        kind, _, payload = frame
        if kind is FrameType.FAILURE:
            self.fail(decode(payload)[0])
        elif kind is FrameType.EVENT:
            event = read_record(to_json(payload), Event, "An event")
            # All servers report; the first one's event is enough.
            if key == 0:
                self.events.append(event)
                if self._on_event is not None:
                    self._on_event(event)
        elif kind is FrameType.NOTICE:
            notice = to_json(payload)
            sender, value = notice.get("from"), notice.get("value")
            if not isinstance(sender, int) or not isinstance(value, dict):
                raise errors.ProtocolError(f"A notice is damaged: {notice!r:.500}.")
            self._announcements.receive(sender, value)
        else:
            raise unexpected(kind)


# Collectives between the workers of a job, through its servers.
#
# It has the same uses as the communicators of `kerasdist.collectives`: the mean of
# gradients with mode="sync", metrics at the end of an epoch, predictions. With "sync" a
# large buffer is spread over all servers, and each sums its chunk in rank order, piece
# by piece. With "async", where workers may be lost at any moment, one server sums all,
# so that all workers get the result of the same ranks; the other servers only get a
# request that marks the worker as waiting.
#
# With "async" a lost worker is left out: `ranks` are those that took part.


# Smaller buffers are summed by one server.
_LEAST_SPREAD_BYTES = 64 << 10
# Larger chunks are sent in several rounds. A worker and a server don't send at once, so
# a round should stay in the processor's caches and in the sockets' buffers.
_PIECE_BYTES = 2 << 20


class ServerCommunicator(CheckedCommunicator):
    """See `Communicator`. Made by `connect_servers`.

    Args:
        client: This worker's connection to the servers.
        met: Number of the last collective before this worker joined.

    Attributes:
        ranks: The ranks that took part in the last collective.
    """

    def __init__(self, client: ServerClient, met: int) -> None:
        super().__init__(client.rank, client.peers, client, client.timeouts.collective)
        self.ranks: tuple[int, ...] = tuple(range(self.size))
        self._client = client
        self.sequence = met
        self._facts: dict[str, Any] | None = None
        self._joined: tuple[int, ...] = ()
        self._buffers = BufferPool()
        # The chief reports to the servers once the share that each of them gets in a
        # step: bytes and pieces, by server.
        self._first_step = 0
        self._loads: list[list[int]] | None = None
        if self.rank == 0 and client.cluster.servers and client.settings.mode == "sync":
            self._loads = [[0, 0] for _ in range(client.servers)]

    def join_barrier(self, facts: dict[str, Any]) -> tuple[int, ...]:
        """Wait in a barrier at which others may join; return the ranks that joined.

        Args:
            facts: The values that are sent to those; the same on all ranks.

        Raises:
            CollectiveError: See `kerasdist.errors`.
        """
        self._facts = facts
        try:
            self.barrier()
        finally:
            self._facts = None
        return self._joined

    def enter(self, met: int, ranks: tuple[int, ...]) -> None:
        """Note that this worker has joined: the next collective is number `met` + 1."""
        self.sequence = met
        self.ranks = ranks

    def all_gather(self, array: npt.ArrayLike) -> list[Array]:
        """See `Communicator.all_gather`; of a rank that is lost there are no rows."""
        mine = np.asarray(array)
        name = check_dtype(mine.dtype)
        shape = mine.shape or (1,)
        mine = np.ascontiguousarray(mine).reshape(shape)
        with (
            self._user_call([(name, shape[1:])]) as detail,
            self._calling("all_gather", "none", name, 0, detail) as collective,
        ):
            self._count([mine.nbytes])
            arrays = self._join_round(collective.call, [mine])
            results = [np.empty((0, *shape[1:]), mine.dtype)] * self.size
            for rank, found in zip(self.ranks, arrays, strict=True):
                results[rank] = found.copy()
        return results

    def _reduce(self, source: FusedBuffer, lend: bool, collective: Collective) -> Array:
        elements, dtype, call = source.elements, source.dtype, collective.call
        client = self._client
        spread = (
            client.settings.mode == "sync"
            and elements * dtype.itemsize >= _LEAST_SPREAD_BYTES
        )
        count = client.servers if spread else 1
        chunks = [equal_part(elements, count, i) for i in range(count)]
        self._count([(c.stop - c.start) * dtype.itemsize for c in chunks])
        meet = self._meet()

        def build(part: slice, channel: Channel) -> Message:
            room = channel.place([(str(dtype.name), (part.stop - part.start,))])
            source.copy_to(room[0], part.start, part.stop)
            return request_of(meet, room, call)

        longest = max(part.stop - part.start for part in chunks)
        rounds = -(-longest * dtype.itemsize // _PIECE_BYTES) if spread else 1
        flat = self._buffers.empty(elements, dtype)
        with client.calling(str(call)):
            for number in range(rounds):
                pieces = [
                    equal_part(c.stop - c.start, rounds, number, c.start)
                    for c in chunks
                ]
                builds: list[Build] = [functools.partial(build, p) for p in pieces]
                answers = client.connections.request_all(
                    [*builds, *self._rest(len(builds), call)]
                )
                timer = SpanTimer(self._recorder)
                self._note(call, answers)
                for piece, answer in zip(pieces, answers, strict=False):
                    if piece.stop > piece.start:
                        flat[piece] = answer.arrays[0]
                size = sum(p.stop - p.start for p in pieces) * dtype.itemsize
                timer.end("receive", size)
        return flat

    def _gather(self, views: list[memoryview], collective: Collective) -> None:
        mine = np.frombuffer(views[self.rank], np.uint8)
        for rank, found in zip(
            self.ranks, self._join_round(collective.call, [mine]), strict=True
        ):
            if rank != self.rank:
                views[rank][:] = found.data

    def _broadcast(self, view: memoryview, root: int, collective: Collective) -> None:
        mine = np.frombuffer(view, np.uint8)
        arrays = self._join_round(collective.call, [mine] if self.rank == root else [])
        if not arrays:
            peer = self.peers[root]
            raise errors.WorkerLost(
                peer.rank,
                peer.address,
                self.step,
                "it left before it sent its values to all others",
            )
        if self.rank != root:
            view[:] = arrays[0].data

    def _barrier(self, collective: Collective) -> None:
        self._join_round(collective.call)

    def _join_round(self, call: Call, arrays: Sequence[Array] = ()) -> list[Array]:
        """Join a collective with arrays for server 0; return its result."""
        meet = dataclasses.replace(self._meet(), join_barrier=self._facts)
        request = request_of(meet, arrays, call)
        with self._client.calling(str(call)):
            answers = self._client.connections.request_all(
                [lambda _: request, *self._rest(1, call)]
            )
            self._note(call, answers)
            return list(answers[0].arrays)

    def _rest(self, first: int, call: Call) -> list[Build]:
        """Return requests for servers from `first` on; their results don't count."""
        if self._client.settings.mode == "sync":
            return []
        # A call without buffers: these servers only have to know the waiting workers.
        short = Call(call.sequence, "barrier", detail=zlib.crc32(str(call).encode()))
        request = request_of(self._meet(), (), short)
        return [lambda _: request] * (self._client.servers - first)

    def _count(self, sizes: list[int]) -> None:
        """Count the bytes for each server; report those of the first step."""
        if self._loads is None or self.step < 1:
            return
        self._first_step = self._first_step or self.step
        if self.step == self._first_step:
            for load, size in zip(self._loads, sizes, strict=False):
                load[0] += size
                load[1] += size > 0
            return
        loads = tuple(Load(size, pieces) for size, pieces in self._loads)
        request, self._loads = request_of(Split(loads=loads)), None
        with self._client.calling("reporting the servers' shares"):
            self._client.connections.request_all(
                [lambda _: request] * self._client.servers
            )

    def _meet(self) -> Meet:
        return Meet(step=self.step, use=self._client.use)

    def _note(self, call: Call, answers: list[Message]) -> None:
        met = [read_record(answer.meta, Met, "A reply") for answer in answers]
        self.ranks, self._joined = met[0].ranks, met[0].joined
        self._client.note_met(call, met)

    def _record(self, recorder: Recorder | None) -> None:
        super()._record(recorder)
        self._client.recorder = recorder

    def _abort(self) -> None:
        if self._failure is not None:
            self._client.fail(self._failure)
        elif self._closed:
            self._client.close()

    def _close(self) -> None:
        self._buffers.clear()
