"""Results in memory that all workers of a host read.

    M_0, M_1, ...: memories of one result each, mapped by all ranks

An all-reduce inside a host ends with every rank copying the others' reduced chunks.
If the result is lent, each rank writes its chunk into one memory that all read, and
nothing is copied. While an array of that result is in use anywhere, its memory can't
be used for another one:

    1. r         notes the memories that aren't in use on this rank, for all to read
    2. all       barrier: all ranks have noted
    3. r         takes the first memory of the right size that all have noted: the same
                 one on all ranks, as no rank notes again before the call's last barrier
    4. all       if there's none, rank 0 makes one more, and all map it

A memory has no name: the kernel frees it when the last worker that maps it has ended,
in any way. Lent arrays are read-only, as all ranks read the same memory. TensorFlow
doesn't write to numpy's memory either.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kerasdist.collectives.buffer_pool import MOST_REQUESTS, Memory
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.shared_memory import create_memory, map_segment
from kerasdist.transport.sockets import SocketTransport
from kerasdist.transport.wire.framing import Call

# A rank's note has a bit for each of them.
MOST_MEMORIES = 64


class SharedResultPool:
    """The memories of lent results. All ranks call the same in the same order.

    Args:
        transport: Unix sockets that connect every rank with every other.

    Attributes:
        memories: Those that this rank has mapped, in use or not.
    """

    def __init__(self, transport: SocketTransport) -> None:
        self._transport = transport
        self.memories: list[Memory] = []
        self._requests = 0
        self._refused = False

    def note(self) -> int:
        """Return the unused memories on this rank, a bit for each."""
        self._requests += 1
        oldest = self._requests - MOST_REQUESTS
        # By a number that all ranks share; an array in use keeps its memory alive.
        self.memories = [m for m in self.memories if m.used > oldest]
        return sum(
            1 << index
            for index, memory in enumerate(self.memories)
            if not memory.in_use
        )

    def take(
        self, size: int, notes: Sequence[int], call: Call, deadline: Deadline
    ) -> npt.NDArray[np.uint8] | None:
        """Return memory of `size` bytes, the same on all ranks.

        Args:
            size: In bytes.
            notes: Each rank's note.
            call: The collective.
            deadline: Its deadline.

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
        made = self._make(size, call, deadline)
        if made is None:
            self._refused = True
            return None
        self.memories.append(Memory(made, self._requests))
        return made

    def _make(
        self, size: int, call: Call, deadline: Deadline
    ) -> npt.NDArray[np.uint8] | None:
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
            descriptors |= self._transport.share_descriptor(call, deadline, descriptor)
            if os.fstat(descriptors[0]).st_size != size:
                return None
            return map_segment(descriptors[0], size)
        finally:
            for fd in descriptors.values():
                os.close(fd)

    def clear(self) -> None:
        """Drop all memories; arrays in use stay valid."""
        self.memories = []
