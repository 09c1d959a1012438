"""`kerasdist run` with servers: who is lost, in real jobs; see `test_outcome.py`."""

from __future__ import annotations

import json
import os
import signal

import pytest

from kerasdist.parameter_server.snapshots import path_of
from launching import wait_until_said
from pace import bound
from waiting import wait_until

pytestmark = pytest.mark.timeout(60)

SCRIPT = """
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.parameter_server import *
from kerasdist.parameter_server.server.server import run_server
from kerasdist.transport import Timeouts
from kerasdist.transport.liveness.launcher_pipe import Reporter

cluster = resolve()
timeouts = Timeouts(startup=20, collective=20, heartbeat=HEARTBEAT)
settings = ServerSettings(**SETTINGS)
mark(f"pid-{config['task']['type']}-{rank}", os.getpid())
if cluster.task_type == "ps":
    mark(f"environ-{rank}", json.dumps(dict(os.environ)))
    run_server(cluster, settings, timeouts)
    sys.exit(0)
client = connect_servers(
    cluster, settings, timeouts=timeouts, on_failure=Reporter("job", rank).failed)
table = client.open_table([Variable(name="v", shape=(4,))], [np.zeros(4, "f4")])
table.push_pull([np.ones(4, "f4")])
mark(f"going-{rank}")
if sys.argv[1:]:
    client.close(ValueError("the real reason"))
    wait_for_end(Path("pid-ps-0").read_text())
    os._exit(6)
while not Path("enough").exists():
    table.push_pull([np.ones(4, "f4")])
    time.sleep(0.005)
client.close()
"""


def script_of(heartbeat=10.0, **settings):
    text = SCRIPT.replace("SETTINGS", repr({"mode": "async", **settings}))
    return text.replace("HEARTBEAT", str(heartbeat))


def begin(launcher, script, **more):
    process = launcher.start("-n", 3, "--ps", 1, "script.py", script=script, **more)
    launcher.wait_for(*(f"going-{rank}" for rank in range(3)))
    return process


def test_a_frozen_worker_is_told_and_ended_with_the_job(launcher):
    process = begin(launcher, script_of(heartbeat=3.0), quick=True)
    (pid,) = launcher.pids("pid-worker-1")
    os.kill(pid, signal.SIGSTOP)
    line = wait_until_said(process, "lost")
    assert line.startswith(
        "kerasdist run: rank 1 was lost: nothing was received from it"
    )
    code, _, err = launcher.finish(process)
    assert (code, err) == (0, "kerasdist run: the job has finished without rank 1\n")


def test_a_server_that_has_lost_its_worker_isnt_the_first(launcher):
    """The worker fails, and takes its time to end. The server ends before it."""
    code, _, err = launcher.run(
        *("-n", 1, "--ps", 1, "script.py", "fail"),
        script=script_of(),
        before="from kerasdist.cli.run import supervisor as s; "
        "s.LET_THEM_FAIL = s.LET_CAUSE_END = 40",
    )
    assert code == 6, err
    assert "rank 0 failed with exit code 6; the other workers and servers" in err
    assert "afterwards server 0 failed with exit code 1" in err


def by_hand(launcher, kind, index):
    """Starts a task as a user or a cluster manager would who has its settings."""
    (text,) = launcher.wait_for("environ-0")
    environ = {**json.loads(text), "KERASDIST_LISTEN_FD": "", "KERASDIST_REPORT_FD": ""}
    cluster = json.loads(environ["TF_CONFIG"])["cluster"]
    place = {"cluster": cluster, "task": {"type": kind, "index": index}}
    environ["TF_CONFIG"] = json.dumps(place)
    return launcher.start_plain("script.py", env=environ)


def test_lost_ones_may_be_started_again_by_hand(launcher):
    settings = {
        "snapshot_dir": str(launcher.folder / "snapshots"),
        "snapshot_updates": 5,
        "restart_timeout": 30.0,
    }
    process = begin(launcher, script_of(**settings))
    worker, server = launcher.pids("pid-worker-1", "pid-ps-0")
    os.kill(worker, signal.SIGKILL)
    wait_until_said(process, "rank 1 was lost: ")
    (launcher.folder / "going-1").unlink()
    second = by_hand(launcher, "worker", 1)
    launcher.wait_for("going-1")
    wait_until_said(process, "rank 1 joined again")
    snapshot = path_of(settings["snapshot_dir"], 0)
    snapshot.unlink(missing_ok=True)
    wait_until(snapshot.exists, "a snapshot that knows of the new one")
    os.kill(server, signal.SIGKILL)
    line = wait_until_said(process, "server 0 was lost: ")
    assert line.endswith("; the workers wait 30 s for it to be started again\n")
    third = by_hand(launcher, "ps", 0)
    assert launcher.finish(process) == (0, "", "")
    assert [each.wait(bound(20)) for each in (second, third)] == [0, 0]
