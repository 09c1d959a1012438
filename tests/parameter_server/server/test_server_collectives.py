import threading

import numpy as np
import pytest

from groups import in_threads, outcomes
from kerasdist import errors
from kerasdist.parameter_server.layout import ServerSettings
from kerasdist.parameter_server.membership import Event, Membership, WorkerRecord
from kerasdist.parameter_server.server.collectives import ServerCollectives
from kerasdist.parameter_server.tables import ServedTables
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import Call
from pace import bound
from waiting import wait_until


class Tables(ServedTables):
    """Tables that show which workers wait in a collective."""

    def __init__(self, *args):
        super().__init__(*args)
        self.waiting = set()

    def park(self, rank):
        self.waiting.add(rank)

    def align(self, ranks):
        self.waiting.clear()


class Server:
    def __init__(self, size, mode="async"):
        self.membership = Membership(size, mode)
        self.tables = Tables(0, ServerSettings(mode=mode), self.membership)
        self.collectives = ServerCollectives(
            self.membership, self.tables, coordinates=True
        )
        self.membership.on_event.append(self.note)
        for rank in range(size):
            self.membership.enter(
                WorkerRecord(rank, f"host{rank}:1", f"process {rank}"), None
            )

    def note(self, event: Event) -> None:
        if event.kind in ("lost", "finished"):
            self.collectives.forget(event.rank)

    def sum(self, rank, value, number=1, seconds=60.0, elements=3):
        call = Call(number, "all_reduce", "sum", "float32", elements)
        arrays = [np.full(elements, value, np.float32)]
        result, ranks = self.collectives.join_round(
            self.membership.workers[rank], call, arrays, None, Deadline(seconds)
        )
        return result[0].copy(), ranks

    def here(self, *ranks):
        wait_until(lambda: self.tables.waiting >= set(ranks), f"ranks {ranks}")


@pytest.mark.parametrize("came", [True, False])
def test_a_lost_worker_is_neither_counted_nor_waited_for(came):
    server = Server(3)

    def work(rank):
        if rank == 1:
            server.here(0, *[2] * came)
            server.membership.lose(server.membership.workers[2], "it was killed")
        if rank == 2 and not came:
            return None
        return server.sum(rank, 10**rank)

    first, second, _ = outcomes(3, work)
    for result, ranks in (first, second):
        assert result.tolist() == [11, 11, 11]
        assert ranks == [0, 1]


def test_who_joined_while_others_wait_need_not_come():
    server = Server(2)
    server.membership.lose(server.membership.workers[1], "it was killed")
    server.membership.enter(WorkerRecord(1, "host1:1", "another", met=1), "joined")
    assert server.sum(0, 5, 1)[1] == [0]


def test_a_result_that_is_asked_for_again_is_the_same():
    server = Server(2)
    in_threads(2, lambda rank: server.sum(rank, 1 + rank))
    result, ranks = server.sum(1, 2)
    assert result.tolist() == [3, 3, 3]
    assert ranks == [0, 1]


def test_who_is_late_is_named():
    server = Server(3)
    with pytest.raises(
        errors.CollectiveTimeout,
        match=r"^rank 1 \(host1:1\) and rank 2 \(host2:1\) didn't join #1 .* 0\.1 s",
    ):
        server.sum(0, 1, seconds=0.1)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_sums_are_made_in_rank_order(mode):
    """Whoever comes first: floats are added in one order."""
    values = np.array([1e8, -1e8, 0.3, 7e7], np.float32)
    expected = ((values[0] + values[1]) + values[2]) + values[3]
    for first in range(4):
        server = Server(4, mode)
        gate = threading.Event()

        def work(rank, first=first, server=server, gate=gate):
            if rank == first:
                gate.set()
            gate.wait(bound(10))
            return server.sum(rank, values[rank], elements=300_000)

        for result, _ in in_threads(4, work):
            assert (result == expected).all()


def test_a_result_that_only_others_have_cannot_be_made_again():
    server = Server(2)
    server.membership.workers[1].met = 4
    server.membership.workers[1].returned = True
    with pytest.raises(errors.CollectiveError, match="was restarted while #4"):
        server.sum(0, 1, 4)
