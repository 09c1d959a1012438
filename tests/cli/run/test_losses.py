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

# `steps` of each worker; `work` is the test's, in the midst of them.
SCRIPT = """
import time
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
reporter = Reporter("job", rank)
client = connect_servers(
    cluster, settings, timeouts=timeouts, on_failure=reporter.failed)
table = None
if settings.mode == "async":
    table = client.open_table([Variable(name="v", shape=(4,))], [np.zeros(4, "f4")])

def step():
    if table is None:
        client.communicator.all_reduce([np.ones(4, "f4")])
    else:
        table.push_pull([np.ones(4, "f4")])
    time.sleep(0.005)

def until(name):
    while not Path(name).exists():
        step()

step()
mark(f"going-{rank}")
BODY
client.close()
mark(f"done-{rank}")
"""
GO_ON = "until('enough')"
# A busy machine may need longer than the launcher waits for others' own ends.
PATIENT = (
    "from kerasdist.cli.run import supervisor; "
    "supervisor.LET_THEM_FAIL = supervisor.LET_CAUSE_END = 40"
)


def script_of(body=GO_ON, heartbeat=10.0, **settings):
    text = SCRIPT.replace("SETTINGS", repr({"mode": "async", **settings}))
    return text.replace("BODY", body).replace("HEARTBEAT", str(heartbeat))


def begin(launcher, script, workers=3, servers=2, **more):
    process = launcher.start(
        *("-n", workers, "--ps", servers, "script.py"), script=script, **more
    )
    launcher.wait_for(*(f"going-{rank}" for rank in range(workers)))
    return process


def test_a_frozen_worker_is_told_and_ended_with_the_job(launcher):
    process = begin(launcher, script_of(heartbeat=3.0), servers=1, quick=True)
    (pid,) = launcher.pids("pid-worker-1")
    os.kill(pid, signal.SIGSTOP)
    line = wait_until_said(process, "lost")
    assert line.startswith(
        "kerasdist run: rank 1 was lost: nothing was received from it"
    )
    code, _, err = launcher.finish(process)
    assert (code, err) == (0, "kerasdist run: the job has finished without rank 1\n")


def test_a_failure_of_all_is_no_loss(launcher):
    # Not before all have begun: the launcher ends who hasn't.
    body = (
        "for each in range(3): wait_for(f'going-{each}')\n"
        "if rank: client.communicator.barrier()\nclient.communicator.all_gather(1)"
    )
    process = begin(launcher, script_of(body), servers=1)
    code, _, err = launcher.finish(process)
    assert code == 1
    assert "CollectiveMismatch" in err
    assert "the others go on" not in err


def test_a_server_that_has_lost_its_worker_isnt_the_first(launcher):
    # The worker fails, and takes its time to end. The server ends before it.
    body = (
        "client.close(ValueError('the real reason'))\n"
        "wait_for_end(Path('pid-ps-0').read_text())\nos._exit(6)"
    )
    script = script_of(body, mode="async")
    process = begin(launcher, script, workers=1, servers=1, before=PATIENT)
    code, _, err = launcher.finish(process)
    assert code == 6, err
    assert "rank 0 failed with exit code 6; the other workers and servers" in err
    assert "afterwards server 0 failed with exit code 1" in err


def test_who_has_lost_a_server_isnt_the_first(launcher):
    # The server fails, and takes its time to end. The workers end before it.
    script = script_of("while True: step()", mode="sync").replace(
        "run_server(cluster, settings, timeouts)",
        """import threading
    from kerasdist.parameter_server.server.server import ParameterServer
    server = ParameterServer(cluster, settings, timeouts=timeouts)
    threading.Thread(target=server.serve, daemon=True).start()
    wait_for("going-0"), wait_for("going-1")
    server.close()
    for worker in range(2):
        wait_for_end(Path(f"pid-worker-{worker}").read_text())
    os._exit(6)""",
    )
    process = begin(launcher, script, workers=2, servers=1, before=PATIENT)
    code, _, err = launcher.finish(process)
    assert code == 6, err
    assert "server 0 failed with exit code 6" in err
    for worker in range(2):
        assert f"afterwards rank {worker} failed with exit code 1" in err


def by_hand(launcher, kind, index):
    """Starts a task as a user or a cluster manager would who has its settings."""
    (text,) = launcher.wait_for("environ-0")
    environ = {**json.loads(text), "KERASDIST_LISTEN_FD": "", "KERASDIST_REPORT_FD": ""}
    cluster = json.loads(environ["TF_CONFIG"])["cluster"]
    place = {"cluster": cluster, "task": {"type": kind, "index": index}}
    environ["TF_CONFIG"] = json.dumps(place)
    return launcher.start_plain("script.py", env=environ)


def test_another_process_may_take_a_lost_workers_place(launcher):
    process = begin(launcher, script_of())
    (pid,) = launcher.pids("pid-worker-1")
    os.kill(pid, signal.SIGKILL)
    wait_until_said(process, "rank 1 was lost: ")
    (launcher.folder / "going-1").unlink()
    second = by_hand(launcher, "worker", 1)
    launcher.wait_for("going-1")
    wait_until_said(process, "rank 1 joined again")
    assert launcher.finish(process) == (0, "", "")
    assert second.wait(bound(20)) == 0


def test_a_lost_server_may_be_started_again(launcher):
    settings = {
        "snapshot_dir": str(launcher.folder / "snapshots"),
        "snapshot_updates": 5,
        "restart_timeout": 30.0,
    }
    process = begin(launcher, script_of(**settings), servers=1)
    (first,) = launcher.pids("pid-ps-0")
    path = path_of(settings["snapshot_dir"], 0)
    wait_until(path.exists, "a snapshot")
    os.kill(first, signal.SIGKILL)
    line = wait_until_said(process, "server 0 was lost: ")
    assert line.endswith("; the workers wait 30 s for it to be started again\n")
    second = by_hand(launcher, "ps", 0)
    wait_until(
        lambda: launcher.pids("pid-ps-0") == [second.pid], "the server's own file"
    )
    (worker,) = launcher.pids("pid-worker-1")
    os.kill(worker, signal.SIGKILL)
    wait_until_said(process, "rank 1 was lost: ")
    (launcher.folder / "going-1").unlink()
    third = by_hand(launcher, "worker", 1)
    launcher.wait_for("going-1")
    code, _, err = launcher.finish(process)
    # The new server has no launcher to tell that the worker's place was taken.
    assert (code, err) == (0, "kerasdist run: the job has finished without rank 1\n")
    assert third.wait(bound(20)) == 0
    assert second.wait(bound(20)) == 0
