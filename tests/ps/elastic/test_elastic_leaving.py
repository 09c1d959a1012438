"""Members that servers connect leave on SIGTERM: the others continue, servers end."""

from __future__ import annotations

import json
import signal

import pytest

from workers import Workers

SCRIPT = """
import json, os, signal, sys, time
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.collectives.elastic.termination import end_process
from kerasdist.ps import ServerSettings
from kerasdist.ps.elastic.link import ServerLink
from kerasdist.ps.elastic.main import run_elastic_server
from kerasdist.transport.timeouts import Timeouts

ends = json.loads(sys.argv[1])
cluster = resolve(None)
timeouts = Timeouts(startup=20)
if cluster.rank is None:
    run_elastic_server(cluster, ServerSettings(), 1, timeouts)
    sys.exit()
me = cluster.rank
link = ServerLink(cluster, ServerSettings(), 1)
job = connect_elastic(cluster, timeouts=timeouts, link=link)
group, leaving = job.communicator, job.leaving
found = []
for turn in range(1, 16):
    if [me, turn] in ends:
        os.kill(os.getpid(), signal.SIGTERM)
        while not leaving.wanted:
            time.sleep(0.001)
    total = group.all_reduce([np.full(100, me + 1.0, np.float32)])[0]
    found.append(float(total[0]))
    if turn % 5 == 0 and group.ask()[1]:
        leaving.agree()
        if leaving.change():
            print("RESULT", json.dumps(found), flush=True)
            job.close()
            end_process()
print("RESULT", json.dumps(found), flush=True)
job.close()
"""


@pytest.mark.parametrize(
    ("ends", "until"),
    [
        pytest.param([[0, 3], [1, 3], [2, 4]], [5, 5, 5], id="all"),
        pytest.param(
            [[2, 3], [0, 8], [1, 7]],
            [10, 10, 5],
            marks=pytest.mark.soak,
            id="one, then all",
        ),
    ],
)
def test_servers_end_with_the_last_members(
    ends: list[list[int]], until: list[int]
) -> None:
    """They waited for workers, and then ended with `WorkerLost`."""
    with Workers(SCRIPT, 3, [json.dumps(ends)], deadline=60.0, servers=2) as job:
        finished = job.wait()
    for each in finished[:3]:
        assert each.returncode == -signal.SIGTERM, each.output
        totals = [
            sum(n + 1.0 for n in range(3) if turn < until[n]) for turn in range(15)
        ]
        assert each.result == totals[: until[each.rank]]
    for each in finished[3:]:
        assert each.returncode == 0, each.output
        assert "has finished" in each.output
