"""Collectives of the workers of one host, through memory that they share.

    R: ranks 0..N-1, each with a segment S_r that all of them map

A large all-reduce goes through the segments block by block. In a block, chunk r is
the one that rank r reduces:

    1. r         packs all chunks of the block but its own into S_r
    2. all       barrier: all ranks have packed
    3. r         reduces chunk r, its own input and then those in the other segments,
                 in rank order, into its result, and copies that into S_r, where it has
                 packed nothing
    4. all       barrier: every chunk is finished, chunk r in S_r
    5. r         copies chunk q from S_q, for all other q, into its result

If the result is lent (`kerasdist.collectives.shared_memory`), all ranks'
result is one memory: then nothing is copied into S_r, and 5. isn't needed.

There is one barrier per block: between two of them a rank does 5. of one block, 3.
of the next and 1. of the one after that. Each block has a place of its own in the
segments, one after the other and then from the beginning again. At least four fit: no
rank can be two barriers ahead of a reader, so no memory is written that another rank
still reads, in this collective or the next one.

With B bytes of buffers a rank reads and writes, each

    1.  (N-1)/N B        3.  reads B, writes 2/N B        5.  (N-1)/N B

and of a lent result 1. (N-1)/N B, and 3. reads B, writes 1/N B.

The places aren't one small place that stays in the caches, because writing to memory
that is in another core's cache is the slowest operation of all where cores don't share
a cache (2.4 GB/s instead of 12, see benchmarks/all_reduce). As the places of one turn
exceed the caches, a place has left the others' caches when its rank writes it again.

A small all-reduce has one barrier: each rank packs all of it, and reduces all of it.

A barrier is a message to and from other ranks over Unix sockets. The message
carries the call's fingerprint, wakes a waiting rank at once, costs no processor
time while it waits, orders memory on every architecture, and ends when a worker
dies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kerasdist.collectives.checked import CheckedCommunicator
from kerasdist.collectives.fused_buffer import (
    BufferPool,
    FusedBuffer,
    Memory,
    MemoryPool,
    combine_arrays,
)
from kerasdist.collectives.row_exchange import (
    Array,
    equal_part,
    reduce_in_order,
    reducer,
)
from kerasdist.errors import SharedMemoryFull
from kerasdist.transport.base import Collective
from kerasdist.transport.liveness.failure_protocol import Supervisor
from kerasdist.transport.memory import create_memory, create_segment, map_segment
from kerasdist.transport.sockets import SocketTransport
from kerasdist.transport.tracing import Recorder, SpanTimer

# Results in memory that all workers of a host read.
#
#     M_0, M_1, ...: memories of one result each, mapped by all ranks
#
# An all-reduce inside a host ends with every rank copying the others' reduced chunks.
# If the result is lent, each rank writes its chunk into one memory that all read, and
# nothing is copied. While an array of that result is in use anywhere, its memory can't
# be used for another one:
#
#     1. r         notes the memories that aren't in use on this rank, for all to read
#     2. all       barrier: all ranks have noted
#     3. r         takes the first memory of the right size that all have noted: the
#                  same one on all ranks, as no rank notes again before the call's last
#                  barrier
#     4. all       if there's none, rank 0 makes one more, and all map it
#
# A memory has no name: the kernel frees it when the last worker that maps it has ended,
# in any way. Lent arrays are read-only, as all ranks read the same memory. TensorFlow
# doesn't write to numpy's memory either.

# A rank's note has a bit for each of them.
MOST_MEMORIES = 64


class SharedResultPool(MemoryPool):
    """The memories of lent results. All ranks call the same in the same order.

    Args:
        transport: Unix sockets that connect every rank with every other.
    """

    def __init__(self, transport: SocketTransport) -> None:
        super().__init__()
        self._transport = transport
        self._refused = False

    def note(self) -> int:
        """Return the unused memories on this rank, a bit for each."""
        self._requests += 1
        # By a number that all ranks share.
        self._free()
        return sum(
            1 << index
            for index, memory in enumerate(self.memories)
            if not memory.in_use
        )

    def take(
        self, size: int, notes: Sequence[int], collective: Collective
    ) -> npt.NDArray[np.uint8] | None:
        """Return memory of `size` bytes, the same on all ranks.

        Args:
            size: In bytes.
            notes: Each rank's note.
            collective: The collective.

        Returns:
            None, on all ranks, if there is no more memory, or too many results are in
            use.
        """
        common = ~0
        for note in notes:
            common &= note
        for index, memory in enumerate(self.memories):
            if common >> index & 1 and memory.buffer.size == size:
                memory.used = self._requests
                return memory.buffer
        if self._refused or len(self.memories) == MOST_MEMORIES:
            return None
        made = self._make(size, collective)
        if made is None:
            self._refused = True
            return None
        self.memories.append(Memory(made, self._requests))
        return made

    def _make(self, size: int, collective: Collective) -> npt.NDArray[np.uint8] | None:
        descriptor = -1
        if self._transport.rank == 0:
            try:
                descriptor = create_memory(size)
            except OSError:  # the others get an empty file
                pass
        if descriptor < 0:
            descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        descriptors = {self._transport.rank: descriptor}
        try:
            descriptors |= self._transport.share_descriptor(collective, descriptor)
            if os.fstat(descriptors[0]).st_size != size:
                return None
            return map_segment(descriptors[0], size)
        finally:
            for fd in descriptors.values():
                os.close(fd)


# Buffers up to this size are reduced by each rank, with one barrier: to meet again
# costs more than to reduce the others' chunks, too.
_SMALL_BYTES = 64 << 10
# The same for the buffers of all ranks together, which each of them reads.
_SMALL_BYTES_OF_ALL = 512 << 10
# Bytes of the segments of a host, together. Containers have 64 MB by default.
_MOST_BYTES = 48 << 20
# A segment is this many times larger than the buffers that it is made for, up to
# `_MOST_BYTES`.
_TIMES = 8
# Number of blocks in a segment.
_BLOCKS = 4
_PAGE = 4096
_LINE = 64
# A chunk is reduced in pieces: each is still in the core's own cache when it is read
# again, to be copied.
_PIECE_BYTES = 256 << 10
# What is written of larger buffers has left the caches when another core reads it.
_STREAMED_BYTES = 2 << 20
# Bytes of a segment for small buffers.
_LEAST_BYTES = _BLOCKS * (_SMALL_BYTES + 2 * _PAGE)


class SharedMemoryCommunicator(CheckedCommunicator):
    """Collectives through shared memory.

    Args:
        transport: Unix sockets that connect every rank with every other.
        supervisor: Knows the state of other ranks.
        timeout: Seconds that one collective may take.

    Attributes:
        lent: The memories of lent results.
    """

    shares_memory = True

    def __init__(
        self,
        transport: SocketTransport,
        supervisor: Supervisor,
        timeout: float,
    ) -> None:
        super().__init__(transport.rank, transport.peers, supervisor, timeout)
        self._transport = transport
        self._small = max(_SMALL_BYTES, _SMALL_BYTES_OF_ALL // self.size)
        self._segments: list[npt.NDArray[np.uint8]] = []
        self._total = 0  # bytes of a segment for blocks, the same on all ranks
        self._next = 0  # where the next block's place begins
        self._results = BufferPool()
        self._notes: list[npt.NDArray[np.uint64]] = []
        self.lent = SharedResultPool(transport)

    def _reduce(self, source: FusedBuffer, lend: bool, collective: Collective) -> Array:
        elements, dtype = source.elements, source.dtype
        size = elements * dtype.itemsize
        self._make_room(size, collective)
        if size > self._small:
            return self._reduce_blocks(source, lend, collective)
        timer = SpanTimer(self._recorder)
        flat = self._results.empty(elements, dtype)
        inputs = [place.view(dtype) for place in self._places(size)]
        source.copy_to(inputs[self.rank], 0, elements)
        timer.end("pack", size)
        self._synchronize(collective)
        timer.skip()
        reduce_in_order(inputs, collective.call.op, flat)
        timer.end("reduce", size * (self.size - 1))
        return flat

    def _reduce_blocks(
        self, source: FusedBuffer, lend: bool, collective: Collective
    ) -> Array:
        elements, dtype = source.elements, source.dtype
        size = elements * dtype.itemsize
        most = (self._total // _BLOCKS - _PAGE) // dtype.itemsize
        count = -(-elements // most)
        piece = _PIECE_BYTES // dtype.itemsize
        stream = size >= _STREAMED_BYTES
        combine = reducer(collective.call.op)
        others = [rank for rank in range(self.size) if rank != self.rank]
        flat: Array = np.empty(0, dtype)
        lent = None
        if lend:
            self._notes[self.rank][0] = self.lent.note()
        timer = SpanTimer(self._recorder)
        # Of each block the packed inputs, by rank.
        blocks: list[tuple[slice, list[Array]]] = []
        for stage in range(count + 2):
            if stage == 1:
                if lend:
                    notes = [int(note[0]) for note in self._notes]
                    lent = self.lent.take(size, notes, collective)
                if lent is None:
                    flat = self._results.empty(elements, dtype)
                else:
                    flat = lent.view(dtype)
                timer.skip()
            if stage > 1 and lent is None:
                block, places = blocks[stage - 2]
                for rank in others:
                    part = _chunk(block, self.size, rank)
                    mine, theirs = flat[part], places[rank][_within(part, block)]
                    combine_arrays(mine, theirs, stream=stream)
                timer.end("receive", (block.stop - block.start) * dtype.itemsize)
            if 0 < stage <= count:
                block, places = blocks[stage - 1]
                part = _chunk(block, self.size, self.rank)
                for start in range(part.start, part.stop, piece):
                    some = slice(start, min(start + piece, part.stop))
                    within = _within(some, block)
                    reduced = flat[some]
                    copy = places[self.rank][within] if lent is None else None
                    # The sum of several is read again: it stays in the caches.
                    source.combine_to(
                        *(reduced, some.start, some.stop),
                        *(combine, places[others[0]][within]),
                        copy=None if others[1:] else copy,
                        stream=stream and not others[1:],
                    )
                    for rank in others[1:]:
                        combine(reduced, places[rank][within], out=reduced)
                    if others[1:] and copy is not None:
                        combine_arrays(copy, reduced, stream=stream)
                timer.end("reduce", (part.stop - part.start) * dtype.itemsize)
            if stage < count:
                block = equal_part(elements, count, stage)
                length = block.stop - block.start
                # An element is as far from the begin of a line as in the result, so
                # that one pass can store both past the caches.
                beyond = block.start * dtype.itemsize % _LINE
                room = self._places(beyond + length * dtype.itemsize)
                places = [place[beyond:].view(dtype) for place in room]
                blocks.append((block, places))
                mine, part = places[self.rank], _chunk(block, self.size, self.rank)
                own = _within(part, block)
                for out, start, stop in (
                    (mine[: own.start], block.start, part.start),
                    (mine[own.stop :], part.stop, block.stop),
                ):
                    source.copy_to(out, start, stop, stream=stream)
                timer.end("pack", length * dtype.itemsize)
            if stage <= count:
                self._synchronize(collective)
                timer.skip()
        return flat

    def _gather(self, views: list[memoryview], collective: Collective) -> None:
        longest = max(len(view) for view in views)
        self._make_room(longest, collective)
        for start, stop in self._pieces(longest):
            places = self._places(stop - start)
            own = views[self.rank][start:stop]
            places[self.rank][: len(own)] = own
            self._synchronize(collective)
            for rank, view in enumerate(views):
                if rank != self.rank:
                    piece = view[start:stop]
                    piece[:] = places[rank][: len(piece)].data

    def _free_memories(self) -> int:
        return self.lent.note()

    def _take(
        self, size: int, notes: Sequence[int], collective: Collective
    ) -> Array | None:
        return self.lent.take(size, notes, collective)

    def _broadcast(self, view: memoryview, root: int, collective: Collective) -> None:
        self._make_room(len(view), collective)
        for start, stop in self._pieces(len(view)):
            place = self._places(stop - start)[root]
            if self.rank == root:
                place[:] = view[start:stop]
            self._synchronize(collective)
            if self.rank != root:
                view[start:stop] = place.data

    def _barrier(self, collective: Collective) -> None:
        self._synchronize(collective)

    def _synchronize(self, collective: Collective) -> None:
        """Return when all ranks have called this (a dissemination barrier).

        After the round with distance d a rank has received, directly or not, from the
        2 d - 1 ranks before it, so log2(size) rounds are enough (Hensgen, Finkel
        and Manber, "Two algorithms for barrier synchronization", 1988).
        """
        distance = 1
        while distance < self.size:
            self._transport.exchange(
                collective,
                to=(self.rank + distance) % self.size,
                source=(self.rank - distance) % self.size,
            )
            distance *= 2

    def _pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield start and stop of the pieces in which `size` bytes are moved."""
        most = self._total // _BLOCKS - _PAGE
        for start in range(0, max(size, 1), most):
            yield start, min(start + most, size)

    def _places(self, size: int) -> list[npt.NDArray[np.uint8]]:
        """Return the place of the next block in each rank's segment.

        It's at most a quarter of a segment. All ranks call this with the same sizes.
        """
        if self._next + size > self._total:
            self._next = 0
        start = self._next
        self._next = -(-(start + size) // _PAGE) * _PAGE
        return [segment[start : start + size] for segment in self._segments]

    def _make_room(self, size: int, collective: Collective) -> None:
        """Make the segments large enough for `size` bytes, in blocks."""
        total = _LEAST_BYTES
        if size > _SMALL_BYTES:
            rounded = _SMALL_BYTES  # sizes that grow slowly don't grow it each time
            while rounded < size:
                rounded *= 2
            most = max(_MOST_BYTES // self.size // _PAGE * _PAGE, _LEAST_BYTES)
            total = min(_TIMES * rounded, most)
        # The last page is for the ranks' notes.
        usable = total - _PAGE
        if usable <= self._total:
            return
        # The old segments' memory is free for the new ones when all have dropped it.
        if self._segments:
            self._segments, self._notes = [], []
            self._synchronize(collective)
        try:
            descriptor = create_segment(total)
        except SharedMemoryFull as error:
            here = self.peers[self.rank]
            raise SharedMemoryFull(
                f"{here} in {collective.call} at step {self.step}: {error}"
            ) from error
        descriptors = {self.rank: descriptor}
        try:
            descriptors |= self._transport.share_descriptor(collective, descriptor)
            whole = [map_segment(descriptors[r], total) for r in range(self.size)]
            self._segments = [segment[:usable] for segment in whole]
            self._notes = [segment[usable:].view(np.uint64) for segment in whole]
        finally:
            for fd in descriptors.values():
                os.close(fd)
        self._total = usable
        self._next = 0

    def _record(self, recorder: Recorder | None) -> None:
        super()._record(recorder)
        self._transport.recorder = recorder

    def _abort(self) -> None:
        self._transport.abort()

    def _close(self) -> None:
        self._transport.close()
        self._segments, self._notes = [], []
        self._results.clear()
        self.lent.clear()


def _chunk(block: slice, size: int, rank: int) -> slice:
    """Return a rank's chunk of a block."""
    return equal_part(block.stop - block.start, size, rank, block.start)


def _within(part: slice, block: slice) -> slice:
    """Return where a part of a block lies in the block."""
    return slice(part.start - block.start, part.stop - block.start)
