"""`kerasdist run --elastic` with real processes: who ends, who is started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import textwrap

import pytest

from launching import launcher_in, terminals_of

pytestmark = pytest.mark.timeout(90)

KILLED = (
    "was ended by signal SIGKILL (9), sent by another process, or by the system when "
    "memory ran out"
)
# Each worker finishes when the test wants it.
UNTIL_ENOUGH = """
incarnation = int(os.environ["KERASDIST_INCARNATION"])
mark(f"up-{rank}-{incarnation}", os.getpid())
wait_for("enough")
"""


@pytest.fixture
def launcher(tmp_path):
    with launcher_in(tmp_path) as launcher:
        yield launcher


def begin(launcher, *options, script=UNTIL_ENOUGH, size=3):
    process = launcher.start(
        *("-n", size, "--elastic", *options, "script.py"), script=script
    )
    launcher.wait_for(*(f"up-{rank}-0" for rank in range(size)))
    return process


def finish(launcher, process):
    (launcher.folder / "enough").touch()
    out, err = process.communicate(timeout=40)
    launcher.nothing_runs(within=5.0)
    return process.returncode, out, err


def kill(launcher, rank, incarnation=0, number=signal.SIGKILL):
    (pid,) = launcher.pids(f"up-{rank}-{incarnation}")
    os.kill(pid, number)


def wait_until_said(process, text):
    """Read what the launcher says until this; return the line with ports left out."""
    for line in process.stderr:
        if text in line:
            begin, address, rest = line.partition("(127.0.0.1:")
            return f"{begin}(HOST){rest.partition(')')[2]}" if address else line
    raise AssertionError(f"{text!r} was never said")


# --- losses ---


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_doesnt_end_the_job_not_even_the_chief(launcher, rank):
    process = begin(launcher)
    kill(launcher, rank)
    assert wait_until_said(process, "ended by signal") == (
        f"kerasdist run: rank {rank} (HOST) {KILLED}; the others go on\n"
    )
    assert process.poll() is None
    code, _, err = finish(launcher, process)
    others = ", ".join(f"rank {other}" for other in range(3) if other != rank)
    assert (code, err) == (
        0,
        f"kerasdist run: finished: {others}; lost: rank {rank} (SIGKILL)\n",
    )
    assert launcher.temporary() == []


def test_a_worker_with_an_error_doesnt_end_the_job_and_its_error_is_shown(launcher):
    script = UNTIL_ENOUGH.replace(
        'wait_for("enough")',
        """
if rank == 1:
    print("the reason")
    sys.exit(3)
wait_for("enough")
""",
    )
    process = begin(launcher, script=script)
    assert wait_until_said(process, "exit code") == (
        "kerasdist run: rank 1 (HOST) failed with exit code 3; the others go on\n"
    )
    code, _, err = finish(launcher, process)
    assert code == 0
    assert err.splitlines() == [
        "kerasdist run: rank 1 left no traceback; the end of rank 1's output:",
        "the reason",
        "kerasdist run: finished: rank 0, rank 2; lost: rank 1 (exit code 3)",
    ]


def test_a_job_without_losses_ends_as_others_do(launcher):
    code, out, err = launcher.run(
        *("-n", 2, "--elastic", "--log-dir", "logs", "script.py"),
        script="""
        print("out", rank)
        print("err", rank, file=sys.stderr)
        """,
    )
    assert (code, out) == (0, "out 0\n")
    assert err == "kerasdist run: the others' output goes to logs/rank-1.log\nerr 0\n"
    assert (launcher.folder / "logs/rank-1.log").read_text() == "out 1\nerr 1\n"


def test_when_no_worker_finishes_the_first_cause_counts(launcher):
    process = begin(launcher)
    kill(launcher, 1)
    wait_until_said(process, "rank 1")
    kill(launcher, 0, number=signal.SIGTERM)
    wait_until_said(process, "rank 0")
    kill(launcher, 2)
    code, _, err = finish(launcher, process)
    assert code == 137
    assert f"rank 1 {KILLED}; the other workers were ended\n" in err
    assert f"afterwards rank 2 {KILLED}\n" in err
    assert err.splitlines()[-1] == (
        "kerasdist run: finished: none; left: rank 0; lost: rank 1 (SIGKILL), rank 2 "
        "(SIGKILL)"
    )


def test_a_worker_that_is_asked_to_leave_isnt_started_again(launcher):
    process = begin(launcher, "--restarts", 3)
    kill(launcher, 1, number=signal.SIGTERM)
    assert wait_until_said(process, "SIGTERM") == (
        "kerasdist run: rank 1 (HOST) was ended by signal SIGTERM (15); the others go "
        "on; it isn't started again\n"
    )
    code, _, err = finish(launcher, process)
    assert (code, err) == (
        0,
        "kerasdist run: finished: rank 0, rank 2; left: rank 1\n",
    )


def test_when_the_last_worker_is_asked_to_leave_that_is_the_cause(launcher):
    process = begin(launcher, size=2)
    kill(launcher, 0)
    wait_until_said(process, "rank 0")
    kill(launcher, 1, number=signal.SIGTERM)
    assert wait_until_said(process, "rank 1") == (
        "kerasdist run: rank 1 (HOST) was ended by signal SIGTERM (15)\n"
    )
    code, _, err = finish(launcher, process)
    assert (code, err) == (
        143,
        "kerasdist run: finished: none; left: rank 1; lost: rank 0 (SIGKILL)\n",
    )


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
    time.sleep(3)  # longer than in other jobs
    mark(f"left-{rank}", child.poll())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    """
    process = begin(launcher, script=script, size=2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    launcher.nothing_runs(within=5.0)
    assert process.returncode == 143
    assert err.endswith("kerasdist run: ended by SIGTERM; all workers are ended\n")
    assert launcher.wait_for("left-0", "left-1") == ["None", "None"]


def test_an_error_that_follows_from_a_loss_is_no_loss_that_others_survive(launcher):
    script = UNTIL_ENOUGH.replace(
        'wait_for("enough")',
        """
from kerasdist import errors
from kerasdist.transport.liveness.final_error import hand_over_final_error
hand_over_final_error()
wait_for_end(Path("up-1-0").read_text()) if rank != 1 else wait_for("never")
if rank == 2:
    wait_for_end(Path("up-0-0").read_text())
raise errors.WorkerLost(1, "host1:1", 7, "its connection was closed")
""",
    )
    process = begin(launcher, script=script)
    kill(launcher, 1)
    code, _, err = finish(launcher, process)
    assert code == 137
    (line,) = [line for line in err.splitlines() if "rank 0 (1" in line]
    assert line.endswith(" failed with exit code 1, because another task was lost")
    assert f"rank 1 {KILLED}; the other workers were ended\n" in err


def test_a_worker_that_is_no_member_any_more_is_ended_when_the_members_have(launcher):
    script = UNTIL_ENOUGH.replace(
        'wait_for("enough")',
        """
from kerasdist.transport.liveness.launcher_pipe import Reporter
if rank == 1:
    wait_for("never")
Reporter("job", rank).members(1, [0, 2], step=5, pause=0.5)
wait_for("enough")
""",
    )
    process = begin(launcher, script=script)
    code, _, err = finish(launcher, process)
    assert (code, err.splitlines()[-1]) == (
        0,
        "kerasdist run: finished: rank 0, rank 2; lost: rank 1 (ended by the "
        "launcher); pauses: 1, 0.50 s in all",
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_all_and_starts_nothing_again(launcher, number):
    # Rank 1 lives for longer than the pause before the restart.
    script = """
    if rank == 1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    """
    launcher.env["KERASDIST_GRACE_SECONDS"] = "1"
    process = begin(
        launcher, "--restarts", 3, script=textwrap.dedent(script) + UNTIL_ENOUGH
    )
    kill(launcher, 0)
    wait_until_said(process, "started again in 1 s")
    process.send_signal(number)
    _, err = process.communicate(timeout=40)
    launcher.nothing_runs(within=5.0)
    assert process.returncode == 128 + number
    assert err == f"kerasdist run: ended by {number.name}; all workers are ended\n"
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
    code, out, err = finish(launcher, process)
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


def test_the_chief_of_a_real_job_is_lost(launcher):
    script = """
    import numpy as np
    from kerasdist.cluster import resolve
    from kerasdist.collectives.elastic.connect import connect_elastic
    from kerasdist.transport.timeouts import Timeouts

    job = connect_elastic(resolve(None), timeouts=Timeouts(startup=30, heartbeat=5))
    mark(f"up-{rank}-0", os.getpid())
    while job.communicator.size == 3:
        job.communicator.all_reduce([np.ones(10, np.float32)])
        time.sleep(0.01)
    print("size", job.communicator.size, "of", rank)
    job.communicator.barrier()
    job.close()
    """
    process = begin(launcher, script=script)
    kill(launcher, 0)
    assert "rank 1 is the chief from step" in wait_until_said(process, "is the chief")
    code, out, err = finish(launcher, process)
    assert code == 0
    # A thread writes the warning.
    size, warning = sorted(out.splitlines(), reverse=True)
    assert size == "size 2 of 1"
    assert warning.startswith("kerasdist: rank 0 (127.0.0.1:")
    assert "was lost at step" in warning
    assert "finished: rank 1, rank 2; lost: rank 0 (SIGKILL); pauses: 1, " in err


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
    )
    assert ask(launcher) == "0"
    kill(launcher, 1)
    assert wait_until_said(process, "ended by signal") == (
        f"kerasdist run: rank 1 (HOST) {KILLED}; the others go on; it is started again "
        "in 1 s (restart 1 of 2)\n"
    )
    # Until then its port is closed, and no other process gets it.
    assert ask(launcher) == "Connection refused"
    first, second = map(json.loads, launcher.wait_for("environ-1-0", "environ-1-1"))
    assert second == first
    assert first["KERASDIST_ELASTIC"] == "1"
    assert first["KERASDIST_MIN_WORKERS"] == "2"
    assert ask(launcher) == "1"
    code, _, err = finish(launcher, process)
    assert (code, err) == (
        0,
        "kerasdist run: finished: rank 0, rank 1, rank 2; lost: rank 1 (SIGKILL); "
        "started again: rank 1 (once)\n",
    )
    log = launcher.folder / "logs/rank-1.log"
    assert log.read_text() == "output of 1, 0\noutput of 1, 1\n"


def test_restarts_are_counted_for_all_and_the_pauses_grow(launcher):
    process = begin(launcher, "--restarts", 3, size=2)
    kill(launcher, 1)
    assert "again in 1 s (restart 1 of 3)" in wait_until_said(process, "rank 1")
    launcher.wait_for("up-1-1")
    kill(launcher, 1, 1)
    assert "again in 2 s (restart 2 of 3)" in wait_until_said(process, "rank 1")
    kill(launcher, 0)
    assert "again in 1 s (restart 3 of 3)" in wait_until_said(process, "rank 0")
    launcher.wait_for("up-1-2", "up-0-1")
    kill(launcher, 1, 2)
    assert wait_until_said(process, "rank 1") == (
        f"kerasdist run: rank 1 (HOST) {KILLED}; the others go on\n"
    )
    code, _, err = finish(launcher, process)
    assert (code, err) == (
        0,
        "kerasdist run: finished: rank 0; lost: rank 0 (SIGKILL), rank 1 (SIGKILL, "
        "SIGKILL, SIGKILL); started again: rank 0 (once), rank 1 (2 times)\n",
    )


def test_when_a_worker_has_finished_none_is_started_again(launcher):
    script = UNTIL_ENOUGH.replace(
        'wait_for("enough")', 'wait_for("killed" if rank == 0 else "enough")'
    )
    process = begin(launcher, "--restarts", 3, script=script)
    kill(launcher, 1)
    wait_until_said(process, "started again in 1 s")
    (launcher.folder / "killed").touch()
    code, _, err = finish(launcher, process)
    assert (code, err) == (
        0,
        "kerasdist run: finished: rank 0, rank 2; lost: rank 1 (SIGKILL)\n",
    )
    assert not (launcher.folder / "up-1-1").exists()


def test_all_workers_may_be_started_again(launcher):
    script = UNTIL_ENOUGH + "print('end of', rank, incarnation)\n"
    process = begin(launcher, "--restarts", 2, script=script, size=2)
    kill(launcher, 0)
    kill(launcher, 1)
    launcher.wait_for("up-0-1", "up-1-1")
    code, out, err = finish(launcher, process)
    # Rank 0 is the chief again.
    assert (code, out) == (0, "end of 0 1\n")
    assert err.splitlines()[-1] == (
        "kerasdist run: finished: rank 0, rank 1; lost: rank 0 (SIGKILL), rank 1 "
        "(SIGKILL); started again: rank 0 (once), rank 1 (once)"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_child_of_a_lost_worker_doesnt_hold_its_port(launcher, rank):
    script = (
        f"""
if rank == {rank} and os.environ["KERASDIST_INCARNATION"] == "0":
    if os.fork() == 0:
        mark("child", os.getpid())
        wait_for("never")
    wait_for("child")
"""
        + UNTIL_ENOUGH
    )
    process = begin(launcher, "--restarts", 1, script=script)
    kill(launcher, rank)
    launcher.wait_for(f"up-{rank}-1")
    code, _, err = finish(launcher, process)
    assert code == 0, err
    assert f"started again: rank {rank} (once)" in err


def test_ctrl_c_on_a_terminal_reaches_a_restarted_chief_once(launcher):
    script = """
    mark(f"up-{rank}-" + os.environ["KERASDIST_INCARNATION"], os.getpid())
    try:
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


# --- what can't be started ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--restarts", 1], "Received: --restarts 1 without --elastic"),
        (["--min-workers", 1], "Received: --min-workers 1 without --elastic"),
        (["--elastic", "--min-workers", 3], "Received: --min-workers 3 and -n 2"),
        (["--max-workers", 3], "Received: --max-workers 3 without --elastic"),
        (["--elastic", "--max-workers", 1], "Received: --max-workers 1 and -n 2"),
        (["--elastic", "--min-workers", 0], "--min-workers must be an integer >= 1"),
        (["--elastic", "--restarts", "x"], "Received: --restarts x"),
    ],
)
def test_options_that_dont_fit_are_refused(launcher, options, said):
    code, out, err = launcher.run(
        "-n", 2, *options, "script.py", script="mark('started')"
    )
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("usage: kerasdist run")
    assert not (launcher.folder / "started").exists()


# --- with `fit` ---

FIT = """
import keras
import numpy as np
import kerasdist

strategy = kerasdist.RingStrategy()
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(640, 8)).astype("float32")
y = x[:, :3].argmax(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1)
        mark(f"stepped-{rank}")


history = model.fit(x, y, batch_size=64, epochs=4, verbose=0, callbacks=[Slow()])
print("EPOCHS", history.epoch, strategy.size)
"""


@pytest.mark.soak
def test_the_next_start_continues_after_a_signal_to_the_launcher(launcher):
    options = ("--elastic", "script.py")
    process = launcher.start("-n", 2, *options, script=FIT)
    launcher.wait_for("stepped-0", "stepped-1")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "The next start of this script continues there" in out + err
    code, out, err = launcher.run("-n", 3, *options, script=FIT)
    assert code == 0, err
    assert "EPOCHS [0, 1, 2, 3] 3\n" in out
    assert "`fit` continues after step" in out + err
    assert list((launcher.folder / ".kerasdist").iterdir()) == []
