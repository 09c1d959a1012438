import signal

import pytest
from elastic_members import start

from pace import bound
from workers import Workers

# Those that are started again are slow to ask rank 2.
SLOW = """
from kerasdist.collectives.elastic.job import ElasticJob
from kerasdist.collectives.elastic.peer_messenger import PeerMessenger

again = os.path.exists(f"{options['folder']}/{me}")
open(f"{options['folder']}/{me}", "w").close()
ask, begin_job = PeerMessenger.ask, ElasticJob.begin

@functools.wraps(ask)
def call(lines, number, *args):
    if again and number == 2:
        time.sleep(0.5)
    return ask(lines, number, *args)

@functools.wraps(begin_job)
def begins(job):
    print("JOINS" if job.communicator.joining else "STARTS", flush=True)
    begin_job(job)

PeerMessenger.ask, ElasticJob.begin = call, begins
if again:
    options["startup"] = options["again"]
"""


@pytest.mark.soak
def test_most_of_the_tasks_dont_start_again_beside_the_rest(tmp_path):
    """Rank 2 trains alone: the others were dead. It answers when they have asked."""
    options = {"folder": str(tmp_path), "enough": str(tmp_path / "enough")}
    options |= {"again": bound(3.0), "before": SLOW, "handover": False}
    with start(3, **options) as job:
        job.wait_for_line(2, "MEMBERS [0, 1, 2]")
        job.kill(0)
        job.kill(1)
        job.wait_for_line(2, "MEMBERS [2]")
        job.kill(2, signal.SIGSTOP)
        for rank in (0, 1):
            job.wait_one(rank)
            job.start_again(rank)
        job.wait_for_lines("STARTS", 2)
        job.kill(2, signal.SIGCONT)
        job.wait_for_lines("MEMBERS [0, 1, 2]", 3)
        (tmp_path / "enough").touch()
        for each in job.wait():
            assert each.returncode == 0, job.report()
            assert sorted(each.result["last"]) == [0, 1, 2]
            assert each.result["joined"] == (each.rank != 2)
        for rank in (0, 1):
            assert "MEMBERS [0, 1]\n" not in job.output(rank)


# Two jobs, one after the other; in the second one rank 1 ends, and is started again.
TWO = """
import json, os, signal, sys, time
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.errors import StartupError
from kerasdist.transport.deadline import Timeouts

folder, closes = sys.argv[1], sys.argv[2] == "closes"
cluster = resolve(None)
again = os.path.exists(f"{folder}/{cluster.rank}")
open(f"{folder}/{cluster.rank}", "w").close()
jobs = []
try:
    for number in range(2):
        jobs.append(connect_elastic(cluster, timeouts=Timeouts(startup=60)))
        if not number and not again:
            jobs[0].communicator.barrier()
            if closes:
                jobs[0].close()
except StartupError as error:
    print("RESULT", json.dumps([str(error), list(error.missing)]))
    sys.exit()
if cluster.rank == 1 and not again:
    os.kill(os.getpid(), signal.SIGKILL)
print("BOTH", flush=True)
group = jobs[1].communicator
if group.joining:
    group.join(60.0)
sizes = {1, group.size} if again else set()
while sizes != {1, 2} and not os.path.exists(f"{folder}/enough"):
    group.all_reduce([np.array([0])])
    if group.ask()[0]:
        group.admit()
    sizes = {1, group.size} if group.size == 1 or 1 in sizes else set()
    time.sleep(0.01)
print("RESULT", sorted(group.ranks))
for job in jobs:
    job.close()
"""


@pytest.mark.parametrize("closes", [False, True])
def test_of_two_jobs_of_a_script_the_first_is_closed(tmp_path, closes):
    """The n-th one of a process that is started again is the n-th one of the others."""
    args = [str(tmp_path), "closes" if closes else "keeps"]
    with Workers(TWO, 2, args, deadline=90.0, handover=False) as job:
        job.wait_for_line(0, "BOTH")
        assert job.wait_one(1).returncode == -signal.SIGKILL
        job.start_again(1)
        found = job.wait_one(1)
        (tmp_path / "enough").touch()
        last = job.wait_one(0).result
    if closes:
        text, missing = found.result
        assert "ranks [0] run, but have closed elastic strategy 1 of" in text
        assert missing == [0]
    else:
        assert found.result == [0, 1]
    assert last == ([0] if closes else [0, 1])
