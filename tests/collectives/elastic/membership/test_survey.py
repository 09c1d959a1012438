"""Processes that were started again, or late, and members that are slow to answer."""

from __future__ import annotations

import signal

import elastic_members
import pytest

from pace import bound
from workers import Workers

# A process sends itself SIGSTOP before it asks others if its rank is among the frozen.
SLOW = """
from kerasdist.collectives.elastic.job import ElasticJob
from kerasdist.collectives.elastic.peer_messenger import PeerMessenger

again = os.path.exists(f"{options['folder']}/{me}")
open(f"{options['folder']}/{me}", "w").close()
ask, asked = PeerMessenger.ask, []

@functools.wraps(ask)
def call(lines, number, *args):
    if me in options.get("frozen", ()) and not asked:
        os.kill(os.getpid(), signal.SIGSTOP)
    if number in asked:
        print("AGAIN", number, flush=True)
    asked.append(number)
    if again and number in options.get("slow", ()):
        time.sleep(0.5)
    return ask(lines, number, *args)

PeerMessenger.ask = call
begin_job = ElasticJob.begin

@functools.wraps(begin_job)
def begins(job):
    print("JOINS" if job.communicator.joining else "STARTS", flush=True)
    begin_job(job)

ElasticJob.begin = begins
if again and "again" in options:
    options["startup"] = options["again"]
"""
pytestmark = pytest.mark.timeout(120)


def start(folder, size, **options):
    """A job that goes on until `finish`."""
    files = {"folder": str(folder), "enough": str(folder / "enough")}
    return elastic_members.start(size, before=SLOW, handover=False, **files, **options)


def finish(job, folder, ranks):
    """Wait until `ranks` are the members, and return which of them have joined."""
    for rank in ranks:
        job.wait_for_line(rank, f"MEMBERS {ranks}")
    (folder / "enough").touch()
    found = [job.wait_one(rank) for rank in ranks]
    assert [each.returncode for each in found] == [0] * len(ranks), job.report()
    assert [sorted(each.result["last"]) for each in found] == [ranks] * len(ranks)
    return [each.result["joined"] for each in found]


def test_a_task_that_does_not_answer_is_asked_again(tmp_path):
    """Else rank 1 would start the job anew, and wait for rank 0, which trains."""
    with start(tmp_path, 2) as job:
        job.wait_for_line(0, "MEMBERS [0, 1]")
        job.kill(1)
        job.wait_for_line(0, "MEMBERS [0]")
        job.kill(0, signal.SIGSTOP)
        job.wait_one(1)
        job.start_again(1)
        job.wait_for_line(1, "AGAIN 0")
        job.kill(0, signal.SIGCONT)
        assert finish(job, tmp_path, [0, 1]) == [False, True]
        assert "STARTS" not in job.output(1)


def test_most_of_the_tasks_dont_start_again_beside_the_rest(tmp_path):
    """Rank 2 trains alone: the others were dead. It answers when they have asked."""
    with start(tmp_path, 3, again=bound(3.0), slow=[2]) as job:
        job.wait_for_line(2, "MEMBERS [0, 1, 2]")
        job.kill(0)
        job.kill(1)
        job.wait_for_line(2, "MEMBERS [2]")
        job.kill(2, signal.SIGSTOP)
        for rank in (0, 1):
            job.wait_one(rank)
            job.start_again(rank)
        for rank in (0, 1):
            job.wait_for_line(rank, "STARTS")
        job.kill(2, signal.SIGCONT)
        assert finish(job, tmp_path, [0, 1, 2]) == [True, True, False]
        for rank in (0, 1):
            assert "MEMBERS [0, 1]\n" not in job.output(rank)


@pytest.mark.soak
def test_one_that_is_frozen_from_the_start_delays_it_for_the_time_out(tmp_path):
    """When it continues, it joins."""
    startup = bound(2.0)
    with start(tmp_path, 3, frozen=[0], startup=startup, heartbeat=bound(0.5)) as job:
        for rank in (1, 2):
            job.wait_for_line(rank, "MEMBERS [1, 2]")
        job.kill(0, signal.SIGCONT)
        assert finish(job, tmp_path, [0, 1, 2]) == [True, False, False]
        for rank in (1, 2):
            assert job.wait_one(rank).result["took"] >= startup


def test_half_dont_start_without_a_frozen_one(tmp_path):
    with start(tmp_path, 2, frozen=[1], startup=bound(1.5)) as job:
        name, text, _ = job.wait_one(0).result
    assert name == "StartupError"
    assert text.startswith("1 of 2 workers didn't connect within ")
    assert "it listens there, but doesn't answer" in text


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
