import contextlib
import time

import numpy as np
import pytest
from soak import soak

import groups
from groups import addresses_of, cluster_on, outcomes
from hosts import Hosts
from kerasdist import errors
from kerasdist.collectives import connect
from kerasdist.transport.deadline import Timeouts
from kerasdist.transport.rendezvous.startup import Session
from pace import bound
from workers import Workers


@pytest.fixture(autouse=True)
def _nothing_is_left():
    with groups.nothing_stays_open():
        yield


def use_and_close(jobs):
    def work(rank):
        job = jobs[rank]
        (total,) = job.communicator.all_reduce([np.float64(rank)])
        job.close()
        job.close()
        return total

    assert groups.in_threads(len(jobs), work) == [sum(range(len(jobs)))] * len(jobs)


@pytest.mark.parametrize(
    ("asked", "hosts", "chosen"),
    [
        *(("auto", "aa", "shared_memory"), ("auto", "ab", "tcp")),
        *(("auto", hosts, "hierarchical") for hosts in ("aab", "abab")),
        ("tcp", "aaa", "tcp"),
        ("shared_memory", "aa", "shared_memory"),
        ("hierarchical", "abc", "hierarchical"),
    ],
)
def test_the_transport_is_chosen_by_where_the_workers_are(asked, hosts, chosen):
    jobs = groups.connect_all(len(hosts), transport=asked, hosts=hosts, replicas=2)
    assert [job.transport for job in jobs] == [chosen] * len(hosts)
    assert [job.replicas for job in jobs] == [(2,) * len(hosts)] * len(hosts)
    assert [job.communicator.rank for job in jobs] == list(range(len(hosts)))
    assert [job.failure for job in jobs] == [None] * len(hosts)
    use_and_close(jobs)


def test_shared_memory_over_several_hosts_is_an_error_on_all():
    addresses = addresses_of(3)
    results = outcomes(
        3,
        lambda r: connect(
            cluster_on(addresses, r), transport="shared_memory", host="aab"[r]
        ),
    )
    for rank, error in enumerate(results):
        assert type(error) is errors.ClusterError
        mine = [2] if rank == 2 else [0, 1]
        assert str(error).startswith("Shared memory connects only the workers of one ")
        assert f"3 workers on 2 hosts (this host has ranks {mine})" in str(error)


@pytest.mark.parametrize(
    ("transport", "lost"), [("tcp", 0), ("shared_memory", 2), ("hierarchical", 0)]
)
def test_a_rank_that_dies_between_its_start_and_its_connections(transport, lost):
    """The others don't wait out the start's time-out: they are told."""
    addresses = addresses_of(3)
    timeouts = Timeouts(startup=60, collective=20, heartbeat=10)
    hosts = "abc" if transport == "tcp" else "aaa"

    def work(rank):
        cluster = cluster_on(addresses, rank)
        if rank == lost:
            settings = {"transport": transport}
            session = Session(
                cluster, settings=settings, timeouts=timeouts, host=hosts[rank]
            )
            session.close()
        else:
            job = connect(
                cluster, transport=transport, timeouts=timeouts, host=hosts[rank]
            )
            # It may be lost only after this rank has connected.
            with contextlib.closing(job):
                job.communicator.barrier()

    started = time.monotonic()
    results = outcomes(3, work)
    assert time.monotonic() - started < bound(15)
    assert results.pop(lost) is None
    for error in results:
        assert type(error) is errors.WorkerLost
        assert (error.rank, error.step) == (lost, 0)


OVER_HOSTS = """
    import json, os
    import numpy as np
    from kerasdist import errors
    from kerasdist.cluster import resolve
    from kerasdist.collectives import connect
    from kerasdist.transport.deadline import Timeouts

    cluster = resolve()
    heartbeat = float(os.environ["HEARTBEAT"])
    job = connect(
        cluster, timeouts=Timeouts(startup=60, collective=60, heartbeat=heartbeat))
    communicator = job.communicator
    size, rank = cluster.size, cluster.rank
    large = np.arange(300_000, dtype=np.float64)
    total, = communicator.all_reduce([large + rank])
    assert (total == large * size + sum(range(size))).all()
    assert [p.tolist() for p in communicator.all_gather(np.full(rank, rank))] == [
        [r] * r for r in range(size)]
    for root in range(size):
        assert communicator.broadcast([large + rank], root)[0][0] == root
    print("RESULT", json.dumps(job.transport), flush=True)
    try:
        for step in range(1, 1_000_000):
            communicator.step = step
            communicator.all_reduce([np.full(20_000, rank)])
            if step == 5:
                print("LOOPING", flush=True)
    except errors.WorkerLost as error:
        seen = json.dumps([error.rank, error.host, error.reason])
        # One write: a log line of another thread mustn't stand in its midst.
        print(f"RESULT {seen}" + chr(10), end="", flush=True)
        job.close(error)
"""


def lose(hosts, layout, lost, heartbeat=20.0):
    """How a job on hosts, each rank's as a digit, ends after `lost(job)`."""
    places = [int(place) for place in layout]
    with Workers(
        OVER_HOSTS,
        len(places),
        cluster=[hosts.address(place) for place in places],
        prefix=lambda rank: hosts.prefix(places[rank]),
        env={"HEARTBEAT": str(heartbeat)},
    ) as job:
        job.wait_for_lines("LOOPING", len(layout))
        lost(job)
        workers = job.wait()
    transport = "tcp" if len(set(layout)) == len(layout) else "hierarchical"
    for worker in workers:
        assert worker.results[:1] == [transport]
    return workers, job


@pytest.mark.netns
@pytest.mark.parametrize(("layout", "victim"), [("01", 0), ("0011", 3)])
def test_a_killed_rank_is_noticed_across_hosts(two_hosts, layout, victim):
    workers, job = lose(two_hosts, layout, lambda job: job.kill(victim))
    del workers[victim]
    for worker in workers:
        rank, host, reason = worker.results[1]
        assert (rank, host) == (victim, job.addresses[victim])
        assert reason.startswith("its connection ended")


@pytest.mark.netns
@pytest.mark.parametrize(("layout", "cut"), [("0123", 1), soak("0011", 1)])
def test_a_host_that_is_cut_off_is_noticed_by_all(layout, cut):
    """Nothing says so: no packet arrives any more, on either side."""
    with Hosts(max(map(int, layout)) + 1) as hosts:
        workers, job = lose(hosts, layout, lambda _: hosts.cut(cut), bound(1.5))
    for worker in workers:
        rank, host, reason = worker.results[1]
        # Those that were cut off have lost the chief, the others those.
        gone = int(layout[worker.rank]) == cut
        assert rank == 0 if gone else int(layout[rank]) == cut
        assert host == job.addresses[rank]
        assert reason.startswith("nothing was received from it for ")
