import signal

import pytest
from elastic_members import start
from soak import soak

TERM = signal.SIGTERM


def run(size, ends, **options):
    """Each rank's end; `ends` has ranks and the turns in which they are signalled."""
    ends = [[rank, turn, TERM] for rank, turn in ends]
    with start(size, ends=ends, turns=20, **options) as job:
        return job.wait()


@pytest.mark.parametrize(
    ("size", "ends"), [(4, [[0, 3], [2, 5], [3, 12]]), (2, [[0, 2], [1, 7]])], ids=str
)
def test_the_others_continue_without_a_repetition(size, ends):
    finished = run(size, ends)
    # By rank: the turn after which it isn't there any more.
    until = {rank: -(-turn // 5) * 5 for rank, turn in ends}
    for each in finished:
        assert each.returncode == (-TERM if each.rank in until else 0)
        assert "lost" not in each.output
        assert len(each.result["found"]) == until.get(each.rank, 20)
        for turn, sums, _, _, ranks, _ in each.result["found"]:
            there = [n for n in range(size) if turn <= until.get(n, 20)]
            assert ranks == there
            assert sums == [sum(n + 1 for n in there)]
        if each.rank not in until:
            texts = [text for text, _ in each.result["changes"]]
            assert len(texts) == len(set(until.values()))
            assert all("preempted, and left at step" in text for text in texts)


def test_too_few_stay():
    finished = run(3, [[1, 3]], min_workers=3)
    assert [each.returncode for each in finished] == [0, -TERM, 0]
    assert [each.result["agreed"] for each in finished] == [[True]] * 3
    for each in (finished[0], finished[2]):
        assert (
            "was lost at step 0: it was preempted, and fewer workers than min_workers "
            "are left"
        ) in each.result["error"][1]


def test_one_is_killed_while_another_leaves():
    finished = run(4, [[1, 3]], killed=[0, 5])
    assert [each.returncode for each in finished] == [-signal.SIGKILL, -TERM, 0, 0]
    for each in finished[2:]:
        assert [ranks for *_, ranks, _ in each.result["found"]][5:] == [[2, 3]] * 15


def test_one_that_cant_leave_in_time_is_lost():
    first, second = run(2, [[1, 3]], grace=0.6, busy=60)
    assert (first.returncode, second.returncode) == (0, -TERM)
    assert "this worker received SIGTERM" in second.output
    found = [ranks for *_, ranks, _ in first.result["found"]]
    assert found == 2 * [[0, 1]] + 18 * [[0]]
    text = first.result["changes"][0][0]
    assert "rank 1" in text
    assert "was lost at step" in text


@pytest.mark.parametrize(
    "ends", [soak([[0, 3], [1, 3], [2, 4]]), [[2, 3], [0, 8], [1, 7]]], ids=str
)
def test_servers_end_with_the_last_members(ends):
    """They waited for workers, and then ended with `WorkerLost`."""
    *workers, first, second = run(3, ends, servers=2)
    until = {rank: -(-turn // 5) * 5 for rank, turn in ends}
    for each in workers:
        assert each.returncode == -TERM, each.output
        assert [sums for _, sums, *_ in each.result["found"]] == [
            [sum(n + 1.0 for n in range(3) if turn < until[n])]
            for turn in range(until[each.rank])
        ]
    for each in (first, second):
        assert (each.returncode, each.result[0]) == (0, "ok"), each.output
