"""`kerasdist run --elastic`: tasks lost in the start, and tasks that are added."""

from __future__ import annotations

import os
import signal

import pytest

from launching import wait_until_said
from waiting import wait_until

pytestmark = pytest.mark.timeout(90)

# The members add up ones, and admit those that wait, until the test wants the end.
JOB = """
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.transport.deadline import Timeouts

incarnation = int(os.environ["KERASDIST_INCARNATION"])
mark(f"up-{rank}-{incarnation}", os.getpid())
if rank in LATE and not incarnation:
    wait_for("never")
start = os.environ.get("KERASDIST_START_WORKERS")
job = connect_elastic(
    resolve(None),
    timeouts=Timeouts(startup=60, heartbeat=5),
    start_workers=None if start is None else int(start),
)
group = job.communicator
joined = group.joining
if joined:
    group.join(60.0)
    group.broadcast([np.array([0])])
    print("joined")
mark(f"connected-{rank}-{incarnation}", group.size)
while True:
    if joined:
        joined = False  # the others have admitted it in this turn
    elif group.ask()[0] and group.admit():
        group.broadcast([np.array([0])])
    mark(f"size-{rank}", group.size)
    if group.all_reduce([np.array([Path("enough").exists()])], "max")[0][0]:
        break
    time.sleep(0.01)
print("size", group.size, "of", rank)
job.close()
"""


def begin(launcher, *options, late=()):
    return launcher.start(
        *("--elastic", *options, "script.py"), script=JOB.replace("LATE", str(late))
    )


def wait_for_size(launcher, size, *ranks):
    def sizes():
        return [(launcher.folder / f"size-{rank}").read_text() for rank in ranks]

    launcher.wait_for(*(f"size-{rank}" for rank in ranks))
    wait_until(lambda: sizes() == [str(size)] * len(ranks), f"{size} members")


def test_tasks_that_ended_before_they_listened(launcher):
    """One that is started again starts with the others, which don't wait for others."""
    process = begin(launcher, "-n", 3, "--restarts", 1, late=(0, 1))
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


def test_a_signal_adds_a_worker(launcher):
    process = begin(launcher, "-n", 2, "--max-workers", 3, "--output", "all")
    launcher.wait_for("connected-0-0", "connected-1-0")
    process.send_signal(signal.SIGUSR1)
    wait_for_size(launcher, 3, 0, 1, 2)
    # There are no more than three; one that was lost is started again.
    process.send_signal(signal.SIGUSR1)
    (pid,) = launcher.pids("up-1-0")
    os.kill(pid, signal.SIGKILL)
    wait_for_size(launcher, 2, 0, 2)
    process.send_signal(signal.SIGUSR1)
    wait_for_size(launcher, 3, 0, 1, 2)
    code, out, err = launcher.finish(process)
    assert code == 0, err
    assert "size 3 of 0\n" in out
    for rank in (1, 2):
        assert f"[{rank}] joined\n" in out
        assert f"[{rank}] size 3 of {rank}\n" in out
    assert "kerasdist run: rank 2 (127.0.0.1:" in err
    assert ") is added: 3 of 3 workers\n" in err
    assert "kerasdist run: no worker is added: all 3 run (--max-workers)\n" in err
    assert "kerasdist run: rank 1 is started again\n" in err
    assert (
        "finished: rank 0, rank 1, rank 2; lost: rank 1 (SIGKILL); added: rank 2; "
        "started again: rank 1 (once)" in err
    )
