"""`kerasdist run --elastic` with real processes; decisions are in `test_outcome.py`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket

import pytest

from launching import wait_until_said

pytestmark = pytest.mark.timeout(90)


def begin(launcher, *options, script, size=3, **more):
    process = launcher.start(
        *("-n", size, "--elastic", *options, "script.py"), script=script, **more
    )
    launcher.wait_for(*(f"up-{rank}-0" for rank in range(size)))
    return process


def kill(launcher, rank, incarnation=0, number=signal.SIGKILL):
    (pid,) = launcher.pids(f"up-{rank}-{incarnation}")
    os.kill(pid, number)


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


@pytest.mark.parametrize("output", ["chief", "all"])
def test_the_new_chiefs_output_takes_the_place_of_the_old_ones(launcher, output):
    process = begin(launcher, "--output", output, script=LINES)
    launcher.wait_for("printed-0", "printed-1", "printed-2")
    kill(launcher, 0)
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
    if output == "chief":
        assert shown == ["first of 0", "second of 2", "third of 2"]
    else:
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
        kill(launcher, 1)
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
    kill(launcher, 2)
    launcher.wait_for("up-2-1")
    code, _, err = launcher.finish(process)
    assert (code, err.splitlines()[-1]) == (
        0,
        "kerasdist run: finished: rank 0, rank 1, rank 2; lost: rank 1 (SIGKILL), rank "
        "2 (SIGKILL); started again: rank 1 (once), rank 2 (once)",
    )
    log = launcher.folder / "logs/rank-1.log"
    assert log.read_text() == "output of 1, 0\noutput of 1, 1\n"
