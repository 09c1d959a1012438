"""`kerasdist run --elastic` with parameter servers: the ends of tasks, exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from launching import wait_until_said

pytestmark = pytest.mark.timeout(90)


def begin(launcher, *options, script, size, servers, **more):
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
    process = begin(launcher, script=script, size=3, servers=2)
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
    """And the workers' children; they have more time, and nothing is started again."""
    script = """
    kind = config["task"]["type"]
    if kind == "worker":
        child = subprocess.Popen(["sleep", "60"])
        def leave(*_):
            wait_for("checked")
            mark(f"left-{rank}", child.poll())
            sys.exit()
        signal.signal(signal.SIGTERM, leave)
    mark(f"{kind}-{rank}", os.getpid())
    mark(f"{kind}-{rank}-" + os.environ["KERASDIST_INCARNATION"])
    wait_for("never")
    """
    options = {"script": script, "size": 3, "servers": 2}
    process = begin(launcher, "--restarts", 3, **options, quick=True)
    kill(launcher, "worker-0")
    wait_until_said(process, "started again in 1 s")
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.0)
    for server in ("ps-0", "ps-1"):
        (pid,) = launcher.pids(server)
        os.kill(pid, 0)
    (launcher.folder / "checked").touch()
    code, _, err = launcher.finish(process)
    assert (code, err.splitlines()[-1]) == (
        143,
        "kerasdist run: ended by SIGTERM; all workers and servers are ended",
    )
    assert launcher.wait_for("left-1", "left-2") == ["None", "None"]
    assert not (launcher.folder / "worker-0-1").exists()
