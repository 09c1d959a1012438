"""The workers as one server knows them."""

from __future__ import annotations

import pytest

from kerasdist import errors
from kerasdist.ps.server.membership import Event, Membership, WorkerRecord


def crew_of(size, mode):
    crew = Membership(size, mode)
    for rank in range(size):
        crew.enter(WorkerRecord(rank, f"host{rank}:1", f"process {rank}"), None)
    events: list[Event] = []
    crew.on_event.append(events.append)
    return crew, events


def test_async_a_lost_worker_is_an_event():
    crew, events = crew_of(3, "async")
    person = crew.people[1]
    person.clock = 7
    assert crew.lose(person, "it was killed")
    assert not crew.lose(person, "again")
    assert events == [Event("lost", 1, "host1:1", 7, "it was killed")]
    assert crew.failure is None
    assert [p.rank for p in crew.live()] == [0, 2]
    assert crew.current(1, "process 1") is None
    crew.enter(WorkerRecord(1, "host1:1", "process 9", clock=3), "joined")
    assert events[-1] == Event("joined", 1, "host1:1", 3)
    # The old process's connection may end after the new one has come.
    assert not crew.lose(person, "late")
    assert crew.current(1, "process 9") is crew.people[1]


def test_sync_a_lost_worker_is_the_jobs_failure():
    crew, _ = crew_of(2, "sync")
    failures: list[errors.CollectiveError] = []
    crew.on_failure.append(failures.append)
    crew.lose(crew.people[1], "it was killed")
    crew.lose(crew.people[0], "it gave up")
    (failure,) = failures
    assert isinstance(failure, errors.WorkerLost)
    assert (failure.rank, failure.host) == (1, "host1:1")
    assert crew.failure is failure
    assert crew.fail(errors.CollectiveError("later")) is failure


def test_it_is_over_when_all_have_finished_or_are_lost():
    crew, events = crew_of(2, "async")
    assert Membership(2, "async").missing() == [0, 1]
    assert not Membership(2, "async").over
    crew.finish(crew.people[0], "it has finished")
    crew.finish(crew.people[0], "it has finished")
    assert not crew.over
    crew.lose(crew.people[1], "it was killed")
    assert crew.over
    assert [event.kind for event in events] == ["finished", "lost"]


def test_events_travel():
    event = Event("lost", 1, "host1:1", 7, "it was killed")
    assert Event.from_json(event.to_json()) == event
    with pytest.raises(errors.ProtocolError, match=r"^An event is damaged"):
        Event.from_json({"kind": "lost"})
