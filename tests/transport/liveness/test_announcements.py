"""Announcements: what the chief has done, known to others without a collective."""

from __future__ import annotations

import threading

import pytest

from kerasdist.errors import ProtocolError, WorkerLost
from kerasdist.transport.liveness.announcements import Announcements
from waiting import wait_until

pytestmark = pytest.mark.timeout(30)


class Ranks:
    """The announcements of ranks in one process; what is sent arrives at once."""

    def __init__(self, size=2, seconds=20.0):
        self.places = [0] * size
        self.gone = None
        self.asked = 0
        self.lost = None
        self.ranks = [
            Announcements(
                rank,
                lambda value, to, rank=rank: self.send(rank, value, to),
                lambda rank=rank: self.places[rank],
                self.look,
                seconds,
            )
            for rank in range(size)
        ]

    def look(self):
        if self.lost is not None:
            raise self.lost
        return self.gone

    def send(self, sender, value, to):
        self.asked += value["do"] == "ask"
        for rank, each in enumerate(self.ranks):
            if rank != sender and to in (None, rank):
                each.receive(sender, value)


class Waiting:
    """A wait of rank 1 in a thread of its own."""

    def __init__(self, job, topic):
        self.found = []
        self.thread = threading.Thread(target=self.run, args=(job, topic))
        self.thread.start()

    def run(self, job, topic):
        try:
            self.found.append(job.ranks[1].wait(topic))
        except Exception as error:
            self.found.append(error)

    def result(self):
        self.thread.join(20)
        return self.found[0]


def write(job, topic, **facts):
    job.ranks[0].begin(topic)
    job.ranks[0].end(topic, facts)


def test_what_is_done_already_is_not_waited_for():
    job = Ranks()
    write(job, "a", size=3)
    outcome = job.ranks[1].wait("a")
    assert (outcome.kind, outcome.facts) == ("done", {"size": 3})


def test_a_wait_ends_when_it_is_done():
    job = Ranks()
    job.ranks[0].begin("a")
    waiting = Waiting(job, "a")
    wait_until(lambda: job.asked > 2, "questions", 20)
    assert waiting.found == []
    job.ranks[0].end("a", {})
    assert waiting.result().kind == "done"


def test_the_second_of_one_place_is_not_the_first():
    """Between two collectives the chief was asked to write a file twice."""
    job = Ranks()
    write(job, "a")
    assert job.ranks[1].wait("a").kind == "done"
    waiting = Waiting(job, "a")
    wait_until(lambda: job.asked > 2, "questions", 20)
    assert waiting.found == []
    write(job, "a")
    assert waiting.result().kind == "done"


def test_what_the_chief_has_done_alone_before_is_not_what_is_waited_for():
    job = Ranks()
    write(job, "a")
    job.places = [1, 1]
    waiting = Waiting(job, "a")
    wait_until(lambda: job.asked > 2, "questions", 20)
    assert waiting.found == []
    write(job, "a")
    assert waiting.result().kind == "done"


def test_the_chief_goes_on_without_it():
    job = Ranks()
    waiting = Waiting(job, "a")
    wait_until(lambda: job.asked > 2, "questions", 20)
    assert waiting.found == []
    job.places[0] = 1
    assert waiting.result().kind == "past"


def test_a_chief_that_left_off_in_the_midst_and_went_on_is_past():
    job = Ranks()
    job.ranks[0].begin("a")
    job.places[0] = 1
    assert job.ranks[1].wait("a").kind == "past"


def test_a_late_rank_finds_what_was_done_and_what_came_after():
    job = Ranks()
    write(job, "a")
    job.places[0] = 5
    assert job.ranks[1].wait("a").kind == "done"
    write(job, "a", newer=True)
    assert job.ranks[1].wait("a").facts == {"newer": True}


def test_a_failure_is_that_of_this_attempt_only():
    job = Ranks()
    job.ranks[0].begin("a")
    job.ranks[0].end("a", {"error": "OSError"}, failed=True)
    assert job.ranks[1].wait("a").kind == "failed"
    job.places = [1, 1]
    write(job, "a")
    job.ranks[0].begin("a")
    job.ranks[0].end("a", {"error": "OSError"}, failed=True)
    # The first one here was done; that a later one failed is another matter.
    assert job.ranks[1].wait("a").kind == "done"
    assert job.ranks[1].wait("a").kind == "failed"


def test_a_chief_that_has_left_can_do_nothing_more():
    job = Ranks()
    job.gone = "it has finished"
    outcome = job.ranks[1].wait("a")
    assert (outcome.kind, outcome.reason) == ("gone", "it has finished")
    write(job, "b")
    assert job.ranks[1].wait("b").kind == "done"


def test_a_lost_chief_is_raised():
    job = Ranks()
    waiting = Waiting(job, "a")
    wait_until(lambda: job.asked > 2, "questions", 20)
    job.lost = WorkerLost(0, "host0:1", 3, "it was killed")
    assert waiting.result() is job.lost


def test_waits_end_at_a_deadline():
    job = Ranks(seconds=0.05)
    assert job.ranks[1].wait("a").kind == "late"
    job.ranks[0].begin("b")
    assert job.ranks[1].wait("b").kind == "busy"


def test_only_so_many_topics_are_remembered():
    job = Ranks(seconds=0.05)
    for number in range(1200):
        write(job, str(number))
    kinds = [job.ranks[1].wait(str(number)).kind for number in (199, 200, 1199)]
    assert kinds == ["late", "done", "done"]


@pytest.mark.parametrize(
    ("sender", "value"),
    [
        (0, {}),
        (0, {"do": "ask"}),
        (2, {"do": "place", "place": 3}),
        (0, {"do": "place", "place": -1}),
        (0, {"do": "place", "place": float("inf")}),
        (0, {"do": "state", "topic": 3, "state": "done", "facts": {}}),
        (0, {"do": "state", "topic": "a", "state": "odd", "facts": {}}),
        (0, {"do": "state", "topic": "a", "state": "done", "facts": []}),
        (0, {"do": "state", "topic": "a", "state": "done", "facts": {}, "place": 1}),
    ],
)
def test_nonsense_is_refused(sender, value):
    job = Ranks(size=3)
    with pytest.raises(ProtocolError, match=r"^An announcement "):
        job.ranks[1].receive(sender, value)
