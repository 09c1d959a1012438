"""The transport inside one process: queues between threads, for tests.

Besides moving bytes it injects faults that sockets can't cause on demand:
`Faults.fail_at(rank=1, exchange=3)` closes rank 1 at its third exchange.
"""

from __future__ import annotations

import threading
from collections import deque

from kerasdist.errors import ProtocolError
from kerasdist.transport.base import (
    Aborted,
    CallMismatch,
    Peer,
    PeerClosed,
    PeerSilent,
    Transport,
)
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.wire.framing import Call


class Faults:
    """The faults to inject into a group of memory transports."""

    def __init__(self) -> None:
        self._at: set[tuple[int, int]] = set()

    def fail_at(self, *, rank: int, exchange: int) -> None:
        """Close `rank` at the beginning of its `exchange`-th exchange, from 1."""
        self._at.add((rank, exchange))

    def due(self, rank: int, exchange: int) -> bool:
        """Return whether `rank` is to break now."""
        return (rank, exchange) in self._at


class _Wire:
    """The queues that all transports of one group share."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.frames: dict[tuple[int, int], deque[tuple[Call, bytes]]] = {
            (a, b): deque() for a in range(size) for b in range(size)
        }
        self.closed: set[int] = set()


class MemoryTransport(Transport):
    """One rank's end of a group made by `memory_group`."""

    def __init__(self, rank: int, size: int, wire: _Wire, faults: Faults) -> None:
        self.rank = rank
        self.size = size
        self.peers = tuple(Peer(r, f"memory:{r}") for r in range(size))
        self._wire = wire
        self._faults = faults
        self._exchanges = 0

    def exchange(
        self,
        call: Call,
        deadline: Deadline,
        *,
        to: int | None = None,
        outgoing: memoryview | bytes = b"",
        source: int | None = None,
        incoming: memoryview | None = None,
    ) -> None:
        """See `Transport.exchange`. Sending never blocks: queues have no bound."""
        self._exchanges += 1
        if self._faults.due(self.rank, self._exchanges):
            self.close()
        wire = self._wire
        with wire.changed:
            if self.rank in wire.closed:
                raise Aborted
            if to is not None:
                if to in wire.closed:
                    raise PeerClosed(self.peers[to], "its end is closed")
                payload = bytes(outgoing)
                wire.frames[self.rank, to].append((call, payload))
                wire.changed.notify_all()
            if source is None:
                return
            queue = wire.frames[source, self.rank]
            while not queue:
                if self.rank in wire.closed:
                    raise Aborted
                if source in wire.closed:
                    raise PeerClosed(self.peers[source], "its end is closed")
                if deadline.expired:
                    raise PeerSilent(
                        self.peers[source], f"silent for {deadline.seconds} s"
                    )
                wire.changed.wait(deadline.remaining())
            theirs, payload = queue.popleft()
        if theirs != call:
            raise CallMismatch(self.peers[source], call, theirs)
        room = 0 if incoming is None else len(incoming)
        if len(payload) != room:
            raise ProtocolError(
                f"A data frame of {self.peers[source]} has the wrong length. "
                f"Received: {len(payload)} bytes, expected {room}."
            )
        if incoming is not None:
            incoming[:] = payload

    def abort(self) -> None:
        """See `Transport.abort`."""
        with self._wire.changed:
            self._wire.closed.add(self.rank)
            self._wire.changed.notify_all()

    close = abort


def memory_group(size: int, faults: Faults | None = None) -> list[MemoryTransport]:
    """Return the `size` connected ends of one group, by rank."""
    wire = _Wire(size)
    faults = faults or Faults()
    return [MemoryTransport(rank, size, wire, faults) for rank in range(size)]
