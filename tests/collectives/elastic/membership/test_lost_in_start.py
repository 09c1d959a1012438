import signal

import elastic_members
import pytest
from elastic_members import check

from pace import bound

# A worker sends itself signals at moments of its start.
MOMENTS_OF_START = """
from kerasdist.collectives.elastic import connect as connecting, job as elastic_job
from kerasdist.collectives.elastic.communicator import ElasticCommunicator
from kerasdist.transport.rendezvous import startup

again = os.path.exists(f"{options['folder']}/{me}")
open(f"{options['folder']}/{me}", "w").close()

def happen(moment):
    if not again and [me, moment] in options["at"]:
        os.kill(os.getpid(), options.get("signal", signal.SIGKILL))

def report(owner, name, before=None, after=None):
    original = getattr(owner, name)
    @functools.wraps(original)
    def call(*args, **kwargs):
        happen(before)
        result = original(*args, **kwargs)
        happen(after)
        return result
    setattr(owner, name, call)

report(connecting, "discover_members", "listening", "asked")
report(startup.Session, "_gather", "gathering", "gathered")
report(startup.Session, "_report", "reporting", "reported")
report(startup.Session, "dial", "dialing", "dialed")
report(startup.Session, "answer", "answering", "answered")
report(elastic_job, "catch_up", "connected")
report(ElasticCommunicator, "begin", None, "begun")
happen("script")
time.sleep(options.get("late", {}).get(str(me), 0.0) if not again else 0.0)
"""


def start(folder, size, *at, **options):
    options = {"turns": 10, "folder": str(folder), "at": at, **options}
    return elastic_members.start(
        size, before=MOMENTS_OF_START, handover=False, **options
    )


# Before it has been in contact with others, a worker can't be told from one that hasn't
# started yet, except by the launcher: `tests/cli/run/test_outcome.py`.
FEW = [("asked", 0), ("connected", 1)]
FURTHER = [
    *[("asked", 2), ("gathered", 0), ("reporting", 1), ("reported", 2), ("dialing", 1)],
    *[("dialing", 2), ("dialed", 2), ("answering", 0), ("answering", 1)],
    *[("answered", 0), ("connected", 0), ("begun", 0), ("begun", 2)],
]


@pytest.mark.parametrize(
    ("moment", "victim"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.soak) for case in FURTHER)],
)
def test_the_others_start_without_a_killed_one(tmp_path, moment, victim):
    # At its first moments, the others have been in contact with it only if it is late.
    late = {str(victim): bound(0.5)} if moment in ("asked", "reporting") else {}
    with start(tmp_path, 3, (victim, moment), late=late) as job:
        assert job.wait_one(victim).returncode == -signal.SIGKILL
        others = [rank for rank in range(3) if rank != victim]
        found = [job.wait_one(rank) for rank in others]
    for each in found:
        assert check(each, others) == [others]
        assert len(each.result["found"]) == 10
        assert not each.result["joined"]
    text = f"rank {victim} (127.0.0.1:"
    assert text in found[0].output
    assert "2 workers start" in found[0].output or "2 workers cont" in found[0].output


@pytest.mark.soak
def test_one_that_is_started_again_joins(tmp_path):
    """The first process of its task was in contact with the others."""
    with start(
        tmp_path,
        3,
        (1, "reporting"),
        late={"1": bound(0.5), "2": bound(1.5)},
        full=True,
    ) as job:
        job.wait_one(1)
        job.start_again(1)
        finished = job.succeed()
    for each in finished:
        check(each, [0, 2])
        assert each.result["joined"] == (each.rank == 1)
        assert each.result["last"] == [0, 2, 1]


@pytest.mark.soak
def test_after_the_time_out_most_of_the_workers_start(tmp_path):
    """One that comes even later joins them."""
    with start(tmp_path, 3, (2, "script"), startup=bound(1.5), full=True) as job:
        job.wait_one(2)
        job.wait_for_line(0, "CONNECTED")
        job.start_again(2)
        for each in job.succeed():
            check(each, [0, 1])
            assert each.result["joined"] == (each.rank == 2)
            assert each.result["last"] == [0, 1, 2]


def test_half_of_the_workers_dont_start_not_even_with_the_chief(tmp_path):
    with start(tmp_path, 2, (1, "script"), startup=2) as job:
        name, text, missing = job.wait_one(0).result
    assert name == "StartupError"
    assert text.startswith("1 of 2 workers didn't connect within 2 s:\n  rank 1 (127")
    assert "connection refused: nothing listens there" in text
    assert missing == [1]


def test_a_job_grows(tmp_path):
    """Tasks beyond those of the start join whenever they are started."""
    late = {"0": bound(0.2), "1": bound(0.2), "3": bound(1.0)}
    finished = start(tmp_path, 4, start_workers=2, full=True, late=late).run()
    for each in finished:
        check(each, 3)
        assert each.result["joined"] == (each.rank >= 2)
        assert sorted(each.result["last"]) == [0, 1, 2, 3]
    assert check(finished[0], [0, 1])[0] == [0, 1]
