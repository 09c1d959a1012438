"""`kerasdist run` with real processes, signals and terminals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kerasdist.cli.allocator import find_allocator
from kerasdist.cli.run.exits import exit_code, in_words
from kerasdist.cli.run.output import LineTagger, WholeLines, end_of, last_traceback
from kerasdist.cli.run.processes import descendants
from kerasdist.cli.run.start.cores import cores_in_order, shares, thread_variables
from launching import HANG, launcher_in, terminals_of
from waiting import wait_until
from workers import python_env

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def launcher(tmp_path):
    with launcher_in(tmp_path) as launcher:
        yield launcher


# --- who am I ---


def test_each_worker_has_its_settings_and_listening_socket(launcher):
    launcher.env["OTHER"] = "kept"
    code, _, err = launcher.run(
        *("-n", 3, "--", "script.py", "--epochs", "3", "-n", "x", "--"),
        script="""
        import socket
        server = socket.socket(fileno=int(os.environ["KERASDIST_LISTEN_FD"]))
        mark(f"is-{rank}", json.dumps({
            "config": config, "secret": os.environ["KERASDIST_SECRET"],
            "args": sys.argv[1:], "listens": server.getsockname(),
            "accepts": server.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN),
            "unbuffered": os.environ["PYTHONUNBUFFERED"], "path": sys.path[0],
            "other": os.environ["OTHER"], "executable": sys.executable,
        }))
        """,
    )
    assert code == 0, err
    found = [json.loads(t) for t in launcher.wait_for("is-0", "is-1", "is-2")]
    addresses = found[0]["config"]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    for rank, each in enumerate(found):
        assert each["config"] == {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": rank},
        }
        assert addresses[rank] == f"127.0.0.1:{each['listens'][1]}"
        assert each["accepts"] == 1
        assert each["args"] == ["--epochs", "3", "-n", "x", "--"]
        assert each["unbuffered"] == "1"
        assert each["other"] == "kept"
        assert each["executable"] == sys.executable
        assert each["path"] == str(launcher.folder)
    assert re.fullmatch("[0-9a-f]{64}", found[0]["secret"])
    assert len({each["secret"] for each in found}) == 1


def test_servers_run_the_same_script_after_the_workers(launcher):
    code, out, err = launcher.run(
        *("-n", 2, "--ps", 2, "--bind", "cores", "--log-dir", "logs", "script.py"),
        script="""
        import socket
        server = socket.socket(fileno=int(os.environ["KERASDIST_LISTEN_FD"]))
        mark(f"is-{config['task']['type']}-{rank}", json.dumps({
            "config": config, "port": server.getsockname()[1],
            "secret": os.environ["KERASDIST_SECRET"],
            "cores": sorted(os.sched_getaffinity(0))}))
        print("out", config["task"]["type"], rank)
        """,
    )
    assert (code, out) == (0, "out worker 0\n"), err
    names = [f"is-{kind}-{index}" for kind in ("worker", "ps") for index in range(2)]
    found = [json.loads(text) for text in launcher.wait_for(*names)]
    cluster = found[0]["config"]["cluster"]
    addresses = [*cluster["worker"], *cluster["ps"]]
    assert list(map(len, cluster.values())) == [2, 2]
    assert addresses == [f"127.0.0.1:{each['port']}" for each in found]
    assert len({each["secret"] for each in found}) == 1
    assert all(each["config"]["cluster"] == cluster for each in found)
    places = [each["config"]["task"] for each in found]
    assert [(place["type"], place["index"]) for place in places] == [
        ("worker", 0),
        ("worker", 1),
        ("ps", 0),
        ("ps", 1),
    ]
    # Workers share the cores; servers may use all.
    cores = [tuple(each["cores"]) for each in found]
    assert cores[:2] == [tuple(sorted(s)) for s in shares(cores_in_order(), 2)]
    assert cores[2:] == [tuple(sorted(os.sched_getaffinity(0)))] * 2
    logs = launcher.folder / "logs"
    assert sorted(os.listdir(logs)) == ["ps-0.log", "ps-1.log", "rank-1.log"]
    assert (logs / "ps-1.log").read_text() == "out ps 1\n"
    assert f"the others' output goes to {Path('logs/rank-1.log')} ... ps-1.log\n" in err


def test_every_job_has_a_fresh_secret_unless_the_user_has_one(launcher):
    script = "print(os.environ['KERASDIST_SECRET'])"
    first, second = (launcher.run("-n", 1, "script.py", script=script) for _ in "ab")
    assert first[1] != second[1]
    launcher.env["KERASDIST_SECRET"] = mine = "a secret of my own"
    assert launcher.run("-n", 1, "script.py", script=script)[:2] == (0, f"{mine}\n")
    launcher.env["KERASDIST_SECRET"] = "mine"
    code, out, err = launcher.run("-n", 1, "script.py", script=script)
    assert (code, out) == (2, "")
    assert "KERASDIST_SECRET is too short. Received: 4 bytes, expected at least" in err


def test_a_dead_workers_port_is_closed(launcher):
    code, out, err = launcher.run(
        *("-n", 2, "script.py"),
        script="""
        import socket
        host, port = config["cluster"]["worker"][1].split(":")
        if rank == 1:
            os.close(int(os.environ["KERASDIST_LISTEN_FD"]))
            mark("closed")
            wait_for("asked")
        else:
            wait_for("closed")
            with socket.socket() as client:
                print(client.connect_ex((host, int(port))) != 0)
            mark("asked")
        """,
    )
    assert (code, out) == (0, "True\n"), err


def test_a_module(launcher):
    package = launcher.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    for before in ([], ["--"]):
        code, out, err = launcher.run(
            "-n", 2, *before, "-m", "package.train", "-n", "--x", "--"
        )
        assert (code, out) == (0, "__main__ ['-n', '--x', '--']\n"), err


def test_a_tf_config_of_the_environment_is_replaced_and_said(launcher):
    launcher.env["TF_CONFIG"] = '{"cluster": {}}'
    code, out, err = launcher.run("-n", 1, "script.py", script="print(rank)")
    assert (code, out) == (0, "0\n")
    assert "TF_CONFIG is set, and is replaced" in err


# --- what can't be started ---


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-n", 0, "script.py"], "-n must be an integer >= 1. Received: -n 0"),
        (["-n", "two", "script.py"], "-n must be an integer >= 1. Received: -n two"),
        (
            ["-n", 2, "--ps", -1, "script.py"],
            "--ps must be an integer >= 0. Received: ",
        ),
        (["-n", 2, "--ps", "x", "script.py"], "Received: --ps x"),
        (["-n", 2, "none.py"], "there is no script 'none.py'"),
        (["-n", 2, "."], ". is a folder without a __main__.py"),
        (["-n", 2, "-m", "no_such.module"], "there is no module 'no_such.module'"),
        (["-n", 2, "-m", "json.none"], "there is no module 'json.none'"),
        (["-n", 2, "-m"], "-m must be followed by the name of a module"),
        (["-n", 2], "expected a script"),
        (["script.py"], "-n, the number of workers, is missing"),
        (["-n", 2, "--bind", "x", "script.py"], "invalid choice: 'x'"),
        (["-n", 2, "--malloc", "x", "script.py"], "'none', 'auto' or the path"),
        (["-n", 2, "--malloc", "./x.so", "script.py"], "which can't be read"),
        (
            ["-n", 2, "--log-dir", "script.py", "script.py"],
            "--log-dir must be a folder",
        ),
        (["-n", 2, "--color", "script.py"], "kerasdist run: error: unrecognized"),
        (
            ["-n", 2, "--color", "script.py"],
            "usage: kerasdist run (-n N | -H HOSTS) [options]",
        ),
        (["-n", 2, "python", "none.py"], "there is no script 'none.py'"),
    ],
)
def test_mistakes_are_said_before_anything_starts(launcher, args, said):
    code, out, err = launcher.run(*args, script="mark('started')")
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
    assert not (launcher.folder / "started").exists()
    assert launcher.temporary() == []


@pytest.mark.parametrize(
    "command",
    [
        ("python", "script.py"),
        ("python3.11", "-m", "script"),
        ("python3", "-u", "script.py"),
    ],
)
def test_an_interpreter_before_the_script_is_left_out(launcher, command):
    code, out, err = launcher.run("-n", 1, *command, "x", script="print(sys.argv[1:])")
    assert (code, out) == (0, "['x']\n"), err


def test_all_mistakes_are_said_at_once(launcher):
    code, _, err = launcher.run("-n", 0, "none.py")
    assert code == 2
    assert "-n must be" in err
    assert "there is no script" in err


# --- output ---

SPEAK = """
print("out", rank)
print("err", rank, file=sys.stderr)
"""


def test_the_chiefs_output_passes_and_the_others_goes_to_logs(launcher):
    code, out, err = launcher.run(
        "-n", 3, "--log-dir", "a/b", "script.py", script=SPEAK
    )
    assert (code, out) == (0, "out 0\n")
    assert "err 0\n" in err
    assert "err 1" not in err
    logs = launcher.folder / "a" / "b"
    assert sorted(os.listdir(logs)) == ["rank-1.log", "rank-2.log"]
    for rank in (1, 2):
        text = (logs / f"rank-{rank}.log").read_text()
        assert text == f"out {rank}\nerr {rank}\n"


def test_temporary_logs_are_named_and_removed_after_success(launcher):
    script = SPEAK + "mark('log', os.readlink('/proc/self/fd/1')) if rank else 0"
    code, _, err = launcher.run("-n", 2, "script.py", script=script)
    assert code == 0
    (log,) = launcher.wait_for("log")
    assert f"the others' output goes to {log}\n" in err
    assert launcher.temporary() == []


def test_temporary_logs_are_kept_after_a_failure(launcher):
    script = SPEAK + "sys.exit(4 if rank == 1 else 0)"
    code, _, err = launcher.run("-n", 2, "script.py", script=script)
    assert code == 4
    (folder,) = launcher.temporary()
    assert (folder / "rank-1.log").read_text() == "out 1\nerr 1\n"
    assert f"all of its output: {folder / 'rank-1.log'}\n" in err


def test_tagged_output(launcher):
    code, out, err = launcher.run(
        *("-n", 3, "--output", "all", "script.py"),
        script="if rank == 0: sys.exit()\n"
        + SPEAK
        + "print('10%\\r20%\\r30%\\nno end', end='')",
    )
    assert code == 0
    lines = out.splitlines()
    for rank in (1, 2):
        tagged = [line for line in lines if line.startswith(f"[{rank}]")]
        assert tagged == [
            f"[{rank}] out {rank}",
            f"[{rank}] err {rank}",
            f"[{rank}] 30%",
            f"[{rank}] no end",
        ]
    assert len(lines) == 8
    assert "err 1" not in err
    assert launcher.temporary() == []


def test_tagged_output_of_servers(launcher):
    code, out, _ = launcher.run(
        *("-n", 1, "--ps", 1, "--output", "all", "script.py"),
        script="print('out', config['task']['type'])",
    )
    assert code == 0
    assert sorted(out.splitlines()) == ["[ps 0] out ps", "out worker"]


def test_tagged_output_and_logs(launcher):
    code, out, _ = launcher.run(
        "-n", 2, "--output", "all", "--log-dir", "logs", "script.py", script=SPEAK
    )
    assert code == 0
    assert "[1] out 1\n" in out
    assert (launcher.folder / "logs/rank-1.log").read_text() == "out 1\nerr 1\n"


def test_tagged_output_that_nobody_reads_doesnt_stop_the_job(launcher):
    process = launcher.start(
        *("-n", 2, "--output", "all", "script.py"),
        script="""
        if rank == 1:
            wait_for("closed")
            print("x" * 500_000)
        """,
    )
    process.stdout.close()
    (launcher.folder / "closed").touch()
    assert process.wait(60) == 0


def test_much_output_of_all_ranks_comes_whole(launcher):
    code, out, _ = launcher.run(
        *("-n", 3, "--output", "all", "script.py"),
        # In pieces, as Python writes them: no line cuts another.
        script="for i in range(20_000): print('x' * rank, i, sep='')",
    )
    assert code == 0
    assert re.findall(r"^\d+$", out, re.M) == [str(i) for i in range(20_000)]
    assert len(out.splitlines()) == 60_000
    for rank in (1, 2):
        numbers = re.findall(rf"^\[{rank}\] {'x' * rank}(\d+)$", out, re.M)
        assert numbers == [str(i) for i in range(20_000)]


def test_the_chief_reads_our_input_and_the_others_dont(launcher):
    script = """
    mark(f"read-{rank}", sys.stdin.read())
    """
    process = launcher.start("-n", 2, "script.py", script=script, stdin=subprocess.PIPE)
    process.communicate("typed", timeout=60)
    assert launcher.wait_for("read-0", "read-1") == ["typed", ""]


# --- failures ---


def test_the_first_failing_rank_is_shown_and_the_rest_is_ended(launcher):
    code, _, err = launcher.run(
        *("-n", 3, "script.py"),
        script="""
        if rank != 1:
            mark(f"up-{rank}", os.getpid())
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the worst case
            wait_for("never")
        wait_for("up-0"), wait_for("up-2")
        import traceback
        try:
            raise ValueError("the real reason")
        except ValueError:
            traceback.print_exc()
            mark("failed", time.monotonic())
            sys.exit(3)
        """,
    )
    ended = time.monotonic()
    assert code == 3, err
    assert ended - float(launcher.wait_for("failed")[0]) < 20.0
    assert "rank 1 failed with exit code 3; the other workers were ended" in err
    traceback = err[err.index("Traceback") :]
    assert 'raise ValueError("the real reason")' in traceback
    assert "ValueError: the real reason\n" in traceback
    launcher.nothing_runs(within=5.0)


@pytest.mark.parametrize("output", ["chief", "all"])
def test_an_uncaught_exception(launcher, output):
    code, _, err = launcher.run(
        *("-n", 2, "--output", output, "script.py"),
        script="""
        if rank == 0:
            hang()
        raise RuntimeError("it broke")
        """,
    )
    assert code == 1
    assert "rank 1 failed with exit code 1" in err
    assert re.search(r"^Traceback [^\0]*\nRuntimeError: it broke$", err, re.M)


def test_a_failing_chief(launcher):
    code, _, err = launcher.run(
        *("-n", 2, "script.py"),
        script="if rank == 0: wait_for('up-1'); raise KeyError('chief')\n" + HANG,
    )
    assert code == 1
    assert err.count("KeyError: 'chief'") == 1
    assert "rank 0 failed with exit code 1; the other workers were ended" in err


def test_the_first_to_fail_counts_not_those_that_follow(launcher):
    # Rank 1 fails, and takes its time to end. Rank 0 sees that and ends before it.
    code, _, err = launcher.run(
        *("-n", 2, "script.py"),
        script="""
        if rank == 0:
            mark("pid-0", os.getpid())
            wait_for("failed")
            sys.exit(9)
        wait_for("pid-0")
        import traceback
        try:
            raise ValueError("first")
        except ValueError:
            traceback.print_exc()
        mark("failed")
        wait_for_end(Path("pid-0").read_text())
        os._exit(7)
        """,
    )
    assert code == 7, err
    assert "rank 1 failed with exit code 7" in err
    assert "afterwards rank 0 failed with exit code 9" in err


def test_a_server_that_fails_is_shown_and_the_rest_is_ended(launcher):
    code, _, err = launcher.run(
        *("-n", 2, "--ps", 2, "script.py"),
        script="""
        if config["task"] != {"type": "ps", "index": 1}:
            hang()
        raise ValueError("the real reason")
        """,
    )
    assert code == 1, err
    assert "server 1 failed with exit code 1; the other workers and servers were" in err
    assert "the end of server 1's output:" in err
    assert re.search(r"^Traceback [^\0]*\nValueError: the real reason$", err, re.M)
    (folder,) = launcher.temporary()
    assert f"all of its output: {folder / 'ps-1.log'}\n" in err
    launcher.nothing_runs(within=5.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_signal(launcher, number):
    code, _, err = launcher.run(
        *("-n", 2, "script.py"),
        script=f"""
        if rank == 1:
            print("last words")
            os.kill(os.getpid(), {int(number)})
        hang()
        """,
    )
    assert code == 128 + number
    assert f"rank 1 was ended by signal {number.name} ({int(number)})" in err
    assert "\nlast words\n" in err


def test_nobody_waits_for_what_is_stopped_when_all_others_have_ended(launcher):
    """A chief that freezes while it saves the model: its job needs it no longer."""
    process = launcher.start(
        *("-n", 3, "script.py"),
        script="""
        if rank == 0:
            mark("up-0", os.getpid())
            wait_for("never")
        elif rank == 1:
            wait_for("stopped")
        """,
        quick=True,
    )
    (chief,) = launcher.pids("up-0")
    os.kill(chief, signal.SIGSTOP)
    # As long as another one runs, it may be needed.
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    (launcher.folder / "stopped").touch()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert (
        "kerasdist run: rank 0 was stopped by a signal, and all others have ended: "
        "waiting no longer\n" in err
    )


def test_a_launcher_whose_output_nobody_reads_ends_the_job_all_the_same(launcher):
    """It tells of the frozen task first: with `2>&1 | less` that once was all."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        launcher.command(
            *("-n", 2, "script.py"),
            script="""
            if rank == 1:
                mark("up-1", os.getpid())
                wait_for("never")
            """,
            quick=True,
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=writing,
        cwd=launcher.folder,
        env=launcher.env,
        start_new_session=True,
    )
    launcher.processes.append(process)
    (pid,) = launcher.pids("up-1")
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    os.close(writing)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: not psutil.pid_exists(pid), "the end of rank 1")
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    assert b"kerasdist run: rank 1 was stopped by a signal" in said
    assert process.wait(30) == 1


def test_ctrl_z_of_a_launcher_ends_nothing(launcher):
    process = launcher.start(
        *("-n", 2, "script.py"),
        script="""
        if rank == 0:
            mark("up-0", os.getpid())
            wait_for("go on")
        """,
        quick=True,
    )
    (chief,) = launcher.pids("up-0")
    for pid in (process.pid, chief):
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    for pid in (chief, process.pid):
        os.kill(pid, signal.SIGCONT)
    (launcher.folder / "go on").touch()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


def test_a_stopped_worker_is_ended_too(launcher):
    process = launcher.start(
        *("-n", 3, "script.py"),
        script="if rank == 2: wait_for('stopped'); sys.exit(5)\n" + HANG,
    )
    _, first = launcher.pids("up-0", "up-1")
    os.kill(first, signal.SIGSTOP)
    (launcher.folder / "stopped").touch()
    began = time.monotonic()
    assert process.wait(60) == 5
    assert time.monotonic() - began < 20.0


def test_grandchildren_are_ended_also_in_sessions_of_their_own(launcher):
    code, _, _ = launcher.run(
        *("-n", 2, "script.py"),
        script="""
        sleep = [sys.executable, "-c", "import signal, time\\n"
                 "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\ntime.sleep(600)"]
        if os.fork() == 0:  # a daemon: its parent ends at once
            os.setsid()
            subprocess.Popen(sleep, start_new_session=True)
            os._exit(0)
        os.wait()
        subprocess.Popen(sleep)
        """,
    )
    assert code == 0
    launcher.nothing_runs(within=5.0)


# --- the user ends the job ---


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]
)
def test_a_signal_to_the_launcher_ends_everything(launcher, number):
    process = launcher.start("-n", 3, "script.py", script=HANG)
    launcher.pids("up-0", "up-1", "up-2")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"ended by {number.name}" in err
    launcher.nothing_runs(within=5.0)


def test_ctrl_c_ends_servers_after_their_workers(launcher):
    process = launcher.start(
        *("-n", 2, "--ps", 1, "script.py"),
        script="""
        kind = config["task"]["type"]
        signal.signal(signal.SIGINT, lambda *_: (mark(f"{kind}-{rank}"), sys.exit(1)))
        mark(f"{kind}-up-{rank}", os.getpid())
        if kind == "worker":
            wait_for("never")
        for worker in (0, 1):
            wait_for(f"worker-up-{worker}")
            wait_for_end(Path(f"worker-up-{worker}").read_text())
        mark("served")
        """,
    )
    launcher.wait_for("worker-up-0", "worker-up-1", "ps-up-0")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "ended by SIGINT; all workers and servers are ended" in err
    launcher.wait_for("worker-0", "worker-1", "served")
    assert not (launcher.folder / "ps-0").exists()
    launcher.nothing_runs(within=5.0)


@pytest.mark.soak
def test_a_second_signal_doesnt_wait(launcher):
    process = launcher.start(
        *("-n", 2, "script.py"),
        script="""
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: mark(f"got-{rank}"))
        hang()
        """,
    )
    launcher.pids("up-0", "up-1")
    process.send_signal(signal.SIGINT)
    launcher.wait_for("got-0", "got-1")
    select.select([], [], [], 0.6)  # two at once would count as one
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.wait(60)
    # A job that isn't hurried takes 3.4 s from here: SIGTERM, then SIGKILL.
    assert time.monotonic() - began < 3.0
    assert process.returncode == 130


def test_a_signal_that_is_ignored_stays_ignored(launcher):
    code = (
        "import signal, sys, os; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "os.execv(sys.executable, sys.argv[1:])"
    )
    command = launcher.command(
        "-n",
        2,
        "script.py",
        script="""
        mark(f"up-{rank}", os.getpid())
        wait_for("go")
    """,
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        cwd=launcher.folder,
        env=launcher.env,
        start_new_session=True,
    )
    launcher.processes.append(process)
    launcher.pids("up-0", "up-1")
    process.send_signal(signal.SIGHUP)
    (launcher.folder / "go").touch()
    assert process.wait(60) == 0


@pytest.fixture
def terminal(launcher):
    with terminals_of(launcher) as start:
        yield start


def test_ctrl_c_on_a_terminal(launcher, terminal):
    opened = terminal(
        *("-n", 3, "script.py"),
        script="""
        mark(f"up-{rank}", os.getpid())
        try:
            wait_for("never")
        except KeyboardInterrupt:
            time.sleep(0.3)  # a second one would break this off
            mark(f"tidied-{rank}")
            raise
        """,
    )
    launcher.pids("up-0", "up-1", "up-2")
    os.write(opened.fd, b"\x03")
    output = opened.read()
    assert opened.wait() == 130
    launcher.wait_for("tidied-0", "tidied-1", "tidied-2")
    assert output.count("KeyboardInterrupt") == 1
    launcher.nothing_runs(within=5.0)


def test_the_chief_has_the_terminal(launcher, terminal):
    opened = terminal(
        *("-n", 2, "script.py"),
        script="""
        import termios
        mark(f"is-{rank}", json.dumps([os.isatty(i) for i in range(3)]))
        if rank == 0:
            settings = termios.tcgetattr(0)
            termios.tcsetattr(0, termios.TCSANOW, settings)  # a debugger does this
            mark("asks")
            print("bar 1\\rbar 2\\r", end="")
            mark("answer", input("name? "))
        """,
    )
    launcher.wait_for("asks")
    os.write(opened.fd, b"me\n")
    output = opened.read()
    assert opened.wait() == 0
    assert launcher.wait_for("answer") == ["me"]
    assert json.loads(launcher.wait_for("is-0")[0]) == [True] * 3
    assert json.loads(launcher.wait_for("is-1")[0]) == [False] * 3
    # What is typed may be echoed between the two.
    assert "bar 1\rbar 2\r" in output
    assert "name? " in output


def test_closing_the_terminal_ends_everything(launcher, terminal):
    opened = terminal("-n", 2, "script.py", script=HANG)
    launcher.pids("up-0", "up-1")
    os.close(opened.fd)
    opened.fd = os.open(os.devnull, os.O_RDONLY)
    launcher.nothing_runs()


def test_messages_come_through_a_terminal_that_stops_the_background(launcher, terminal):
    opened = terminal(
        *("-n", 2, "script.py"),
        script="""
        import termios
        if rank == 0:
            settings = termios.tcgetattr(0)
            settings[3] |= termios.TOSTOP
            termios.tcsetattr(0, termios.TCSANOW, settings)
            mark("set")
            wait_for("never")
        wait_for("set")
        sys.exit(3)
        """,
    )
    output = opened.read()
    assert opened.wait() == 3
    assert "rank 1 failed with exit code 3" in output


# --- somebody kills us ---

WITH_CHILDREN = (
    """
child = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(child, start_new_session=True)
"""
    + HANG
)


def test_kill_9_of_the_launcher_leaves_nothing(launcher):
    process = launcher.start("-n", 3, "script.py", script=WITH_CHILDREN)
    launcher.pids("up-0", "up-1", "up-2")
    process.kill()
    process.wait(60)
    launcher.nothing_runs()


def test_kill_9_of_the_launchers_group_leaves_nothing(launcher):
    process = launcher.start("-n", 3, "script.py", script=WITH_CHILDREN)
    launcher.pids("up-0", "up-1", "up-2")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    launcher.nothing_runs()


def test_kill_9_of_the_supervisor_leaves_nothing(launcher):
    process = launcher.start("-n", 3, "script.py", script=WITH_CHILDREN)
    launcher.pids("up-0", "up-1", "up-2")
    (supervisor,) = psutil.Process(process.pid).children()
    supervisor.kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 137
    assert "the supervisor of the workers was ended by signal 9" in err
    launcher.nothing_runs(within=5.0)


def test_kill_9_of_both_leaves_no_worker(launcher):
    process = launcher.start("-n", 3, "script.py", script=HANG)
    launcher.pids("up-0", "up-1", "up-2")
    (supervisor,) = psutil.Process(process.pid).children()
    for each in (supervisor, process):
        os.kill(each.pid, signal.SIGSTOP)
    for each in (supervisor, process):
        os.kill(each.pid, signal.SIGKILL)
    process.wait(60)
    launcher.nothing_runs()


# --- cores ---


@pytest.mark.skipif(sys.platform != "linux", reason="cores can be bound on Linux only")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_bind_cores(launcher, size):
    launcher.env["OMP_NUM_THREADS"] = "77"
    code, _, err = launcher.run(
        *("-n", size, "--bind", "cores", "script.py"),
        script="""
        names = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
        mark(f"is-{rank}", json.dumps([
            sorted(os.sched_getaffinity(0)), *(os.environ[name] for name in names)]))
        """,
    )
    assert code == 0, err
    mine = os.sched_getaffinity(0)
    names = [f"is-{rank}" for rank in range(size)]
    found = [json.loads(text) for text in launcher.wait_for(*names)]
    for cores, *threads in found:
        assert cores
        # One more runs operations: it may wait for the other workers.
        assert threads == [str(len(cores) + more) for more in (0, 1, 0)]
    assert {core for cores, *_ in found for core in cores} == mine
    if size <= len(mine):
        assert sum(len(cores) for cores, *_ in found) == len(mine)
    else:
        assert f"{size} workers share {len(mine)} cores" in err


def test_without_bind_nothing_is_bound(launcher):
    script = "print(len(os.sched_getaffinity(0)), os.environ.get('OMP_NUM_THREADS'))"
    code, out, _ = launcher.run("-n", 1, "script.py", script=script)
    assert (code, out) == (0, f"{len(os.sched_getaffinity(0))} None\n")


@pytest.mark.parametrize(
    ("cores", "size", "expected"),
    [
        ([0, 1, 2, 3], 1, [(0, 1, 2, 3)]),
        ([0, 1, 2, 3], 2, [(0, 1), (2, 3)]),
        ([4, 5, 6], 2, [(4,), (5, 6)]),
        ([0, 1], 4, [(0,), (0,), (1,), (1,)]),
        ([7], 3, [(7,), (7,), (7,)]),
    ],
)
def test_shares(cores, size, expected):
    assert shares(cores, size) == expected


def test_threads_are_at_least_one():
    assert set(thread_variables(0).values()) == {"1", "2"}


# --- allocators ---


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_library_is_loaded_before_the_others(launcher):
    # Any library will do.
    path = re.search(r"/\S*/libm\.so\S*", Path("/proc/self/maps").read_text())[0]
    launcher.env["LD_PRELOAD"] = "libdl.so.2"
    code, out, err = launcher.run(
        *("-n", 1, "--malloc", path, "script.py"),
        script="print(os.environ['LD_PRELOAD'])",
    )
    assert (code, out) == (0, f"{path}:libdl.so.2\n")
    assert f"workers allocate with {path}" in err
    code, out, _ = launcher.run(
        "-n", 1, "script.py", script="print(os.environ['LD_PRELOAD'])"
    )
    assert (code, out) == (0, "libdl.so.2\n")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_installed_allocator_is_found(launcher):
    script = "print(Path('/proc/self/maps').read_text().count('malloc'))"
    options = ("-n", 1, "--malloc", "auto", "script.py")
    code, out, err = launcher.run(*options, script=script)
    assert code == 0
    found = find_allocator()
    if found is None:
        assert "no allocator is installed" in err
    else:
        assert f"workers allocate with {found}" in err
        assert int(out) > 0


def test_hardware_threads_of_one_core_stay_together(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})

    def read(path):  # 0 and 2 are one core, 1 and 3 the other
        core = int(re.search(r"cpu(\d+)", path)[1])
        return f"{core % 2}\n" if path.endswith("core_id") else "0\n"

    assert cores_in_order(read) == [0, 2, 1, 3]

    def nothing(path):
        raise FileNotFoundError(path)

    assert cores_in_order(nothing) == [0, 1, 2, 3]


# --- pieces ---


def test_importing_the_command_needs_no_tensorflow():
    code = "import sys, kerasdist.cli; sys.exit('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=python_env(), timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_tagger_doesnt_care_how_output_is_cut(size):
    data = b"a\nb\r\n\n1\r2\r3\n\r    \rx\ny\r  \r\nend"
    tagger = LineTagger(b"[1] ")
    result = b"".join(
        tagger.feed(data[i : i + size], 0.0) for i in range(0, len(data), size)
    )
    result += tagger.flush()
    assert result == b"[1] a\n[1] b\n[1]\n[1] 3\n[1] x\n[1] end\n"
    assert tagger.flush() == b""


def test_tagger_shows_long_progress_now_and_then():
    tagger = LineTagger(b"[1] ")
    shown = [tagger.feed(f"\r{second}%".encode(), second) for second in range(13)]
    assert [each for each in shown if each] == [b"[1] 5%\n", b"[1] 10%\n"]


def test_tagger_cuts_lines_without_end():
    tagger = LineTagger(b"[1] ")
    assert len(tagger.feed(b"x" * 100_000, 0.0)) == 100_005


def test_whole_lines_stay_as_they_are():
    data = b"a\n 1\r 2\r\n" + b"x" * 100_000 + b"\nend"
    lines = WholeLines()
    given = [lines.feed(data[i : i + 7], 0.0) for i in range(0, len(data), 7)]
    assert b"".join(given) + lines.flush() == data
    assert lines.flush() == b""
    assert WholeLines().feed(b"a\nb", 0.0) == b"a\n"
    assert WholeLines().feed(b"bar 1\rbar", 0.0) == b"bar 1\r"


CHAINED = """before
Traceback (most recent call last):
  unrelated
ValueError: 0
text
Traceback (most recent call last):
  one
ValueError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  two
ValueError: 2

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  three
ValueError: 3
"""


def test_the_last_traceback_has_its_causes():
    found = last_traceback(CHAINED)
    assert found is not None
    assert found.startswith("Traceback (most recent call last):\n  one\n")
    assert found.endswith("ValueError: 3")
    group = "x\n  + Exception Group Traceback (most recent call last):\n  | y"
    assert last_traceback(group) == group[2:]
    assert last_traceback("no traceback") is None


def test_the_end_of_an_output():
    text = "\n".join(map(str, range(100)))
    assert end_of(text).splitlines() == [str(i) for i in range(80, 100)]
    long = "Traceback (most recent call last):\n" + "x\n" * 1000 + "ValueError: 1"
    lines = end_of(long).splitlines()
    assert len(lines) == 201
    assert lines[100] == "  [... 802 lines]"
    assert lines[-1] == "ValueError: 1"
    assert end_of("") == ""


def test_exit_codes():
    assert [exit_code(code) for code in (3, -9, -15)] == [3, 137, 143]
    assert in_words(3) == "failed with exit code 3"
    assert in_words(-11) == "was ended by signal SIGSEGV (11)"
    assert in_words(-9).startswith("was ended by signal SIGKILL (9), sent by")


def test_descendants_without_proc(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as child:
        try:
            assert child.pid in descendants(os.getpid())
            real = Path.exists
            monkeypatch.setattr(
                Path, "exists", lambda p: str(p) != "/proc/self/stat" and real(p)
            )
            assert child.pid in descendants(os.getpid())
        finally:
            child.kill()
    assert child.pid not in descendants(os.getpid())
