"""`kerasdist run` blames the rank that the workers blame, whoever ends first."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from kerasdist import errors
from kerasdist.cli.run.job import JobSpec
from kerasdist.cli.run.outcome import JobOutcome
from kerasdist.cli.run.spawn import Started
from kerasdist.transport.liveness.launcher_pipe import Reporter, ServerReporter
from launching import launcher_in

pytestmark = pytest.mark.timeout(90)

CONNECTED = """
import atexit, itertools, threading
import numpy as np
import kerasdist.cluster
from kerasdist import errors
from kerasdist.collectives import connect
from kerasdist.transport.timeouts import Timeouts

job = connect(kerasdist.cluster.resolve(), timeouts=Timeouts(heartbeat=3.0))

def tidy_up(seconds):
    # As TensorFlow does: the process goes on when kerasdist has left already.
    threading.Event().wait(seconds)
    mark(f"tidied-{rank}")

def end_slowly(seconds):
    # Handlers run in the reverse order: leaving as a strategy does comes first.
    atexit.register(tidy_up, seconds)
    atexit.register(lambda: job.close(getattr(sys, "last_value", None)))

def steps(count=None):
    for step in itertools.count() if count is None else range(count):
        job.communicator.all_reduce([np.ones(100, np.float32)])
"""


@pytest.fixture
def launcher(tmp_path):
    with launcher_in(tmp_path) as launcher:
        yield launcher


def run(launcher, script, size=2, output="chief"):
    return launcher.run(
        *("-n", size, "--output", output, "script.py"), script=CONNECTED + script
    )


@pytest.mark.parametrize("slowly", ["", "end_slowly(1.0)"])
def test_a_rank_that_exits_is_to_blame(launcher, slowly):
    code, _, err = run(
        launcher,
        f"""
if rank == 1:
    {slowly}
    steps(5)
    print("I go")
    sys.exit(7)
steps()
""",
    )
    assert code == 7, err
    assert "rank 1 failed with exit code 7; the other workers were ended" in err
    assert "afterwards rank 0 failed with exit code 1" in err
    assert "rank 1 left no traceback; the end of rank 1's output:\nI go\n" in err


@pytest.mark.parametrize("output", ["chief", "all"])
def test_a_rank_that_takes_long_to_end_is_to_blame(launcher, output):
    code, _, err = run(
        launcher,
        """
if rank == 1:
    end_slowly(2.0)
    steps(5)
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), mark("failed"))
    raise ValueError("the real reason")
steps()
""",
        size=3,
        output=output,
    )
    assert code == 1, err
    launcher.wait_for("tidied-1")
    assert "rank 1 failed with exit code 1; the other workers were ended" in err
    for other in (0, 2):
        assert f"afterwards rank {other} failed with exit code 1" in err
    shown = err[err.index("the end of rank 1's output:") :]
    assert re.search(r"^Traceback [^\0]*\nValueError: the real reason$", shown, re.M)
    assert "WorkerLost" not in shown


def test_its_own_code_is_returned_however_late(launcher):
    code, _, err = run(
        launcher,
        """
if rank == 1:
    atexit.register(os._exit, 9)
    end_slowly(2.0)
    steps(5)
    raise ValueError("the real reason")
steps()
""",
    )
    assert code == 9, err
    assert "rank 1 failed with exit code 9" in err
    assert "\nValueError: the real reason\n" in err


@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_rank_is_to_blame(launcher, size):
    code, _, err = run(
        launcher,
        """
if rank == 1:
    steps(5)
    os.kill(os.getpid(), signal.SIGKILL)
steps()
""",
        size=size,
    )
    assert code == 137, err
    assert "rank 1 was ended by signal SIGKILL (9)" in err


def test_the_chief_is_to_blame(launcher):
    # Rank 1 ends before it, by a traceback of its own making.
    code, _, err = run(
        launcher,
        """
if rank == 0:
    atexit.register(os._exit, 5)
    end_slowly(1.0)
    steps(5)
    raise KeyError("chief")
steps()
""",
    )
    assert code == 5, err
    assert "rank 0 failed with exit code 5; the other workers were ended" in err
    assert err.count("KeyError: 'chief'") == 1
    assert "the end of" not in err


def test_a_rank_that_ended_well_but_too_early_is_named(launcher):
    code, _, err = run(launcher, "steps(5 if rank == 1 else None)")
    assert code == 1, err
    assert "rank 0 failed with exit code 1" in err
    assert "before that, rank 1 ended with code 0 while others still needed it" in err


def test_a_frozen_rank_is_named_and_ended(launcher):
    process = launcher.start(
        *("-n", 3, "script.py"),
        script=CONNECTED
        + """
mark(f"up-{rank}", os.getpid())
try:
    steps()
except errors.WorkerLost:
    mark(f"lost-{rank}", time.monotonic())
    raise
""",
    )
    _, first, _ = launcher.pids("up-0", "up-1", "up-2")
    os.kill(first, signal.SIGSTOP)
    _, err = process.communicate(timeout=60)
    ended = time.monotonic()
    assert process.returncode == 1, err
    assert ended - min(map(float, launcher.wait_for("lost-0", "lost-2"))) < 20.0
    assert "before that, rank 1 was lost to the others, and had to be ended" in err
    launcher.nothing_runs(within=5.0)


def test_workers_that_trap_sigterm_are_ended_in_time_too(launcher):
    code, _, err = run(
        launcher,
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 1:
    end_slowly(60.0)
    steps(5)
    mark("failed", time.monotonic())
    raise ValueError("the real reason")
try:
    steps()
except errors.WorkerLost:
    if rank == 2:
        wait_for("never")
    raise
""",
        size=3,
    )
    ended = time.monotonic()
    assert code == 1, err
    assert ended - float(launcher.wait_for("failed")[0]) < 20.0
    assert "before that, rank 1 was lost to the others, and had to be ended" in err
    # It hasn't ended by itself, and yet said why.
    shown = err[err.index("the end of rank 1's output:") :]
    assert "\nValueError: the real reason\n" in shown


def test_where_no_rank_is_to_blame_the_order_counts(launcher):
    code, _, err = run(
        launcher,
        """
steps(3)
try:
    job.communicator.all_reduce([np.ones(10 + rank, np.float32)])
except errors.CollectiveMismatch:
    if rank == 0:
        wait_for("gone")
    else:
        mark("gone")
    os._exit(3 + rank)
""",
    )
    assert code in (3, 4), err
    assert "before that" not in err


def test_an_earlier_job_of_the_script_counts_no_more(launcher):
    code, _, err = run(
        launcher,
        """
try:
    steps(5 if rank == 1 else None)
except errors.WorkerLost as error:
    mark(f"lost-{rank}", error.rank)
job.close()
job = connect(kerasdist.cluster.resolve())
if rank == 2:
    atexit.register(os._exit, 8)
    end_slowly(1.0)
    steps(5)
    sys.exit(1)
steps()
""",
        size=3,
    )
    assert launcher.wait_for("lost-0", "lost-2") == ["1", "1"]
    assert code == 8, err
    assert "rank 2 failed with exit code 8" in err


def test_the_scripts_processes_have_no_part_in_it(launcher):
    code, out, err = launcher.run(
        *("-n", 2, "script.py"),
        script=CONNECTED
        + """
if rank == 0:
    fd = int(os.environ["KERASDIST_REPORT_FD"].partition(":")[0])
    os.fstat(fd)
    print(json.dumps(os.system(f"test -e /proc/self/fd/{fd}") != 0))
steps(5)
job.communicator.barrier()
job.close()
""",
    )
    assert code == 0, err
    assert json.loads(out) is True


# --- decisions, without processes ---

LOST = errors.WorkerLost(1, "host1:1", 7, "its connection was closed")
SERVER_LOST = errors.ServerLost(1, "host9:1", 7, "its connection was closed")
MISMATCH = errors.CollectiveMismatch("Ranks differ.")


@pytest.fixture
def outcome_of():
    """A job's outcome, its workers and its servers."""
    pipes = []

    def make(workers, servers=0):
        job = JobSpec(
            **{"size": workers, "servers": servers, "command": (), "environ": {}},
            **{"log_dir": None, "tagged": False, "cores": ()},
        )
        tasks = [Started(task=task, process=None, tail=None) for task in job.tasks]
        outcome = JobOutcome(job, tasks)
        pipes.append(outcome.pipe)
        return outcome, tasks[:workers], tasks[workers:]

    yield make
    for pipe in pipes:
        os.close(pipe.reading)
        os.close(pipe.writing)


def end(task, at, code=1, traceback_at=None, folder=None):
    """Let a task end at a time, maybe with a traceback in its log at another."""
    task.code, task.ended_at = code, at
    if traceback_at is not None:
        task.log = folder / f"{task.task.tag}.log"
        task.log.write_text("Traceback (most recent call last):\nValueError: 1")
        os.utime(task.log, ns=(traceback_at, traceback_at))


def report(outcome, rank, error, job="a.1"):
    Reporter(job, rank, outcome.pipe.environ).failed(error)
    outcome.read()


def test_the_first_failure_is_the_reported_cause_or_else_the_earliest(
    outcome_of, tmp_path
):
    outcome, tasks, _ = outcome_of(4)
    assert outcome.first_failure() is None
    chief, quiet, other, follows = tasks
    end(chief, 50)
    end(quiet, 90, code=7)
    assert outcome.first_failure() is chief
    end(other, 60, traceback_at=30, folder=tmp_path)
    assert outcome.first_failure() is other
    end(follows, 40, traceback_at=20, folder=tmp_path)
    assert outcome.first_failure() is follows
    report(outcome, 3, errors.WorkerLost(9, "h:1", 7, "it has ended well"))
    assert outcome.first_failure() is other
    report(outcome, 3, LOST, job="a.2")
    assert outcome.first_failure() is quiet


def test_a_time_after_the_end_is_no_time_of_a_traceback(outcome_of, tmp_path):
    outcome, (first, second), _ = outcome_of(2)
    end(first, 50)
    # Another process may write to its log.
    end(second, 40, traceback_at=80, folder=tmp_path)
    assert outcome.first_failure() is second


def test_a_server_that_gave_up_isnt_the_first(outcome_of):
    outcome, (worker,), (server,) = outcome_of(1, 1)
    end(server, 40)
    end(worker, 50, code=6)
    assert outcome.first_failure() is server
    ServerReporter(0, outcome.pipe.environ).gave_up()
    outcome.read()
    assert outcome.first_failure() is worker


def test_the_first_word_on_the_last_job_counts(outcome_of):
    outcome, workers, servers = outcome_of(3, 2)
    assert outcome.cause is None
    report(outcome, 0, LOST)
    assert outcome.cause is workers[1]
    # Rank 2 has only seen that rank 0 was gone.
    report(outcome, 2, errors.WorkerLost(0, "host0:1", 7, "gone"))
    assert outcome.cause is workers[1]
    report(outcome, 1, errors.WorkerLost(2, "host2:1", 9, "gone"), job="a.2")
    assert outcome.cause is workers[2]
    report(outcome, 1, MISMATCH, job="a.3")
    assert outcome.cause is None
    report(outcome, 0, SERVER_LOST, job="a.4")
    assert outcome.cause is servers[1]


def test_a_job_goes_on_when_all_servers_have_said_so_until_one_fails(outcome_of):
    outcome, _, _ = outcome_of(2, 2)
    first, second = (ServerReporter(i, outcome.pipe.environ) for i in range(2))
    seen = []
    for say in (
        lambda: first.begun(0.0),
        lambda: first.begun(0.0),
        lambda: second.begun(5.0),
        lambda: first.happened("lost", 1, "it was gone"),
        lambda: second.failed(MISMATCH),
    ):
        say()
        outcome.read()
        seen.append(outcome.continues)
    assert seen == [False, False, True, True, False]


@pytest.mark.parametrize(("patience", "code"), [(0.0, -9), (5.0, 1), (5.0, -9)])
def test_only_a_killed_server_may_be_started_again(outcome_of, patience, code):
    outcome, _, (server,) = outcome_of(1, 1)
    ServerReporter(0, outcome.pipe.environ).begun(patience)
    end(server, 10, code=code)
    goes_on = patience > 0 and code < 0
    assert outcome.fails_with(server) is not goes_on
    assert server.lost is goes_on


def test_who_was_lost_before_is_no_witness(outcome_of):
    outcome, workers, _ = outcome_of(3, 2)
    reporters = [ServerReporter(i, outcome.pipe.environ) for i in range(2)]
    for reporter in reporters:
        reporter.begun(0.0)
    # Whichever server sees it first.
    reporters[1].happened("lost", 1, "nothing was received from it")
    report(outcome, 1, SERVER_LOST)
    assert workers[1].gave_up
    assert outcome.cause is None
    assert outcome.continues
    report(outcome, 2, LOST)
    assert outcome.cause is workers[1]
    assert not outcome.continues  # rank 2 has lost what it needs


# --- what a person reads first ---

HANDED_OVER = """
from kerasdist.transport.liveness.final_error import hand_over_final_error
hand_over_final_error()
"""


@pytest.mark.parametrize("output", ["chief", "all"])
def test_the_cause_is_read_before_what_follows_from_it(launcher, output):
    # The chief's traceback of its WorkerLost once filled the screen first.
    code, out, err = run(
        launcher,
        f"""
{HANDED_OVER}
if rank == 1:
    steps(5)
    raise ValueError("the real reason")
steps()
""",
        size=3,
        output=output,
    )
    assert code == 1, err
    if output == "chief":
        assert err.count("Traceback") == 1, err
    text = out + err
    assert "WorkerLost" not in text[: text.index("ValueError: the real reason")]
    for other in (0, 2):
        told = rf"^kerasdist run: afterwards rank {other} failed with exit code 1"
        assert re.search(told, err, re.M), err
    assert re.search(
        r"^kerasdist run: afterwards rank 0 .*: kerasdist\.errors\.WorkerLost: Rank 1 ",
        err,
        re.M,
    )


def test_an_error_that_all_ranks_raise_is_printed_once(launcher):
    code, _, err = run(
        launcher,
        f"""
{HANDED_OVER}
steps(5)
end_slowly(0.5 if rank == 0 else 0.0)
raise ValueError("the data differ on all ranks")
""",
    )
    assert code == 1, err
    assert len(re.findall(r"^ValueError: the data differ", err, re.M)) == 1, err


def test_an_own_hook_of_the_script_stays(launcher):
    code, _, err = run(
        launcher,
        f"""
sys.excepthook = lambda *error: print("my hook:", error[0].__name__, file=sys.stderr)
{HANDED_OVER}
if rank == 1:
    steps(5)
    raise ValueError("the real reason")
steps()
""",
    )
    assert code == 1, err
    assert "my hook: WorkerLost" in err


def test_a_chief_that_fails_alone_shows_what_it_lost(launcher):
    code, _, err = run(
        launcher,
        f"""
{HANDED_OVER}
if rank == 1:
    steps(5)
    job.close()
    sys.exit(0)
steps()
""",
    )
    assert code == 1, err
    assert "WorkerLost: Rank 1 " in err
