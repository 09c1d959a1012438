"""`kerasdist run --elastic` with real processes; decisions are in `test_outcome.py`."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess

import pytest

from launching import wait_until_said


def begin(launcher, *options, script, servers=0, **more):
    process = launcher.start(
        *("-n", 3, "--ps", servers, "--elastic", *options, "script.py"),
        script=script,
        **more,
    )
    launcher.wait_for(*(f"up-{rank}-0" for rank in range(3)))
    launcher.wait_for(*(f"ps-{index}" for index in range(servers)))
    return process


def kill(launcher, task):
    (pid,) = launcher.pids(task)
    os.kill(pid, signal.SIGKILL)


# The members report as strategies do.
LINES = """
from kerasdist.transport.liveness.launcher_pipe import Reporter
mark(f"up-{rank}-0", os.getpid())
print(f"first of {rank}")
mark(f"printed-{rank}")
wait_for("killed")
print(f"second of {rank}")
Reporter("job", rank).members(1, [2, 1], step=1204, pause=0.25)
wait_for("shown")
print(f"third of {rank}")
wait_for("enough")
"""


def test_the_new_chiefs_output_takes_the_place_of_the_old_ones(launcher):
    process = begin(launcher, "--output", "all", script=LINES)
    launcher.wait_for("printed-0", "printed-1", "printed-2")
    kill(launcher, "up-0-0")
    wait_until_said(process, "rank 0 (")
    (launcher.folder / "killed").touch()
    assert wait_until_said(process, "is the chief") == (
        "kerasdist run: rank 2 is the chief from step 1204 on: its output is shown "
        "from here\n"
    )
    (launcher.folder / "shown").touch()
    code, out, err = launcher.finish(process)
    assert code == 0
    assert "is the chief" not in err  # once, though all members report it
    assert err.endswith("pauses: 1, 0.25 s in all\n")
    shown = [line for line in out.splitlines() if not line.startswith("[1]")]
    assert sorted(shown[:2]) == ["[2] first of 2", "first of 0"]
    assert shown[2] in ("second of 2", "[2] second of 2")
    assert shown[3:] == ["third of 2"]
    assert "[1] third of 1" in out


# The socket of the launcher is in use: the others connect.
LISTENING = """
import socket
incarnation = int(os.environ["KERASDIST_INCARNATION"])
server = socket.socket(fileno=int(os.environ["KERASDIST_LISTEN_FD"]))
mark(f"environ-{rank}-{incarnation}", json.dumps(dict(
    {name: os.environ[name] for name in (
        "TF_CONFIG", "KERASDIST_SECRET", "KERASDIST_ELASTIC", "KERASDIST_MIN_WORKERS")},
    listens=server.getsockname()[1], parent=os.getppid(), arguments=sys.argv[1:])))
print(f"output of {rank}, {incarnation}")
if rank == 2 and incarnation == 0 and os.fork() == 0:
    wait_for("never")  # it must not hold the port
mark(f"up-{rank}-{incarnation}", os.getpid())
if rank == 1:
    connection, _ = server.accept()
    connection.sendall(str(incarnation).encode())
wait_for("enough")
"""


@contextlib.contextmanager
def asking(launcher):
    (text,) = launcher.wait_for("environ-1-0")
    with socket.socket() as client:
        client.settimeout(20)
        code = client.connect_ex(("127.0.0.1", json.loads(text)["listens"]))
        yield os.strerror(code) if code else client.recv(100).decode()


def test_a_restarted_worker_has_its_task_and_its_listening_socket(launcher):
    process = begin(
        launcher,
        *("--restarts", 2, "--min-workers", 2, "--log-dir", "logs"),
        script=LISTENING,
        before="from kerasdist.cli.run import outcome; outcome.FIRST_PAUSE = 3",
    )
    with asking(launcher) as answer:
        assert answer == "0"
        # It ends first: its side of the connection lingers at its port.
        kill(launcher, "up-1-0")
    assert wait_until_said(process, "ended by signal") == (
        "kerasdist run: rank 1 (HOST) was ended by signal SIGKILL (9), sent by another "
        "process, or by the system when memory ran out; the others go on; it is "
        "started again in 3 s (restart 1 of 2)\n"
    )
    # Until then its port is closed, and no other process gets it.
    with asking(launcher) as answer:
        assert answer == "Connection refused"
    first, second = map(json.loads, launcher.wait_for("environ-1-0", "environ-1-1"))
    assert second == first
    assert first["KERASDIST_ELASTIC"] == "1"
    assert first["KERASDIST_MIN_WORKERS"] == "2"
    with asking(launcher) as answer:
        assert answer == "1"
    kill(launcher, "up-2-0")
    launcher.wait_for("up-2-1")
    code, _, err = launcher.finish(process)
    assert (code, err.splitlines()[-1]) == (
        0,
        "kerasdist run: finished: rank 0, rank 1, rank 2; lost: rank 1 (SIGKILL), rank "
        "2 (SIGKILL); started again: rank 1 (once), rank 2 (once)",
    )
    log = launcher.folder / "logs/rank-1.log"
    assert log.read_text() == "output of 1, 0\noutput of 1, 1\n"


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
    mark(f"up-{rank}-0" if kind == "worker" else f"ps-{rank}", os.getpid())
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
    process = begin(launcher, script=script, servers=2)
    launcher.wait_for("connected-0", "connected-1", "connected-2")
    kill(launcher, "up-0-0")
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
    incarnation = os.environ.get("KERASDIST_INCARNATION", "0")
    name = f"up-{rank}-{incarnation}" if kind == "worker" else f"ps-{rank}"
    mark(name, os.getpid())
    wait_for("never")
    """
    options = {"script": script, "servers": 2, "quick": True}
    process = begin(launcher, "--restarts", 3, **options)
    kill(launcher, "up-0-0")
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
    assert not (launcher.folder / "up-0-1").exists()
