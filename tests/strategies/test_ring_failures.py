import functools
import signal
import time

import pytest
from scripts import long_fit, with_prelude
from soak import soak

from pace import bound
from workers import Workers

script_of = functools.partial(long_fit, "RingStrategy")


def survivors(job, lost):
    """The results of all but `lost`, each of which must have raised."""
    finished = job.wait()
    left = [f for f in finished if f.rank != lost]
    assert [f.returncode for f in left] == [7] * len(left), [f.output for f in left]
    return [f.result for f in left]


@pytest.mark.parametrize(
    ("fault", "seconds", "lost"),
    [
        pytest.param(signal.SIGKILL, 20.0, 0, id="killed-0"),
        soak(signal.SIGKILL, 20.0, 1, id="killed-1"),
        soak(signal.SIGSTOP, 25.0, 0, id="frozen-0"),
        pytest.param(signal.SIGSTOP, 25.0, 1, id="frozen-1"),
    ],
)
def test_a_lost_worker_ends_fit_on_every_survivor(lost, fault, seconds):
    # A killed one is noticed by its connections, not by its silence.
    script = script_of(heartbeat=30.0 if fault == signal.SIGKILL else 3.0)
    with Workers(script, 3, deadline=120) as job:
        job.wait_for_lines("training", 3)
        at = time.time()
        job.kill(lost, fault)
        for rank in range(3):
            if rank != lost:
                job.wait_one(rank)
        if fault == signal.SIGSTOP:
            job.kill(lost, signal.SIGKILL)
        for seen in survivors(job, lost):
            assert seen["class"] == "WorkerLost"
            assert seen["rank"] == lost
            assert seen["host"] == job.addresses[lost]
            assert seen["step"] >= 4
            assert (
                f"Rank {lost} ({job.addresses[lost]}) was lost at step"
                in seen["message"]
            )
            assert seen["at"] - at < bound(seconds)


def test_a_rank_that_does_something_else_is_a_mismatch_naming_both():
    fault = "if epoch == 3 and strategy.rank == 1: strategy.communicator.barrier()"
    with Workers(script_of(fault), 2, deadline=90) as job:
        for seen in survivors(job, None):
            assert seen["class"] == "CollectiveMismatch"
            assert "barrier" in seen["message"]
            assert "all_reduce" in seen["message"]
            assert all(address in seen["message"] for address in job.addresses)


def test_a_rank_that_does_not_come_is_a_timeout():
    script = with_prelude("""
strategy = kerasdist.RingStrategy(timeout=2)
strategy.communicator.barrier()
if strategy.rank == 1:
    time.sleep(100)
result(error_of(strategy.communicator.barrier))
""")
    with Workers(script, 2, deadline=90) as job:
        kind, message = job.wait_one(0).result
        assert kind == "CollectiveTimeout"
        assert f"rank 1 ({job.addresses[1]})" in message
