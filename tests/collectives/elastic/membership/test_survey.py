"""Processes that were started again, or late, and members that are slow to answer."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from workers import Workers

# The members take turns, and admit those that wait, until the test wants the end. A
# process sends itself SIGSTOP before it asks others if its rank is among the frozen.
SCRIPT = """
import functools, json, os, signal, sys, time
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.collectives.elastic.job import ElasticJob
from kerasdist.collectives.elastic.membership.lines import Lines
from kerasdist.errors import KerasDistError
from kerasdist.transport.timeouts import Timeouts

folder, options = sys.argv[1], json.loads(sys.argv[2])
cluster = resolve(None)
again = os.path.exists(f"{folder}/{cluster.rank}")
open(f"{folder}/{cluster.rank}", "w").close()
ask, asked = Lines.ask, []

@functools.wraps(ask)
def call(lines, number, *args):
    if cluster.rank in options.get("frozen", ()) and not asked:
        os.kill(os.getpid(), signal.SIGSTOP)
    if (cluster.rank, number) in asked:
        print("AGAIN", number, flush=True)
    asked.append((cluster.rank, number))
    if again and number in options.get("slow", ()):
        time.sleep(0.5)
    return ask(lines, number, *args)

Lines.ask = call
begin_job = ElasticJob.begin

@functools.wraps(begin_job)
def begins(job):
    print("JOINS" if job.communicator.joining else "STARTS", flush=True)
    begin_job(job)

ElasticJob.begin = begins
seconds = options.get("again", 60) if again else options.get("startup", 60)
begin = time.monotonic()
try:
    job = connect_elastic(
        cluster,
        timeouts=Timeouts(startup=seconds, heartbeat=options.get("heartbeat", 5)),
    )
except KerasDistError as error:
    print("RESULT", json.dumps([type(error).__name__, str(error), None]))
    sys.exit()
took = time.monotonic() - begin
group = job.communicator
joined = group.joining
if joined:
    group.join(60.0)
    group.broadcast([np.array([0])])
seen, newcomer = None, joined
while True:
    if group.ranks != seen:
        seen = group.ranks
        print("MEMBERS", sorted(seen), flush=True)
    if newcomer:
        newcomer = False  # the others have admitted it in this turn
    elif group.ask()[0] and group.admit():
        group.broadcast([np.array([0])])
    enough = os.path.exists(f"{folder}/enough")
    if group.all_reduce([np.array([enough])], "max")[0][0]:
        break
    time.sleep(0.01)
print("RESULT", json.dumps([sorted(group.ranks), joined, took]))
job.close()
"""
pytestmark = pytest.mark.timeout(120)


def start(folder: Path, size: int, **options: Any) -> Workers:
    """Return workers that run the script."""
    args = [str(folder), json.dumps(options)]
    return Workers(SCRIPT, size, args, deadline=90.0, handover=False)


def finish(job: Workers, folder: Path, ranks: list[int]) -> list[bool]:
    """Wait until `ranks` are the members, and return which of them have joined."""
    for rank in ranks:
        job.wait_for_line(rank, f"MEMBERS {ranks}")
    (folder / "enough").touch()
    found = [job.wait_one(rank) for rank in ranks]
    assert [each.returncode for each in found] == [0] * len(ranks), job.report()
    assert [each.result[0] for each in found] == [ranks] * len(ranks)
    return [each.result[1] for each in found]


def test_a_task_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
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


def test_most_of_the_tasks_dont_start_again_beside_the_rest(tmp_path: Path) -> None:
    """Rank 2 trains alone: the others were dead. It answers when they have asked."""
    with start(tmp_path, 3, again=6, slow=[2]) as job:
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
def test_one_that_is_frozen_from_the_start_delays_it_for_the_time_out(
    tmp_path: Path,
) -> None:
    """When it continues, it joins."""
    with start(tmp_path, 3, frozen=[0], startup=4, heartbeat=1) as job:
        for rank in (1, 2):
            job.wait_for_line(rank, "MEMBERS [1, 2]")
        job.kill(0, signal.SIGCONT)
        assert finish(job, tmp_path, [0, 1, 2]) == [True, False, False]
        for rank in (1, 2):
            assert job.wait_one(rank).result[2] >= 4.0


def test_half_dont_start_without_a_frozen_one(tmp_path: Path) -> None:
    with start(tmp_path, 2, frozen=[1], startup=2) as job:
        name, text, _ = job.wait_one(0).result
    assert name == "StartupError"
    assert text.startswith("1 of 2 workers didn't connect within 2 s:\n")
    assert "it listens there, but doesn't answer" in text


# Two jobs, one after the other; in the second one rank 1 ends, and is started again.
TWO = """
import json, os, signal, sys, time
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.errors import StartupError
from kerasdist.transport.timeouts import Timeouts

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
def test_of_two_jobs_of_a_script_the_first_is_closed(
    tmp_path: Path, closes: bool
) -> None:
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
