"""Members that are lost while the next epoch begins."""

from __future__ import annotations

import signal

import pytest

from workers import Workers

# Rank 2 ends in a turn. When the others have agreed, rank 1 ends, too, before it has a
# connection of the new epoch.
SCRIPT = """
import functools, json, os, signal, sys
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.collectives.elastic.job import ElasticJob
from kerasdist.ps import ServerSettings
from kerasdist.ps.elastic.link import ServerLink
from kerasdist.ps.elastic.server import ElasticServer
from kerasdist.transport.timeouts import Timeouts

cluster = resolve(None)
timeouts = Timeouts(startup=60, heartbeat=5)

def end():
    print("ENDS", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

install = ElasticJob.install

@functools.wraps(install)
def installs(job, decision):
    if cluster.rank == 1:
        end()
    install(job, decision)

ElasticJob.install = installs
if cluster.task_type == "ps":
    ElasticServer(cluster, ServerSettings(), 1, timeouts=timeouts).serve()
    sys.exit()
servers = bool(cluster.servers)
job = connect_elastic(
    cluster,
    timeouts=timeouts,
    link=ServerLink(cluster, ServerSettings(), 1) if servers else None,
)
for turn in range(10):
    if cluster.rank == 2 and turn == 5:
        end()
    job.communicator.all_reduce([np.ones(10, np.float32)])
changes = [[each.text, each.seconds] for each in job.communicator.changes]
print("RESULT", json.dumps([list(job.communicator.ranks), changes]))
job.close()
"""
pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("servers", [0, 1])
def test_one_that_is_lost_before_it_connects(servers: int) -> None:
    """Nothing but its address shows that; else the others wait for it for 15 s."""
    with Workers(SCRIPT, 3, deadline=90.0, handover=False, servers=servers) as job:
        for rank in (1, 2):
            assert job.wait_one(rank).returncode == -signal.SIGKILL
        ranks, changes = job.wait_one(0).result
    assert ranks == [0]
    ((text, seconds),) = changes
    assert "rank 1 (" in text
    assert "rank 2 (" in text
    assert seconds < 12.0
