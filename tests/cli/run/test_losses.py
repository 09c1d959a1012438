"""`kerasdist run`: who is lost or to blame, in real jobs; see `test_outcome.py`."""

import json
import os
import re
import signal

import pytest

from launching import wait_until_said
from pace import bound

SCRIPT = """
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.parameter_server import *
from kerasdist.parameter_server.server.server import run_server
from kerasdist.transport.deadline import Timeouts
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
    assert line.startswith("kerasdist run: rank 1 was lost: nothing was received")
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


@pytest.mark.soak
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


@pytest.mark.parametrize("output", ["chief", "all"])
def test_the_cause_is_shown_first_however_late_its_process_ends(launcher, output):
    """The others' own errors follow from it; a hook of the script's own stays."""
    script = """
import atexit, itertools
import numpy as np
import kerasdist.cluster
from kerasdist.collectives import connect
from kerasdist.transport.liveness.failure_protocol import hand_over_final_error
from kerasdist.transport.deadline import Timeouts

job = connect(kerasdist.cluster.resolve(), timeouts=Timeouts(heartbeat=30.0))
mark(f"up-{rank}", os.getpid())

def steps(count=None):
    for step in itertools.count() if count is None else range(count):
        job.communicator.all_reduce([np.ones(100, np.float32)])

if rank == 2:
    sys.excepthook = lambda *error: print("my hook:", error[0].__name__)
hand_over_final_error()

def tidy_up():
    # As TensorFlow does: the process goes on when kerasdist has left already.
    for other in (0, 2):
        wait_for_end(Path(f"up-{other}").read_text())
    time.sleep(1.0)  # longer than the launcher waits for others
    os._exit(9)

if rank == 1:
    wait_for("up-0"), wait_for("up-2")
    # Handlers run in the reverse order: leaving as a strategy does comes first.
    atexit.register(tidy_up)
    atexit.register(lambda: job.close(getattr(sys, "last_value", None)))
    steps(5)
    raise ValueError("the real reason")
steps()
"""
    code, out, err = launcher.run(
        *("-n", 3, "--output", output, "script.py"),
        script=script,
        before="from kerasdist.cli.run import supervisor as s; "
        "s.LET_THEM_FAIL = 0.5; s.LET_CAUSE_END = 60",
    )
    assert code == 9, err
    assert "rank 1 failed with exit code 9; the other workers were ended" in err
    shown = err[err.index("the end of rank 1's output:") :]
    assert re.search(r"^Traceback [^\0]*\nValueError: the real reason$", shown, re.M)
    text = out + err
    assert "WorkerLost: Rank 1 " not in text[: text.index("ValueError: the real")]
    after = "kerasdist run: afterwards rank {} failed with exit code 1"
    assert f"{after.format(0)}: kerasdist.errors.WorkerLost: Rank 1 " in err
    assert f"{after.format(2)}\n" in err
    if output == "all":
        assert "[2] my hook: WorkerLost\n" in out
    else:
        assert err.count("Traceback") == 1, err
