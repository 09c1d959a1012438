"""Members that are lost while the next epoch begins."""

from __future__ import annotations

import signal

import pytest
from elastic_members import check, start

# When the others have agreed, rank 1 ends, too, before it has a connection of the new
# epoch.
INSTALL = """
from kerasdist.collectives.elastic import job as elastic_job
from kerasdist.collectives.elastic.job import ElasticJob
elastic_job.CONNECT_SECONDS = 500.0
install = ElasticJob.install

@functools.wraps(install)
def installs(job, decision):
    if me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    install(job, decision)

ElasticJob.install = installs
"""


@pytest.mark.parametrize("servers", [0, 1])
def test_one_that_is_lost_before_it_connects(servers):
    """Nothing but its address shows that; else the others wait for it for so long."""
    ends = [[2, 6, signal.SIGKILL]]
    with start(3, servers, ends=ends, before=INSTALL, handover=False) as job:
        for rank in (1, 2):
            assert job.wait_one(rank).returncode == -signal.SIGKILL
        survivor = job.wait_one(0)
    assert check(survivor, 3)[-1] == [0]
    ((text, seconds),) = survivor.result["changes"]
    assert "rank 1 (" in text
    assert "rank 2 (" in text
    assert seconds < 300.0
