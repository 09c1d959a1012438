"""The workers as one server knows them."""

from __future__ import annotations

from kerasdist.parameter_server.membership import Event, Membership, WorkerRecord


def crew_of(size, mode):
    members = Membership(size, mode)
    for rank in range(size):
        members.enter(WorkerRecord(rank, f"host{rank}:1", f"process {rank}"), None)
    events: list[Event] = []
    members.on_event.append(events.append)
    return members, events


def test_async_a_lost_worker_is_an_event():
    members, events = crew_of(3, "async")
    worker = members.workers[1]
    worker.clock = 7
    assert members.lose(worker, "it was killed")
    assert not members.lose(worker, "again")
    assert events == [Event("lost", 1, "host1:1", 7, "it was killed")]
    assert members.failure is None
    assert [p.rank for p in members.live()] == [0, 2]
    assert members.current(1, "process 1") is None
    members.enter(WorkerRecord(1, "host1:1", "process 9", clock=3), "joined")
    assert events[-1] == Event("joined", 1, "host1:1", 3)
    # The old process's connection may end after the new one has come.
    assert not members.lose(worker, "late")
    assert members.current(1, "process 9") is members.workers[1]
