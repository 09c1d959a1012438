"""Processes that are started again join the group while it works."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from workers import Finished, Workers

# The members count turns, and add up their ranks at the start + 1. Every fifth turn
# they admit those that wait, and the first one tells these the turn.
SCRIPT = """
import json, os, signal, sys, threading, time
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.transport.timeouts import Timeouts

options = json.loads(sys.argv[1])
if "first" in options and os.environ["TF_CONFIG"].find('"index": 2') > 0:
    # The first process that is started again has a clock that is an hour ahead.
    if os.path.exists(options["first"] + "-up"):
        try:
            os.close(os.open(options["first"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            options["dies"] = -1
        else:
            now = time.time
            time.time = lambda: now() + 3600
    else:
        os.close(os.open(options["first"] + "-up", os.O_CREAT))
cluster = resolve(None)
me = cluster.rank
job = connect_elastic(cluster, timeouts=Timeouts(startup=30))
group = job.communicator
again = group.joining
turn = 0
if again:
    print("JOINS", flush=True)
    if options.get("dies") == me:
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(options["after"], kill).start()
    group.join(60.0)
    turn = int(group.broadcast([np.array([0])])[0][0])
found = []
seen = []
most = options["turns"]
full = options.get("full", False)
while turn < most or (full and group.size < cluster.size and turn < 5000):
    turn += 1
    if not again and [me, turn] in options["ends"]:
        print("GOING", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    total = group.all_reduce([np.full(100, me + 1.0, np.float32)])[0]
    found.append([turn, float(total[0]), list(group.ranks)])
    if turn % 5 == 0 and group.ask()[0] and group.admit():
        group.broadcast([np.array([turn])])
        seen.append(turn)
    if turn == options.get("waits", 0) and not again:
        # For those that are started again, at most 20 s.
        for _ in range(2000):
            flag = group.all_reduce([np.array([group.membership.waiting])], "max")[0]
            if flag[0]:
                break
            time.sleep(0.01)
    time.sleep(0.002)
print("RESULT", json.dumps([found, seen, list(group.ranks)]))
job.close()
"""


def start(size: int, **options: Any) -> Workers:
    text = json.dumps(options)
    return Workers(SCRIPT, size, [text], deadline=90.0, handover=False)


def check(result: Finished) -> tuple[list[list[int]], list[int]]:
    """Each sum is that of the turn's members; returns these, and the last ones."""
    found, _, last = result.result
    turns = [turn for turn, _, _ in found]
    # None if it was admitted in the last turn.
    first = turns[0] if turns else 0
    assert turns == list(range(first, first + len(turns)))
    for _, total, ranks in found:
        assert total == sum(rank + 1 for rank in ranks)
    return [ranks for _, _, ranks in found], last


@pytest.mark.parametrize(
    ("size", "victim"), [pytest.param(2, 1, marks=pytest.mark.soak), (3, 0)]
)
def test_a_lost_one_joins_again(size: int, victim: int) -> None:
    with start(size, ends=[[victim, 7]], turns=60, waits=23) as job:
        assert job.wait_one(victim).returncode == -signal.SIGKILL
        job.start_again(victim)
        finished = job.succeed()
    expected = [rank for rank in range(size) if rank != victim] + [victim]
    others = [each for each in finished if each.rank != victim]
    for each in others:
        members, last = check(each)
        assert members[0] == list(range(size))
        assert members[15] == expected[:-1]
        assert members[-1] == last == expected
    members, last = check(finished[victim])
    # From the turn after the one in which it was admitted.
    assert finished[victim].result[0][0][0] == others[0].result[1][0] + 1
    assert all(each == expected for each in members)


def test_several_join_one_that_is_alone() -> None:
    with start(3, ends=[[0, 7], [2, 9]], turns=60, full=True) as job:
        for victim in (0, 2):
            job.wait_one(victim)
            job.start_again(victim)
        finished = job.succeed()
    for each in finished:
        _, last = check(each)
        assert sorted(last) == [0, 1, 2]
        assert last[0] == 1


def test_one_joins_after_one_whose_clock_was_ahead(tmp_path: Path) -> None:
    first = str(tmp_path / "first")
    options = {"dies": 2, "after": 1.0, "first": first, "full": True}
    with start(3, ends=[[2, 7]], turns=600, **options) as job:
        for _ in range(2):
            assert job.wait_one(2).returncode == -signal.SIGKILL
            job.start_again(2)
        finished = job.succeed()
    for each in finished:
        assert check(each)[1] == [0, 1, 2]
