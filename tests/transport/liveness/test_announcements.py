import pytest

from groups import outcomes
from kerasdist.errors import ProtocolError, WorkerLost
from kerasdist.transport.liveness.announcements import Announcements
from waiting import wait_until


class Ranks:
    """The announcements of ranks in one process; what is sent arrives at once."""

    def __init__(self, size=2, seconds=60.0):
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


def begin(job, topic="a"):
    job.ranks[0].begin(topic)


def write(job, topic="a", **facts):
    begin(job, topic)
    job.ranks[0].end(topic, facts)


def move(job, *places):
    job.places = list(places)


def lose(job):
    job.lost = WorkerLost(0, "host0:1", 3, "it was killed")


@pytest.mark.parametrize(
    ("before", "event", "end"),
    [
        ([begin], lambda job: job.ranks[0].end("a", {}), "done"),
        # What the chief has done alone before isn't what is waited for.
        ([write, lambda job: move(job, 1, 1)], write, "done"),
        # Between two collectives the chief was asked to write a file twice.
        ([write, lambda job: job.ranks[1].wait("a")], write, "done"),
        # The chief goes on without it, or has left off in the midst.
        ([], lambda job: move(job, 1, 0), "past"),
        ([begin], lambda job: move(job, 1, 0), "past"),
        ([], lose, "lost"),
        ([], lambda job: setattr(job, "gone", "it has finished"), "gone"),
    ],
)
def test_a_wait_ends_with_what_happens_and_not_before(before, event, end):
    job = Ranks()
    for each in before:
        each(job)
    job.asked = 0

    def work(number):
        if number:
            return job.ranks[1].wait("a").kind
        wait_until(lambda: job.asked > 2, "questions")
        return event(job)

    found = outcomes(2, work)[1]
    assert found is job.lost if end == "lost" else found == end


def test_a_late_rank_finds_what_was_done_and_what_came_after():
    job = Ranks()
    write(job, "a", size=3)
    job.places[0] = 5
    outcome = job.ranks[1].wait("a")
    assert (outcome.kind, outcome.facts) == ("done", {"size": 3})
    write(job, "a", newer=True)
    assert job.ranks[1].wait("a").facts == {"newer": True}


def test_a_failure_is_that_of_this_attempt_only():
    job = Ranks()
    job.ranks[0].begin("a")
    job.ranks[0].end("a", {"error": "OSError"}, failed=True)
    assert job.ranks[1].wait("a").kind == "failed"
    job.places = [1, 1]
    write(job, "a")
    begin(job)
    job.ranks[0].end("a", {"error": "OSError"}, failed=True)
    # The first one here was done; that a later one failed is another matter.
    assert job.ranks[1].wait("a").kind == "done"
    assert job.ranks[1].wait("a").kind == "failed"


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
        (2, {"do": "place", "place": 3}),
        (0, {"do": "place", "place": float("inf")}),
        (0, {"do": "state", "topic": "a", "state": "odd", "facts": {}}),
        (0, {"do": "state", "topic": "a", "state": "done", "facts": {}, "place": 1}),
    ],
)
def test_nonsense_is_refused(sender, value):
    job = Ranks(size=3)
    with pytest.raises(ProtocolError, match=r"^An announcement "):
        job.ranks[1].receive(sender, value)
