"""`kerasdist run --elastic`: tasks lost in the start."""

from __future__ import annotations

import os
import signal

import pytest

from launching import wait_until_said

pytestmark = pytest.mark.timeout(90)

# The members add up ones until the test wants the end.
JOB = """
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.transport.deadline import Timeouts

incarnation = int(os.environ["KERASDIST_INCARNATION"])
mark(f"up-{rank}-{incarnation}", os.getpid())
if rank in (0, 1) and not incarnation:
    wait_for("never")
job = connect_elastic(resolve(None), timeouts=Timeouts(startup=60, heartbeat=5))
group = job.communicator
mark(f"connected-{rank}-{incarnation}", group.size)
while not group.all_reduce([np.array([Path("enough").exists()])], "max")[0][0]:
    time.sleep(0.01)
job.close()
"""


def test_tasks_that_ended_before_they_listened(launcher):
    """One that is started again starts with the others, which don't wait for others."""
    options = ("--elastic", "-n", 3, "--restarts", 1, "script.py")
    process = launcher.start(*options, script=JOB)
    first, second = launcher.pids("up-1-0", "up-0-0")
    os.kill(first, signal.SIGKILL)
    wait_until_said(process, "rank 1 (HOST) was")
    os.kill(second, signal.SIGKILL)
    # Long before the start's time-out: the launcher has told them.
    assert launcher.wait_for("connected-1-1", "connected-2-0") == ["2", "2"]
    code, _, err = launcher.finish(process)
    assert code == 0, err
    lost = "lost: rank 0 (SIGKILL), rank 1 (SIGKILL); started again: rank 1 (once)"
    assert f"finished: rank 1, rank 2; {lost}" in err
