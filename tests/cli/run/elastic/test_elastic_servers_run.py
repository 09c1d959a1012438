"""`kerasdist run --elastic` with parameter servers: the ends of tasks, exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from launching import wait_until_said

pytestmark = pytest.mark.timeout(90)

# Each task ends when the test wants it; a server says how it was ended.
SCRIPT = """
kind = config["task"]["type"]
mark(f"{kind}-{rank}", os.getpid())
wait_for(f"end-{kind}")
"""


def begin(launcher, *options, script=SCRIPT, size=2, servers=2, **more):
    process = launcher.start(
        *("-n", size, "--ps", servers, "--elastic", *options, "script.py"),
        script=script,
        **more,
    )
    launcher.wait_for(*(f"worker-{rank}" for rank in range(size)))
    launcher.wait_for(*(f"ps-{index}" for index in range(servers)))
    return process


def kill(launcher, task):
    (pid,) = launcher.pids(task)
    os.kill(pid, signal.SIGKILL)


def test_a_server_is_lost_and_the_other_is_ended_when_no_worker_is_left(launcher):
    process = begin(launcher, quick=True)
    kill(launcher, "ps-1")
    line = wait_until_said(process, "ended by signal")
    assert line.startswith("kerasdist run: server 1 (HOST)")
    assert line.endswith("; the others go on\n")
    kill(launcher, "worker-1")
    code, _, err = launcher.finish(process, "end-worker")
    assert code == 0
    assert err.endswith(
        "finished: rank 0; lost: rank 1 (SIGKILL), server 1 (SIGKILL)\n"
    )


def test_a_real_job_loses_a_worker_and_a_server(launcher):
    script = """
    import numpy as np
    from kerasdist.cluster import resolve
    from kerasdist.collectives.elastic.connect import connect_elastic
    from kerasdist.parameter_server import ServerSettings
    from kerasdist.parameter_server.elastic_link import ServerLink
    from kerasdist.parameter_server.elastic_server import run_elastic_server
    from kerasdist.transport.deadline import Timeouts

    kind = config["task"]["type"]
    timeouts = Timeouts(startup=30, heartbeat=5)
    mark(f"{kind}-{rank}", os.getpid())
    place = resolve(None)
    if place.rank is None:
        run_elastic_server(place, ServerSettings(), 1, timeouts)
        sys.exit()
    link = ServerLink(place, ServerSettings(), 1)
    job = connect_elastic(place, timeouts=timeouts, link=link)
    mark(f"connected-{rank}")
    lost = 0
    while lost < 2:
        job.communicator.all_reduce([np.ones(50_000, np.float32)])
        text = " ".join(each.text for each in job.communicator.changes)
        done = ("rank 0 (" in text) + ("server 0 (" in text)
        lost = job.communicator.all_reduce([np.array([done])], "min")[0][0]
        time.sleep(0.01)
    print("size", job.communicator.size, "of", rank)
    job.communicator.barrier()
    job.close()
    """
    process = begin(launcher, script=script, size=3)
    launcher.wait_for("connected-0", "connected-1", "connected-2")
    kill(launcher, "worker-0")
    assert "rank 1 is the chief from step" in wait_until_said(process, "the chief")
    kill(launcher, "ps-0")
    code, out, err = launcher.finish(process)
    assert code == 0, err
    assert "size 2 of 1" in out
    (warning,) = re.findall(r"kerasdist: rank 0 \(127.0.0.1:.*", out)
    # Both in one line if they were lost in the same second.
    assert re.search(r" (was|were) lost at step \d+", warning)
    assert "server 0 (127.0.0.1:" in out
    lost = "lost: rank 0 (SIGKILL), server 0 (SIGKILL); pauses: "
    assert f"finished: rank 1, rank 2; {lost}" in err


def test_sigterm_to_the_launcher_leaves_the_servers_to_the_workers(launcher):
    script = SCRIPT.replace(
        'wait_for(f"end-{kind}")',
        """
if kind == "worker":
    def leave(*_):
        wait_for("checked")
        sys.exit()
    signal.signal(signal.SIGTERM, leave)
mark(f"ready-{kind}-{rank}")
wait_for("never")
""",
    )
    process = begin(launcher, script=script, quick=True)
    launcher.wait_for("ready-worker-0", "ready-worker-1")
    process.send_signal(signal.SIGTERM)
    # The workers need servers until they have left.
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    for server in ("ps-0", "ps-1"):
        (pid,) = launcher.pids(server)
        os.kill(pid, 0)
    (launcher.folder / "checked").touch()
    code, _, err = launcher.finish(process)
    assert (code, err.splitlines()[-1]) == (
        143,
        "kerasdist run: ended by SIGTERM; all workers and servers are ended",
    )
