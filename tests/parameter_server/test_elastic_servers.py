import signal

import pytest
from elastic_members import check, start
from soak import soak

from pace import bound

KILL = signal.SIGKILL


@pytest.mark.parametrize(
    ("size", "victims", "transport"), [(3, [0], "auto"), soak(4, [3, 1, 0], "tcp")]
)
def test_the_others_continue(size, victims, transport):
    ends = [[v, 6 + 7 * i, KILL] for i, v in enumerate(victims)]
    with start(size, 2, ends=ends, transport=transport) as job:
        finished = job.wait()
    left = [rank for rank in range(size) if rank not in victims]
    for rank in left:
        assert finished[rank].returncode == 0, finished[rank].output
        found = finished[rank].result["found"]
        assert (len(found), finished[rank].result["error"]) == (30, None)
        assert check(finished[rank], size)[-1] == left
        # The same numbers on all that are left.
        assert [f[:5] for f in found] == [
            f[:5] for f in finished[left[0]].result["found"]
        ]
    for server in finished[size:]:
        status, stats = server.result
        assert (status, stats["epochs"]) == ("ok", len(victims) + 1), server.output


@pytest.mark.soak
def test_a_lost_worker_joins_again():
    with start(3, 2, ends=[[0, 7, KILL]], turns=60, waits=24, handover=False) as job:
        assert job.wait_one(0).returncode == -KILL
        job.start_again(0)
        newcomer, *others, _, _ = finished = job.succeed()
    assert check(newcomer, 3)[-1] == [1, 2, 0]
    for each in others:
        assert check(each, 3) == [[0, 1, 2], [1, 2], [1, 2, 0]]
    assert [server.result[0] for server in finished[3:]] == ["ok", "ok"]


@pytest.mark.parametrize(("signum", "victim"), [(KILL, 3), soak(signal.SIGSTOP, 2)])
def test_the_other_servers_go_on_without_a_lost_one(signum, victim):
    with start(2, 3, waits=10, until="change", heartbeat=bound(0.5)) as job:
        job.wait_for_lines("WAITS", 2)
        job.kill(victim, signum)
        for rank in (0, 1):
            finished = job.wait_one(rank)
            assert check(finished, 2) == [[0, 1]]
            assert finished.result["error"] is None
            assert len(finished.result["found"]) == 30
            ((change, _),) = finished.result["changes"]
            name = f"server {victim - 2} ({job.addresses[victim]}) was lost at step"
            assert change.startswith(name)
            assert "2 workers continue" in change
        for server in {2, 3, 4} - {victim}:
            status, stats = job.wait_one(server).result
            assert (status, stats["epochs"]) == ("ok", 2)


def test_without_a_server_the_job_ends():
    with start(2, 1, waits=10, until="change") as job:
        job.wait_for_lines("WAITS", 2)
        job.kill(2)
        for rank in (0, 1):
            name, text = job.wait_one(rank).result["error"]
            assert name == "ServerLost"
            assert f"Server 0 ({job.addresses[2]}) was lost" in text
            assert "they hold all weights" in text
