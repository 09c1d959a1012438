"""`kerasdist run --elastic` with real processes; decisions are in `test_outcome.py`."""

from __future__ import annotations

import json
import os
import signal
import socket

import pytest

from launching import terminals_of, wait_until_said
from pace import bound

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


# --- losses ---


def test_a_signal_to_the_launcher_lets_the_workers_leave(launcher):
    """They have more time, and their children aren't signalled meanwhile."""
    script = """
    import subprocess
    child = subprocess.Popen(["sleep", "60"])
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    mark(f"up-{rank}-0", os.getpid())
    while not asked:
        time.sleep(0.01)
    time.sleep(1)  # longer than in other jobs
    mark(f"left-{rank}", child.poll())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    """
    process = begin(launcher, script=script, size=2, quick=True)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=bound(60))
    launcher.nothing_runs(within=5.0)
    assert process.returncode == 143
    assert err.endswith("kerasdist run: ended by SIGTERM; all workers are ended\n")
    assert launcher.wait_for("left-0", "left-1") == ["None", "None"]


PAUSE = "from kerasdist.cli.run import outcome; outcome.FIRST_PAUSE = 3"


def test_a_signal_to_the_launcher_starts_nothing_again(launcher):
    # Rank 1 lives for longer than the pause before the restart.
    script = """
    if rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark(f"up-{rank}-" + os.environ["KERASDIST_INCARNATION"], os.getpid())
    wait_for("never")
    """
    launcher.env["KERASDIST_GRACE_SECONDS"] = "2"
    process = begin(launcher, "--restarts", 3, script=script, before=PAUSE)
    kill(launcher, 0)
    wait_until_said(process, "started again in 3 s")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=bound(60))
    launcher.nothing_runs(within=5.0)
    assert process.returncode == 143
    assert err == "kerasdist run: ended by SIGTERM; all workers are ended\n"
    assert not (launcher.folder / "up-0-1").exists()


# --- the chief's output ---

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


# --- restarts ---

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


def ask(launcher):
    """Connect to rank 1, as other workers do; return its answer, or the error."""
    (text,) = launcher.wait_for("environ-1-0")
    with socket.socket() as client:
        client.settimeout(20)
        code = client.connect_ex(("127.0.0.1", json.loads(text)["listens"]))
        return os.strerror(code) if code else client.recv(100).decode()


def test_a_restarted_worker_has_its_task_and_its_listening_socket(launcher):
    process = begin(
        launcher,
        *("--restarts", 2, "--min-workers", 2, "--log-dir", "logs"),
        script=LISTENING,
        before=PAUSE,
    )
    assert ask(launcher) == "0"
    kill(launcher, 1)
    assert wait_until_said(process, "ended by signal") == (
        "kerasdist run: rank 1 (HOST) was ended by signal SIGKILL (9), sent by another "
        "process, or by the system when memory ran out; the others go on; it is "
        "started again in 3 s (restart 1 of 2)\n"
    )
    # Until then its port is closed, and no other process gets it.
    assert ask(launcher) == "Connection refused"
    first, second = map(json.loads, launcher.wait_for("environ-1-0", "environ-1-1"))
    assert second == first
    assert first["KERASDIST_ELASTIC"] == "1"
    assert first["KERASDIST_MIN_WORKERS"] == "2"
    assert ask(launcher) == "1"
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


def test_ctrl_c_on_a_terminal_reaches_a_restarted_chief_once(launcher):
    script = """
    incarnation = os.environ["KERASDIST_INCARNATION"]
    if (rank, incarnation) == (0, "0") and os.fork() == 0:
        wait_for("never")  # it must not hold the port
    try:
        mark(f"up-{rank}-{incarnation}", os.getpid())  # from then on Ctrl-C may come
        wait_for("never")
    except KeyboardInterrupt:
        time.sleep(0.3)  # a second one would break this off
        mark(f"tidied-{rank}")
        raise
    """
    with terminals_of(launcher) as terminal:
        opened = terminal(
            *("-n", 2, "--elastic", "--restarts", 1, "script.py"), script=script
        )
        kill(launcher, 0)
        launcher.wait_for("up-0-1", "up-1-0")
        os.write(opened.fd, b"\x03")
        opened.read()
        assert opened.wait() == 130
        launcher.wait_for("tidied-0", "tidied-1")
        launcher.nothing_runs(within=5.0)
