"""Workers that are lost, or late, before all of an elastic job are connected."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from workers import Finished, Workers

# A worker sends itself signals at moments of its start. Then the members take turns, in
# which they add up their ranks at the start + 1, and admit those that wait.
SCRIPT = """
import functools, json, os, signal, sys, threading, time
import numpy as np
from kerasdist import errors
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic import connect, job as elastic_job
from kerasdist.collectives.elastic.communicator import ElasticCommunicator
from kerasdist.transport.rendezvous import session
from kerasdist.transport.timeouts import Timeouts

options = json.loads(sys.argv[1])
cluster = resolve(None)
me = cluster.rank
again = os.path.exists(f"{sys.argv[2]}/{me}")
open(f"{sys.argv[2]}/{me}", "w").close()

def happen(moment):
    if not again and [me, moment] in options["at"]:
        print("GOING", flush=True)
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

report(connect, "survey", "listening", "asked")
report(session, "gather", "gathering", "gathered")
report(session, "report", "reporting", "reported")
report(session.Session, "dial", "dialing", "dialed")
report(session.Session, "answer", "answering", "answered")
report(elastic_job, "catch_up", "connected")
report(ElasticCommunicator, "begin", None, "begun")
happen("script")
time.sleep(options.get("late", {}).get(str(me), 0.0) if not again else 0.0)
print("STARTS", flush=True)
try:
    job = connect.connect_elastic(
        cluster,
        timeouts=Timeouts(
            startup=options.get("startup", 60), heartbeat=options.get("heartbeat", 5)
        ),
        settings={"arguments": options.get("arguments", {}).get(str(me))},
        min_workers=options.get("min_workers", 1),
        start_workers=options.get("start_workers"),
    )
except errors.KerasDistError as error:
    missing = getattr(error, "missing", None)
    print("RESULT", json.dumps([type(error).__name__, str(error), missing]))
    sys.exit()
group = job.communicator
print("CONNECTED", group.joining, flush=True)
joined = group.joining
turn = 0
if joined:
    group.join(60.0)
    turn = int(group.broadcast([np.array([0])])[0][0])
turns = []
while turn < options.get("turns", 10) or (
    group.size < options.get("until", 1) and turn < 20000
):
    turn += 1
    total = group.all_reduce([np.full(100, me + 1.0, np.float32)])[0]
    turns.append([turn, float(total[0]), list(group.ranks)])
    if turn % 5 == 0 and group.ask()[0] and group.admit():
        group.broadcast([np.array([turn])])
    time.sleep(0.002)
print("RESULT", json.dumps([turns, joined, list(group.ranks)]))
job.close()
left = [each.name for each in threading.enumerate() if "kerasdist" in each.name]
assert not [each for each in left if "look-up" not in each], left
"""
pytestmark = pytest.mark.timeout(120)


def start(
    folder: Any, size: int, *at: tuple[int, str], handover: bool = False, **options: Any
) -> Workers:
    """Return workers, some of which send themselves a signal at a moment."""
    args = [json.dumps({"at": at, **options}), str(folder)]
    return Workers(SCRIPT, size, args, deadline=90.0, handover=handover)


def check(result: Finished) -> tuple[list[list[int]], bool]:
    """Check that each sum is that of its turn's members.

    Returns:
        The members of each turn, and whether the worker has joined later.
    """
    assert result.returncode == 0, result.output
    turns, joined, last = result.result
    for number, (turn, total, ranks) in enumerate(turns):
        assert turn == turns[0][0] + number
        assert total == sum(rank + 1 for rank in ranks)
    members = [ranks for _, _, ranks in turns]
    # It may have changed after the last turn.
    return members if members[-1:] == [last] else [*members, last], joined


# Before it has been in contact with others, a worker can't be told from one that hasn't
# started yet, except by the launcher: `tests/cli/run/elastic/test_start_and_growth.py`.
MOMENTS = {
    "asked": (0, 2),
    "gathered": (0,),
    "reporting": (1,),
    "reported": (2,),
    "dialing": (1, 2),
    "dialed": (2,),
    "answering": (0, 1),
    "answered": (0,),
    "connected": (0, 1),
    "begun": (0, 2),
}
CASES = [(moment, victim) for moment, ranks in MOMENTS.items() for victim in ranks]
FEW = [("asked", 0), ("connected", 1)]


@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        pytest.param(*case, marks=[] if case in FEW else [pytest.mark.soak])
        for case in CASES
    ],
)
def test_the_others_start_without_a_killed_one(
    tmp_path: Any, moment: str, victim: int
) -> None:
    # At its first moments, the others have been in contact with it only if it is late.
    late = {str(victim): 1.0} if moment in ("asked", "reporting") else {}
    with start(tmp_path, 3, (victim, moment), late=late) as job:
        assert job.wait_one(victim).returncode == -signal.SIGKILL
        others = [rank for rank in range(3) if rank != victim]
        found = [job.wait_one(rank) for rank in others]
    for each in found:
        members, joined = check(each)
        assert members == [others] * 10
        assert not joined
    text = f"rank {victim} (127.0.0.1:"
    assert text in found[0].output
    assert "2 workers start" in found[0].output or "2 workers continue" in (
        found[0].output
    )


@pytest.mark.soak
def test_the_others_start_without_a_frozen_one(tmp_path: Any) -> None:
    options = {"signal": signal.SIGSTOP, "heartbeat": 1.0}
    with start(tmp_path, 3, (0, "gathered"), **options) as job:
        for rank in (1, 2):
            assert check(job.wait_one(rank))[0] == [[1, 2]] * 10


def test_one_that_is_started_again_joins(tmp_path: Any) -> None:
    """The first process of its task was in contact with the others."""
    with start(
        tmp_path, 3, (1, "reporting"), late={"1": 1.0, "2": 3.0}, until=3
    ) as job:
        job.wait_one(1)
        job.start_again(1)
        finished = job.succeed()
    for each in finished:
        members, joined = check(each)
        assert joined == (each.rank == 1)
        assert members[-1] == [0, 2, 1]


def test_after_the_time_out_most_of_the_workers_start(tmp_path: Any) -> None:
    """One that comes even later joins them."""
    with start(tmp_path, 3, (2, "script"), startup=3, until=3) as job:
        job.wait_one(2)
        job.wait_for_line(0, "CONNECTED")
        job.start_again(2)
        for each in job.succeed():
            members, joined = check(each)
            assert joined == (each.rank == 2)
            assert members[-1] == [0, 1, 2]


def test_half_of_the_workers_dont_start_not_even_with_the_chief(tmp_path: Any) -> None:
    with start(tmp_path, 2, (1, "script"), startup=2) as job:
        name, text, missing = job.wait_one(0).result
    assert name == "StartupError"
    assert text.startswith("1 of 2 workers didn't connect within 2 s:\n  rank 1 (127")
    assert "connection refused: nothing listens there" in text
    assert list(missing) == ["1"]


def test_fewer_than_min_workers_dont_start(tmp_path: Any) -> None:
    with start(tmp_path, 3, (1, "reporting"), min_workers=3, late={"1": 1.0}) as job:
        job.wait_one(1)
        for rank in (0, 2):
            name, text, missing = job.wait_one(rank).result
            # The one of the two that reports it first has perhaps ended by then.
            assert (name, set(missing) - {"0", "2"}) == ("StartupError", {"1"})
            assert "fewer workers than min_workers are left" in text


def test_other_arguments_end_the_start_of_all(tmp_path: Any) -> None:
    with start(tmp_path, 3, arguments={"2": 7}) as job:
        for each in job.wait():
            name, text, missing = each.result
            assert (name, list(missing)) == ("StartupError", ["2"])
            assert "Workers were started with different arguments" in text


def test_a_job_grows(tmp_path: Any) -> None:
    """Tasks beyond those of the start join whenever they are started."""
    late = {"0": 0.5, "1": 0.5, "3": 2.0}
    with start(tmp_path, 4, start_workers=2, until=4, late=late) as job:
        finished = job.succeed()
    for each in finished:
        members, joined = check(each)
        assert joined == (each.rank >= 2)
        assert sorted(members[-1]) == [0, 1, 2, 3]
    assert check(finished[0])[0][0] == [0, 1]


@pytest.mark.soak
def test_one_that_finds_no_job_to_join_ends(tmp_path: Any) -> None:
    with start(tmp_path, 2, (0, "script"), start_workers=1, startup=1) as job:
        name, text, missing = job.wait_one(1).result
    assert (name, list(missing)) == ("StartupError", ["1"])
    assert "no answer of a running worker to rank 1 (127.0.0.1:" in text
