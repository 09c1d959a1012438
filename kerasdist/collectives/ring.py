"""Ring collectives over sockets, alone and between hosts.

Every rank communicates with its right and its left neighbour only. A chunk is sent in
pieces: while a rank adds up one, the kernel receives and sends others.

Small buffers are sent around whole, and each rank reduces all of them, in rank order:
size-1 steps instead of 2 (size-1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kerasdist.collectives.checked import CheckedCommunicator
from kerasdist.collectives.fused_buffer import BufferPool, FusedBuffer
from kerasdist.collectives.row_exchange import (
    Array,
    equal_part,
    octets,
    reduce_in_order,
    reducer,
)
from kerasdist.transport.base import Collective, Peer
from kerasdist.transport.liveness.failure_protocol import Supervisor
from kerasdist.transport.sockets import SocketTransport
from kerasdist.transport.tracing import Recorder, SpanTimer

# Chunks are sent in pieces of this size. It's less than the kernel's buffers, and stays
# in a core's own cache until it is added.
PIECE_BYTES = 512 << 10

# Collectives over several hosts: memory inside a host, a ring between hosts.
#
#     L: the workers of one host     D: one leader per host
#
#     1. L   reduce inside the host
#     2. D   all-reduce between the leaders
#     3. L   the leader broadcasts inside its host
#
# Bytes cross the network once per host, not once per worker. Sums are made in
# rank order inside a host and in host order between them.


class HierarchicalCommunicator(CheckedCommunicator):
    """Composes a communicator inside each host with one between their leaders.

    Args:
        rank: This worker's rank in the job.
        peers: All workers, by rank.
        hosts: The ranks of each host, each list in ascending order, hosts in the
            order of their first rank.
        local: Between the workers of this host, in the order of `hosts`.
        leaders: Between the first worker of each host, in the order of `hosts`;
            None on every other worker.
        supervisor: Knows the state of other ranks.
        timeout: Seconds that one collective may take.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        hosts: Sequence[Sequence[int]],
        local: CheckedCommunicator,
        leaders: CheckedCommunicator | None,
        supervisor: Supervisor,
        timeout: float,
    ) -> None:
        super().__init__(rank, peers, supervisor, timeout)
        self._hosts = [list(ranks) for ranks in hosts]
        self._host = next(i for i, ranks in enumerate(self._hosts) if rank in ranks)
        self._local = local
        self._leaders = leaders
        self._piece_bytes = PIECE_BYTES
        if local.size > 1:
            self.within_host = local

    @property
    def piece_bytes(self) -> int:
        """See `RingCommunicator`: of the ring of leaders, on all ranks."""
        return self._piece_bytes

    @piece_bytes.setter
    def piece_bytes(self, size: int) -> None:
        self._piece_bytes = size
        if self._leaders is not None:
            self._leaders.piece_bytes = size

    def _reduce(self, source: FusedBuffer, lend: bool, collective: Collective) -> Array:
        flat = self._local._reduce(source, False, collective)
        if self._leaders is not None:
            flat = self._leaders._reduce(FusedBuffer([flat]), False, collective)
        self._local._broadcast(octets(flat), 0, collective)
        return flat

    def _gather(self, views: list[memoryview], collective: Collective) -> None:
        mine = self._hosts[self._host]
        self._local._gather([views[rank] for rank in mine], collective)
        if self._leaders is not None:
            packed = [
                memoryview(bytearray().join(views[rank] for rank in ranks))
                for ranks in self._hosts
            ]
            self._leaders._gather(packed, collective)
            for host, ranks in enumerate(self._hosts):
                start = 0
                for rank in ranks:
                    end = start + len(views[rank])
                    if host != self._host:
                        views[rank][:] = packed[host][start:end]
                    start = end
        for host, ranks in enumerate(self._hosts):
            if host != self._host:
                for rank in ranks:
                    self._local._broadcast(views[rank], 0, collective)

    def _broadcast(self, view: memoryview, root: int, collective: Collective) -> None:
        host = next(i for i, ranks in enumerate(self._hosts) if root in ranks)
        if host == self._host:
            place = self._hosts[host].index(root)
            self._local._broadcast(view, place, collective)
        if self._leaders is not None:
            self._leaders._broadcast(view, host, collective)
        if host != self._host:
            self._local._broadcast(view, 0, collective)

    def _barrier(self, collective: Collective) -> None:
        self._local._barrier(collective)
        if self._leaders is not None:
            self._leaders._barrier(collective)
        self._local._barrier(collective)

    def _record(self, recorder: Recorder | None) -> None:
        super()._record(recorder)
        for part in (self._local, self._leaders):
            if part is not None:
                part._record(recorder)

    def _abort(self) -> None:
        for part in (self._local, self._leaders):
            if part is not None:
                part._abort()

    def _close(self) -> None:
        for part in (self._local, self._leaders):
            if part is not None:
                part._close()


# The ring schedule: pure functions of numbers.
#
# A buffer of E elements is cut into `size` chunks. In reduce-scatter every rank
# sends one chunk to the right and adds the one received from the left, size-1
# times; then each rank holds one finished chunk. In all-gather the finished chunks
# are passed around, size-1 times. With 4 ranks, the chunk that rank r sends in each
# step:
#
#     step            0  1  2 | 3  4  5
#     rank 0          0  3  2 | 1  0  3
#     rank 1          1  0  3 | 2  1  0
#     rank 2          2  1  0 | 3  2  1
#     rank 3          3  2  1 | 0  3  2
#                  reduce-scatter | all-gather
#
# Each rank sends 2 (size-1)/size x E elements, the least possible (Patarasuk and
# Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
# JPDC 2009). Each chunk is summed in one order, on one path, so that all ranks
# end with the same bits.


def reduce_scatter_steps(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (chunk to send, chunk to receive and add), size-1 times.

    Afterwards `rank` holds the finished chunk (rank + 1) % size.
    """
    for step in range(size - 1):
        yield (rank - step) % size, (rank - step - 1) % size


def all_gather_steps(rank: int, size: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield (chunk to send, chunk to receive), size-1 times.

    Args:
        rank: The rank.
        size: Number of ranks.
        first: The chunk that rank 0 holds at the beginning; rank r holds
            (first + r) % size.
    """
    for step in range(size - 1):
        yield (rank + first - step) % size, (rank + first - step - 1) % size


# Up to this size buffers are sent whole, if that moves at most this many more bytes.
_SMALL_BYTES = 64 << 10
_MORE_BYTES = 16 << 10


def sends_whole(size: int, ranks: int) -> bool:
    """Return whether a buffer of some bytes is sent around whole."""
    return size <= _SMALL_BYTES and (ranks - 2) * size <= _MORE_BYTES


class RingCommunicator(CheckedCommunicator):
    """Collectives around a ring.

    Args:
        transport: Connects this rank with (rank+1) % size and (rank-1) % size.
        supervisor: Knows the state of other ranks.
        timeout: Seconds that one collective may take.

    Attributes:
        transport: As given.
        piece_bytes: The size of pieces, the same on all ranks.
    """

    def __init__(
        self, transport: SocketTransport, supervisor: Supervisor, timeout: float
    ) -> None:
        super().__init__(transport.rank, transport.peers, supervisor, timeout)
        self.transport = transport
        self._right = (self.rank + 1) % self.size
        self._left = (self.rank - 1) % self.size
        self._results = BufferPool()
        self.piece_bytes = PIECE_BYTES

    def _reduce(self, source: FusedBuffer, lend: bool, collective: Collective) -> Array:
        elements, dtype, op = source.elements, source.dtype, collective.call.op
        size = elements * dtype.itemsize
        timer = SpanTimer(self._recorder)
        flat = self._results.empty(elements, dtype)
        source.copy_to(flat, 0, elements)
        timer.end("pack", size)
        if self.size > 1 and sends_whole(size, self.size):
            inputs = np.empty((self.size, elements), dtype)
            inputs[self.rank] = flat
            self._gather([octets(row) for row in inputs], collective)
            timer.skip()
            reduce_in_order([*inputs], op, flat)
            timer.end("reduce", size * (self.size - 1))
            return flat
        combine = reducer(op)
        view = octets(flat)
        width = dtype.itemsize
        room = np.empty(min(elements, self.piece_bytes // width), dtype)
        for send, receive in reduce_scatter_steps(self.rank, self.size):
            for out, into in self._pieces(elements, width, send, receive):
                mine = flat[into]
                arrived = room[: mine.size]
                self._pass_on(_part(view, out, width), octets(arrived), collective)
                timer.skip()
                # The received piece is a sum over the ranks to the left: it is the
                # first operand, so that each chunk has one order of summation.
                combine(arrived, mine, out=mine)
                timer.end("reduce", mine.nbytes)
        for send, receive in all_gather_steps(self.rank, self.size, 1):
            for out, into in self._pieces(elements, width, send, receive):
                self._pass_on(
                    _part(view, out, width), _part(view, into, width), collective
                )
        return flat

    def _pieces(
        self, elements: int, width: int, send: int, receive: int
    ) -> Iterator[tuple[slice, slice]]:
        """Cut a chunk to send and one to receive into pieces, equally many.

        Chunks differ by an element: all are cut as the longest one, chunk 0, is.
        """
        longest = equal_part(elements, self.size, 0).stop
        out, into = (
            equal_part(elements, self.size, send),
            equal_part(elements, self.size, receive),
        )
        most = self.piece_bytes // width
        for start in range(0, max(longest, 1), most):
            yield (
                _within(out, start, most),
                _within(into, start, most),
            )

    def _gather(self, views: list[memoryview], collective: Collective) -> None:
        for send, receive in all_gather_steps(self.rank, self.size, 0):
            self._pass_on(views[send], views[receive], collective)

    def _broadcast(self, view: memoryview, root: int, collective: Collective) -> None:
        first, last = self.rank == root, self._right == root
        for start in range(0, max(len(view), 1), self.piece_bytes):
            piece = view[start : start + self.piece_bytes]
            if not first:
                self.transport.exchange(collective, source=self._left, incoming=piece)
            if not last:
                self.transport.exchange(collective, to=self._right, outgoing=piece)

    def _barrier(self, collective: Collective) -> None:
        # After size-1 rounds this rank has received, through its neighbours, from all.
        for _ in range(self.size - 1):
            self._pass_on(memoryview(b""), None, collective)

    def _pass_on(
        self,
        outgoing: memoryview,
        incoming: memoryview | None,
        collective: Collective,
    ) -> None:
        self.transport.exchange(
            collective,
            to=self._right,
            outgoing=outgoing,
            source=self._left,
            incoming=incoming,
        )

    def _record(self, recorder: Recorder | None) -> None:
        super()._record(recorder)
        self.transport.recorder = recorder

    def _abort(self) -> None:
        self.transport.abort()

    def _close(self) -> None:
        self.transport.close()
        self._results.clear()


def _within(part: slice, start: int, most: int) -> slice:
    """Return at most `most` elements of a part, `start` elements after its begin."""
    begin = min(part.start + start, part.stop)
    return slice(begin, min(begin + most, part.stop))


def _part(view: memoryview, part: slice, width: int) -> memoryview:
    return view[part.start * width : part.stop * width]
