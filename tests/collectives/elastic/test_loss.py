"""A group of real processes goes on when members are killed, freeze, or are cut off."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from hosts import Hosts
from workers import Workers

# Each rank adds up its id + 1 over the present members; a rank whose turn it is ends.
SCRIPT = """
import json, os, signal, sys
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.transport.timeouts import Timeouts

options = json.loads(sys.argv[1])
cluster = resolve(None)
me = cluster.rank
job = connect_elastic(
    cluster,
    transport=options.get("transport", "auto"),
    timeouts=Timeouts(startup=30, heartbeat=options.get("heartbeat", 5)),
    min_workers=options.get("min_workers", 1),
)
group = job.communicator
found = []
error = None
try:
    for number in range(options.get("calls", 30)):
        for victim, when, signum in options["ends"]:
            if victim == me and when == number:
                print("GOING", flush=True)
                os.kill(os.getpid(), signum)
        mine = np.full(options.get("size", 1000), me + 1.0, np.float32)
        total = group.all_reduce([mine], lend=True)[0]
        every = [int(part[0]) for part in group.all_gather(np.array([me]))]
        first = int(group.broadcast([np.array([me])])[0][0])
        found.append([float(total[0]), every, first, list(group.ranks), group.rank])
except Exception as failure:
    error = [type(failure).__name__, str(failure)]
print("RESULT", json.dumps([found, error]))
job.close()
"""


def run(size: int, ends: list[Any], **options: Any) -> list[Any]:
    """Runs the script; returns what each rank printed, None if it was killed."""
    text = json.dumps({"ends": ends, **options})
    with Workers(SCRIPT, size, [text], deadline=90.0) as job:
        finished = job.wait()
    killed = {victim for victim, _, signum in ends if signum == signal.SIGKILL}
    assert {each.rank for each in finished if each.returncode} == killed
    return [None if each.returncode else each.result for each in finished]


def check(found: list[Any], size: int) -> list[list[int]]:
    """Each result is that of some members; returns these, each set once, in order."""
    seen = [list(range(size))]
    for total, every, first, ranks, rank in found:
        # The members may have changed between two collectives of one turn.
        assert ranks[rank] in every
        assert total in (sum(m + 1 for m in s) for s in (seen[-1], ranks))
        assert every in (seen[-1], ranks)
        assert first in (seen[-1][0], ranks[0])
        if ranks != seen[-1]:
            assert set(ranks) < set(seen[-1])
            seen.append(ranks)
    return seen


MANY = [(2, [0]), (2, [1]), (3, [0]), (3, [2]), (4, [1, 0]), (4, [3, 2, 1])]
CONTINUE = [
    pytest.param(*case, transport, marks=[] if few else [pytest.mark.soak])
    for case in MANY
    for transport in ("shared_memory", "tcp")
    for few in [(case, transport) in [(MANY[0], "tcp"), (MANY[5], "shared_memory")]]
]


@pytest.mark.parametrize(("size", "victims", "transport"), CONTINUE, ids=str)
def test_the_others_continue(size: int, victims: list[int], transport: str) -> None:
    ends = [[v, 5 + 7 * i, signal.SIGKILL] for i, v in enumerate(victims)]
    results = run(size, ends, transport=transport)
    left = [rank for rank in range(size) if rank not in victims]
    histories = []
    for rank in left:
        found, error = results[rank]
        assert error is None
        assert len(found) == 30
        histories.append(check(found, size))
        assert histories[-1][-1] == left
        # The same numbers on all that are left.
        assert [f[:4] for f in found] == [f[:4] for f in results[left[0]][0]]
    assert all(history == histories[0] for history in histories)


def test_two_are_lost_at_once() -> None:
    ends = [[0, 5, signal.SIGKILL], [2, 5, signal.SIGKILL]]
    results = run(4, ends)
    for rank in (1, 3):
        found, error = results[rank]
        assert error is None
        assert check(found, 4)[-1] == [1, 3]


def test_too_few_are_left() -> None:
    results = run(3, [[1, 5, signal.SIGKILL]], min_workers=3)
    for rank in (0, 2):
        found, (name, text) = results[rank]
        # The lost one may be the only one that has finished its last collective.
        assert len(found) in (4, 5)
        assert name == "WorkerLost"
        assert "Rank 1 " in text
        assert "min_workers" in text


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_frozen_one_is_left_out(victim: int) -> None:
    text = json.dumps({"ends": [[victim, 5, signal.SIGSTOP]], "heartbeat": 1.0})
    with Workers(SCRIPT, 3, [text], deadline=90.0) as job:
        others = [job.wait_one(rank) for rank in range(3) if rank != victim]
        for each in others:
            found, error = each.result
            assert error is None
            assert victim not in check(found, 3)[-1]
        # They have ended, so it can't learn what they decided, and it isn't a majority.
        job.kill(victim, signal.SIGCONT)
        found, (name, _) = job.wait_one(victim).result
        assert len(found) == 5
        assert name == "WorkerLost"


@pytest.mark.skipif(Hosts.available() is not None, reason=str(Hosts.available()))
def test_the_larger_part_of_a_cut_network_continues() -> None:
    text = json.dumps({"ends": [], "heartbeat": 1.0, "calls": 400, "size": 10})
    with (
        Hosts(3) as hosts,
        Workers(
            SCRIPT.replace(
                "found.append",
                "time.sleep(0.01); number == 20 and print('AT 20'); found.append",
            ).replace("import json", "import time, json", 1),
            3,
            [text],
            cluster=hosts.addresses,
            prefix=hosts.prefix,
            deadline=200.0,
        ) as job,
    ):
        job.wait_for_line(0, "AT 20")
        hosts.cut(0)
        for rank in (1, 2):
            found, error = job.wait_one(rank).result
            assert error is None
            assert check(found, 3)[-1] == [1, 2]
        # Alone, it isn't more than half, though it was the chief.
        found, error = job.wait_one(0).result
        assert error is not None
        assert error[0] == "WorkerLost"
        assert len(found) < 400
