"""What a communicator tells of what it spends its time on."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from groups import Group
from kerasdist.parameter_server import Variable
from kerasdist.transport.tracing import NAMES, now
from servers import Servers

KINDS = [("unix", 2), ("shared", 3), ("servers_tcp", 2), ("abb", 3), ("single", 1)]


class Notes:
    """A recorder that keeps all spans."""

    def __init__(self):
        self.spans = []

    def add(self, name, begin, end, size=0, what=""):
        self.spans.append((name, begin, end, size, str(what)))

    def of(self, name):
        return [span for span in self.spans if span[0] == name]


@pytest.mark.parametrize(("kind", "size"), KINDS, ids=lambda value: str(value))
@pytest.mark.parametrize("elements", [100, 300_000])
def test_an_all_reduce_is_recorded_with_what_it_is_made_of(kind, size, elements):
    def work(communicator):
        buffer = np.ones(elements, np.float32)
        communicator.all_reduce([buffer])
        notes = Notes()
        communicator.add_recorder(notes)
        begin = now()
        communicator.all_reduce([buffer])
        end = now()
        communicator.remove_recorder(notes)
        communicator.all_reduce([buffer])
        return notes, begin, end

    with Group(kind, size) as group:
        for notes, begin, end in group.run(work):
            ((_, first, last, octets, what),) = notes.of("all_reduce")
            assert begin <= first <= last <= end
            assert octets == 4 * elements
            assert "all_reduce(op='sum', dtype=float32" in what
            inside = [span for span in notes.spans if span[0] in NAMES]
            assert all(first <= b <= e <= last for _, b, e, _, _ in inside)
            if size > 1:
                assert {"pack", "wait"} <= {span[0] for span in inside}
                reducing = not kind.startswith("server")
                assert ("reduce" in {span[0] for span in inside}) is reducing
            # What doesn't overlap: one after the other, in less than all the time.
            follow = [s for s in inside if s[0] != "send" and "server" not in s[4]]
            assert sum(e - b for _, b, e, _, _ in follow) <= last - first


def test_waiting_for_a_late_rank_is_waiting():
    late = threading.Event()

    def work(communicator):
        buffer = np.ones(300_000, np.float32)
        communicator.all_reduce([buffer])  # its segments are made
        notes = Notes()
        communicator.add_recorder(notes)
        if communicator.rank == 1:
            late.wait(0.6)
        communicator.all_reduce([buffer])
        return sum(e - b for _, b, e, _, _ in notes.of("wait")) / 1e9

    for kind in ("unix", "shared"):
        with Group(kind, 2) as group:
            waited, late_waited = group.run(work)
        assert waited > max(0.1, late_waited)


def test_several_may_listen():
    first, second = Notes(), Notes()
    with Group("single", 1) as group:
        (communicator,) = group.communicators
        communicator.add_recorder(first)
        communicator.add_recorder(second)
        communicator.barrier()
        communicator.remove_recorder(first)
        communicator.barrier()
        communicator.remove_recorder(second)
        communicator.barrier()
        communicator.remove_recorder(second)
    assert len(first.spans) == 1
    assert len(second.spans) == 2


def test_an_exchange_with_a_table_is_recorded():
    notes = Notes()
    with Servers(1, 2, mode="async") as servers:
        (client,) = servers.clients
        table = client.open_table(
            [Variable(name="w", shape=(1000,), dtype="float32")],
            [np.zeros(1000, np.float32)],
        )
        client.communicator.add_recorder(notes)
        table.push_pull([np.ones(1000, np.float32)])
        client.communicator.remove_recorder(notes)
        table.push_pull([np.ones(1000, np.float32)])
    ((_, begin, end, _, _),) = notes.of("push_pull")
    assert len(notes.of("pack")) == len(notes.of("send")) == 2
    for _, first, last, _, _ in notes.spans:
        assert begin <= first <= last <= end
