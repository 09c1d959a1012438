"""Collectives over several hosts: memory inside a host, a ring between hosts.

    L: the workers of one host     D: one leader per host

    1. L   reduce inside the host
    2. D   all-reduce between the leaders
    3. L   the leader broadcasts inside its host

Bytes cross the network once per host, not once per worker. Sums are made in
rank order inside a host and in host order between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kerasdist.collectives.checked import CheckedCommunicator
from kerasdist.collectives.fused_buffer import FusedBuffer
from kerasdist.collectives.ops import Array, octets
from kerasdist.transport.base import Peer
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.liveness.failure_protocol import Supervisor
from kerasdist.transport.tracing import Recorder
from kerasdist.transport.wire.framing import Call


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

    def _reduce(
        self, source: FusedBuffer, lend: bool, call: Call, deadline: Deadline
    ) -> Array:
        flat = self._local._reduce(source, False, call, deadline)
        if self._leaders is not None:
            flat = self._leaders._reduce(FusedBuffer([flat]), False, call, deadline)
        self._local._broadcast(octets(flat), 0, call, deadline)
        return flat

    def _gather(self, views: list[memoryview], call: Call, deadline: Deadline) -> None:
        mine = self._hosts[self._host]
        self._local._gather([views[rank] for rank in mine], call, deadline)
        if self._leaders is not None:
            packed = [
                memoryview(bytearray().join(views[rank] for rank in ranks))
                for ranks in self._hosts
            ]
            self._leaders._gather(packed, call, deadline)
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
                    self._local._broadcast(views[rank], 0, call, deadline)

    def _broadcast(
        self, view: memoryview, root: int, call: Call, deadline: Deadline
    ) -> None:
        host = next(i for i, ranks in enumerate(self._hosts) if root in ranks)
        if host == self._host:
            place = self._hosts[host].index(root)
            self._local._broadcast(view, place, call, deadline)
        if self._leaders is not None:
            self._leaders._broadcast(view, host, call, deadline)
        if host != self._host:
            self._local._broadcast(view, 0, call, deadline)

    def _barrier(self, call: Call, deadline: Deadline) -> None:
        self._local._barrier(call, deadline)
        if self._leaders is not None:
            self._leaders._barrier(call, deadline)
        self._local._barrier(call, deadline)

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
