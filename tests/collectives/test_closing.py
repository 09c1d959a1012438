import os

import pytest

from kerasdist.strategies.options import close_at_exit, close_open_jobs, forget
from workers import Workers


def test_a_failed_job_closes_by_itself():
    script = """
import json, os, sys, threading
from kerasdist import errors
from kerasdist.cluster import resolve
from kerasdist.collectives import connect
from kerasdist.transport.deadline import Timeouts

def descriptors():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # that of the listing itself
            pass
    return found

before = descriptors()
job = connect(resolve(), timeouts=Timeouts(heartbeat=20))
try:
    job.communicator.all_reduce([[1.0]])
    if job.communicator.rank == 1:
        os._exit(9)  # others may still be in the first one
    job.communicator.all_reduce([[1.0]])
except errors.WorkerLost as error:
    lost = error.rank
ended = threading.Event()
for _ in range(1000):
    ours = [t for t in threading.enumerate() if t.name.startswith("kerasdist")]
    if not ours:
        break
    ended.wait(0.02)
try:
    job.communicator.barrier()
except errors.WorkerLost as error:
    again = error.rank
left = [d for d in descriptors() if d not in before]
print("RESULT", json.dumps([lost, again, len(ours), left]), flush=True)
"""
    with Workers(script, 3, deadline=60) as job:
        finished = job.wait()
    for survivor in (finished[0], finished[2]):
        assert survivor.returncode == 0, survivor.output
        assert survivor.result == [1, 1, 0, []]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_that_ends_does_not_leave_its_parents_job():
    class Job:
        def close(self, error=None):
            os._exit(1)

    job = Job()
    close_at_exit(job)
    pid = os.fork()
    if pid == 0:
        close_open_jobs()
        os._exit(0)
    forget(job)
    assert os.waitpid(pid, 0)[1] == 0
