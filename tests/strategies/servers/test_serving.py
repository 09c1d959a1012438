import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kerasdist
from kerasdist import errors
from kerasdist.strategies.options import close_open_jobs
from workers import free_ports

Strategy = kerasdist.ParameterServerStrategy


@pytest.fixture
def task():
    """The cluster's settings by the type of the task."""
    worker, server = (f"127.0.0.1:{port}" for port in free_ports(2))
    jobs = {"worker": [worker], "ps": [server]}
    return lambda kind: {"cluster": jobs, "task": {"type": kind, "index": 0}}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_it_returns_when_the_job_is_over(task, mode):
    arguments = {"mode": mode, "startup_timeout": 60}
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(
            Strategy.serve, **arguments, cluster=task("ps"), devices=["GPU:9"]
        )
        with Strategy(**arguments, cluster=task("worker")) as strategy:
            with strategy.scope():
                total = strategy.communicator.all_reduce([np.ones(3)])[0]
            assert (strategy.local_rank, strategy.local_size) == (0, 1)
        # Another strategy may follow, until the process ends.
        with pytest.raises(TimeoutError):
            server.result(0.5)
        close_open_jobs()
        assert server.result(60) is None
    assert total.tolist() == [1, 1, 1]
    assert [t.name for t in threading.enumerate() if "kerasdist-s" in t.name] == []


def test_it_raises_what_ended_the_job(task):
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(Strategy.serve, cluster=task("ps"))
        strategy = Strategy(cluster=task("worker"))
        with pytest.raises(ValueError, match=r"^mine$"), strategy:
            raise ValueError("mine")
        with pytest.raises(errors.WorkerLost, match="ValueError: mine"):
            server.result(60)


def test_a_worker_does_not_serve(task):
    with pytest.raises(errors.ClusterError, match=r"^Only parameter servers serve\. "):
        Strategy.serve(cluster=task("worker"))
    with pytest.raises(errors.ClusterError, match="Received: a task of type 'worker'"):
        Strategy.serve()


def test_arguments_are_those_of_the_constructor(task):
    with pytest.raises(TypeError, match="'patience'"):
        Strategy.serve(cluster=task("ps"), patience=3)
    with pytest.raises(ValueError, match="`mode` must be 'sync' or"):
        Strategy.serve("asink", cluster=task("ps"))
