import signal

import pytest
from elastic_members import check, start
from soak import soak

from hosts import Hosts
from pace import bound

KILL = signal.SIGKILL


@pytest.mark.parametrize(
    ("size", "ends", "transport"),
    [
        (2, [[0, 6, KILL]], "tcp"),
        soak(4, [[3, 6, KILL], [2, 13, KILL], [1, 20, KILL]], "shared_memory"),
        (4, [[0, 6, KILL], [2, 6, KILL]], "auto"),
    ],
    ids=["chief", "one after the other", "at once"],
)
def test_the_others_continue(size, ends, transport):
    with start(size, ends=ends, transport=transport) as job:
        finished = job.wait()
    victims = {victim for victim, _, _ in ends}
    assert {each.rank for each in finished if each.returncode} == victims
    survivors = [each for each in finished if each.rank not in victims]
    history = check(survivors[0], size)
    assert history[-1] == [each.rank for each in survivors]
    for each in survivors:
        found = each.result["found"]
        assert (len(found), each.result["error"]) == (30, None)
        assert check(each, size) == history
        # The same numbers on all that are left.
        assert [f[:5] for f in found] == [f[:5] for f in survivors[0].result["found"]]


def test_too_few_are_left():
    with start(3, ends=[[1, 6, KILL]], min_workers=3) as job:
        finished = job.wait()
    for rank in (0, 2):
        name, text = finished[rank].result["error"]
        # The lost one may be the only one that has finished its last collective.
        assert len(finished[rank].result["found"]) in (4, 5)
        assert name == "WorkerLost"
        assert "Rank 1 " in text
        assert "min_workers" in text


def test_a_frozen_one_is_left_out():
    with start(3, ends=[[0, 6, signal.SIGSTOP]], heartbeat=bound(0.5)) as job:
        for each in (job.wait_one(1), job.wait_one(2)):
            assert each.result["error"] is None
            assert check(each, 3)[-1] == [1, 2]
        # They have ended, so it can't learn what they decided, and it isn't a majority.
        job.kill(0, signal.SIGCONT)
        result = job.wait_one(0).result
        assert len(result["found"]) == 5
        assert result["error"][0] == "WorkerLost"


@pytest.mark.skipif(Hosts.available() is not None, reason=str(Hosts.available()))
def test_the_larger_part_of_a_cut_network_continues():
    with Hosts(3) as hosts:
        places = {"cluster": hosts.addresses, "prefix": hosts.prefix}
        options = {"waits": 20, "until": "change", "heartbeat": bound(0.5)}
        with start(3, handover=False, more=places, **options) as job:
            job.wait_for_line(0, "WAITS")
            hosts.cut(0)
            for rank in (1, 2):
                each = job.wait_one(rank)
                assert each.result["error"] is None
                assert check(each, 3)[-1] == [1, 2]
            # Alone, it isn't more than half, though it was the chief.
            result = job.wait_one(0).result
            assert result["error"][0] == "WorkerLost"
            assert len(result["found"]) == 19


# When the others have agreed, rank 1 ends, too, before it has a connection of the new
# epoch.
INSTALL = """
from kerasdist.collectives.elastic import job as elastic_job
from kerasdist.collectives.elastic.job import ElasticJob
elastic_job.CONNECT_SECONDS = 500.0
install = ElasticJob.install

@functools.wraps(install)
def installs(job, decision):
    if me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    install(job, decision)

ElasticJob.install = installs
"""


def test_one_that_is_lost_before_it_connects():
    """Nothing but its address shows that; else the others wait for it for so long."""
    with start(3, 1, ends=[[2, 6, KILL]], before=INSTALL, handover=False) as job:
        for rank in (1, 2):
            assert job.wait_one(rank).returncode == -KILL
        survivor = job.wait_one(0)
    assert check(survivor, 3)[-1] == [0]
    ((text, seconds),) = survivor.result["changes"]
    assert "rank 1 (" in text
    assert "rank 2 (" in text
    assert seconds < 300.0
