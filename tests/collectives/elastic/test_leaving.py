"""Members leave a group on SIGTERM: the others continue, and repeat nothing."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from workers import Finished, Workers

# The members add up their ranks at the start + 1 in each turn. Every fifth turn those
# leave that were sent a signal.
SCRIPT = """
import json, os, signal, sys, time
import numpy as np
from kerasdist import errors
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.collectives.elastic.termination import end_process
from kerasdist.transport.timeouts import Timeouts

options = json.loads(sys.argv[1])
cluster = resolve(None)
me = cluster.rank
job = connect_elastic(
    cluster,
    timeouts=Timeouts(startup=30),
    min_workers=options.get("min_workers", 1),
    grace=options.get("grace", 30.0),
)
group, leaving = job.communicator, job.leaving
found, ended = [], []

def end(left=False):
    texts = [change.text for change in group.changes]
    print("RESULT", json.dumps([found, texts, ended]))
    job.close()
    if left:
        end_process()
    sys.exit()

for turn in range(1, options["turns"] + 1):
    if [me, turn] in options["ends"]:
        os.kill(os.getpid(), signal.SIGTERM)
        while not leaving.wanted:
            time.sleep(0.001)
        if "grace" in options:
            time.sleep(60)  # in code of the script's own
    total = group.all_reduce([np.full(100, me + 1.0, np.float32)])[0]
    found.append([float(total[0]), list(group.ranks)])
    if turn % 5 == 0 and group.ask()[1]:
        leaving.agree()
        ended.append(leaving.ends_job)
        if [me, turn] == options.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if leaving.change():
                end(left=True)
        except errors.WorkerLost as error:
            print(error, flush=True)
            end()
end()
"""


def run(size: int, ends: list[list[int]], **options: Any) -> list[Finished]:
    text = json.dumps({"ends": ends, "turns": 20, **options})
    with Workers(SCRIPT, size, [text], deadline=90.0) as job:
        finished = job.wait()
        assert not any("lost" in each.output for each in finished) or options
    return finished


@pytest.mark.parametrize(
    ("size", "ends", "left"),
    [
        (3, [[2, 3]], [2]),
        (3, [[0, 4]], [0]),
        (4, [[0, 3], [2, 5], [3, 12]], [0, 2, 3]),
        (2, [[0, 2], [1, 7]], [0, 1]),
    ],
    ids=str,
)
def test_the_others_continue_without_a_repetition(
    size: int, ends: list[list[int]], left: list[int]
) -> None:
    finished = run(size, ends)
    # By rank: the turn after which it isn't there any more.
    until = {rank: -(-turn // 5) * 5 for rank, turn in ends}
    for each in finished:
        assert each.returncode == (-signal.SIGTERM if each.rank in left else 0)
        found, texts, _ = each.result
        assert len(found) == until.get(each.rank, 20)
        for turn, (total, ranks) in enumerate(found, 1):
            there = [n for n in range(size) if turn <= until.get(n, 20)]
            assert ranks == there
            assert total == sum(n + 1 for n in there)
        if each.rank not in left:
            assert len(texts) == len(set(until.values()))
            assert all("preempted, and left at step" in text for text in texts)


def test_all_leave_at_once() -> None:
    finished = run(3, [[0, 3], [1, 4], [2, 5]])
    for each in finished:
        assert each.returncode == -signal.SIGTERM
        found, texts, ended = each.result
        assert (len(found), texts, ended) == (5, [], [True])


def test_too_few_stay() -> None:
    finished = run(3, [[1, 3]], min_workers=3)
    assert [each.returncode for each in finished] == [0, -signal.SIGTERM, 0]
    for each in finished:
        assert each.result[2] == [True]
    for each in (finished[0], finished[2]):
        assert (
            "was lost at step 0: it was preempted, and fewer workers than min_workers "
            "are left"
        ) in each.output


def test_one_is_killed_while_another_leaves() -> None:
    finished = run(4, [[1, 3]], killed=[0, 5])
    codes = [each.returncode for each in finished]
    assert codes == [-signal.SIGKILL, -signal.SIGTERM, 0, 0]
    for each in finished[2:]:
        assert [ranks for _, ranks in each.result[0]][5:] == [[2, 3]] * 15


def test_one_that_cant_leave_in_time_is_lost() -> None:
    finished = run(2, [[1, 3]], grace=0.6)
    assert [each.returncode for each in finished] == [0, -signal.SIGTERM]
    assert "this worker received SIGTERM" in finished[1].output
    found, texts, _ = finished[0].result
    assert [ranks for _, ranks in found] == 2 * [[0, 1]] + 18 * [[0]]
    assert "rank 1" in texts[0]
    assert "was lost at step" in texts[0]
