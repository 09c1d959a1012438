"""The schedule of restarts."""

from __future__ import annotations

from kerasdist.cli.run.elastic.restarts import Restarts
from kerasdist.cli.run.job import Task
from kerasdist.cli.run.spawn import Started


def worker(rank, incarnation=0):
    task = Task(kind="worker", index=rank)
    return Started(task=task, process=None, tail=None, incarnation=incarnation)


def test_the_pause_grows_with_each_restart_of_a_worker_up_to_a_minute():
    restarts = Restarts(100)
    pauses = [restarts.schedule(worker(0, count), 0.0) for count in range(9)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert restarts.schedule(worker(0, 10_000), 0.0) == 60
    assert restarts.schedule(worker(1), 0.0) == 1
