"""Collectives between the workers of a job, through its servers.

It has the same uses as the communicators of `kerasdist.collectives`: the mean of
gradients with mode="sync", metrics at the end of an epoch, predictions. With "sync" a
large buffer is spread over all servers, and each sums its chunk in rank order, piece by
piece. With "async", where workers may be lost at any moment, one server sums all, so
that all workers get the result of the same ranks; the other servers only get a request
that marks the worker as waiting.

With "async" a lost worker is left out: `ranks` are those that took part.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kerasdist import errors
from kerasdist.collectives.checked import CheckedCommunicator
from kerasdist.collectives.fused_buffer import BufferPool, FusedBuffer
from kerasdist.collectives.row_exchange import Array, check_dtype, equal_part
from kerasdist.parameter_server.channel import Channel, Message
from kerasdist.parameter_server.client.server_job import Build, ServerJob
from kerasdist.parameter_server.server.handler import (
    Load,
    Meet,
    Met,
    Split,
    request_of,
)
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import Call, read_record
from kerasdist.transport.tracing import Recorder, SpanTimer

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

    def __init__(self, client: ServerJob, met: int) -> None:
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
            self._calling("all_gather", "none", name, 0, detail) as (call, _),
        ):
            self._count([mine.nbytes])
            arrays = self._join_round(call, [mine])
            results = [np.empty((0, *shape[1:]), mine.dtype)] * self.size
            for rank, found in zip(self.ranks, arrays, strict=True):
                results[rank] = found.copy()
        return results

    def _reduce(
        self, source: FusedBuffer, lend: bool, call: Call, deadline: Deadline
    ) -> Array:
        elements, dtype = source.elements, source.dtype
        client = self._client
        count = client.servers
        spread = (
            client.settings.mode == "sync"
            and elements * dtype.itemsize >= _LEAST_SPREAD_BYTES
        )
        chunks = [equal_part(elements, count if spread else 1, i) for i in range(count)]
        if not spread:
            chunks[1:] = []

        self._count([(c.stop - c.start) * dtype.itemsize for c in chunks])
        meet = self._meet()

        def build(part: slice, channel: Channel) -> Message:
            room = channel.place([(str(dtype.name), (part.stop - part.start,))])
            source.copy_to(room[0], part.start, part.stop)
            return request_of(meet, room, call)

        rounds = 1
        if spread:
            longest = max(part.stop - part.start for part in chunks)
            rounds = -(-longest * dtype.itemsize // _PIECE_BYTES)
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
                timer = None if self._recorder is None else SpanTimer(self._recorder)
                self._note(call, answers)
                for piece, answer in zip(pieces, answers, strict=False):
                    if piece.stop > piece.start:
                        flat[piece] = answer.arrays[0]
                if timer is not None:
                    size = sum(p.stop - p.start for p in pieces) * dtype.itemsize
                    timer.end("receive", size)
        return flat

    def _gather(self, views: list[memoryview], call: Call, deadline: Deadline) -> None:
        mine = np.frombuffer(views[self.rank], np.uint8)
        for rank, found in zip(self.ranks, self._join_round(call, [mine]), strict=True):
            if rank != self.rank:
                views[rank][:] = found.data

    def _broadcast(
        self, view: memoryview, root: int, call: Call, deadline: Deadline
    ) -> None:
        mine = np.frombuffer(view, np.uint8)
        arrays = self._join_round(call, [mine] if self.rank == root else [])
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

    def _barrier(self, call: Call, deadline: Deadline) -> None:
        self._join_round(call)

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

    def _rest(self, first: int, call: Call) -> list[Build | None]:
        """Return requests for servers from `first` on; their results don't count."""
        count = self._client.servers - first
        if self._client.settings.mode == "sync":
            return [None] * count
        # A call without buffers: these servers only have to know the waiting workers.
        short = Call(call.sequence, "barrier", detail=zlib.crc32(str(call).encode()))
        request = request_of(self._meet(), (), short)
        return [lambda _: request] * count

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
