import signal

import pytest
from elastic_members import check, start

KILL = signal.SIGKILL

pytestmark = pytest.mark.soak


def test_a_lost_one_joins_again():
    with start(3, ends=[[0, 7, KILL]], turns=60, waits=23, handover=False) as job:
        assert job.wait_one(0).returncode == -KILL
        job.start_again(0)
        newcomer, *others = job.succeed()
    for each in others:
        assert check(each, 3) == [[0, 1, 2], [1, 2], [1, 2, 0]]
    # From the turn after the one in which it was admitted.
    found = newcomer.result["found"]
    assert found[0][0] == others[0].result["admitted"][0] + 1
    assert all(ranks == [1, 2, 0] for *_, ranks, _ in found)
    assert check(newcomer, 3)[-1] == [1, 2, 0]


def test_one_joins_after_one_whose_clock_was_ahead(tmp_path):
    """By an hour: the first process that is started again, which dies, too."""
    folder = str(tmp_path)
    clock = f"""
if cluster.rank == 2:
    starts = len(os.listdir({folder!r}))
    open(os.path.join({folder!r}, str(starts)), "w").close()
    if starts == 1:
        now = time.time
        time.time = lambda: now() + 3600
    else:
        del options["dies"]
"""
    options = {"turns": 600, "full": True, "dies": 1.0, "handover": False}
    with start(3, ends=[[2, 7, KILL]], before=clock, **options) as job:
        for _ in range(2):
            assert job.wait_one(2).returncode == -KILL
            job.start_again(2)
        for each in job.succeed():
            check(each, 3)
            assert each.result["last"] == [0, 1, 2]
