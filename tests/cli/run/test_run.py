import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kerasdist import cli
from kerasdist.cli.env import find_allocator
from kerasdist.cli.run import command
from kerasdist.cli.run.job_spec import cores_in_order, shares, thread_variables
from launching import HANG
from pace import bound
from waiting import wait_until


def test_each_task_has_its_settings_and_its_listening_socket(launcher):
    """Cores are divided among the workers; only the chief reads what is typed."""
    launcher.env |= {"OTHER": "kept", "OMP_NUM_THREADS": "77", "TF_CONFIG": '{"a": 1}'}
    process = launcher.start(
        *("-n", 3, "--ps", 2, "--bind", "cores", "--log-dir", "logs"),
        *("--malloc", "auto", "--", "script.py", "--epochs", "3", "-n", "x", "--"),
        script="""
        import socket
        server = socket.socket(fileno=int(os.environ["KERASDIST_LISTEN_FD"]))
        kind = config["task"]["type"]
        mark(f"is-{kind}-{rank}", json.dumps({
            "config": config, "secret": os.environ["KERASDIST_SECRET"],
            "args": sys.argv[1:], "port": server.getsockname()[1],
            "accepts": server.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN),
            "unbuffered": os.environ["PYTHONUNBUFFERED"], "path": sys.path[0],
            "other": os.environ["OTHER"], "executable": sys.executable,
            "cores": sorted(os.sched_getaffinity(0)), "typed": sys.stdin.read(),
            "threads": [os.environ.get(f"{name}_THREADS") for name in (
                "TF_NUM_INTRAOP", "TF_NUM_INTEROP", "OMP_NUM")],
            "maps": Path("/proc/self/maps").read_text(),
        }))
        print("out", kind, rank)
        """,
        stdin=subprocess.PIPE,
    )
    out, err = process.communicate("typed", timeout=bound(60))
    assert (process.returncode, out) == (0, "out worker 0\n"), err
    assert "TF_CONFIG is set, and is replaced" in err
    tasks = [("worker", 0), ("worker", 1), ("worker", 2), ("ps", 0), ("ps", 1)]
    found = launcher.wait_for(*(f"is-{kind}-{index}" for kind, index in tasks))
    found = [json.loads(text) for text in found]
    addresses = [f"127.0.0.1:{each['port']}" for each in found]
    cluster = {"worker": addresses[:3], "ps": addresses[3:]}
    assert len(set(addresses)) == 5
    cores = [sorted(share) for share in shares(cores_in_order(), 3)]
    mine = sorted(os.sched_getaffinity(0))
    assert sorted(set().union(*cores)) == mine
    assert ("3 workers share" in err) == (len(mine) < 3)
    library = find_allocator()
    used = "no allocator is inst" if library is None else f"allocate with {library}"
    assert used in err
    for (kind, index), each in zip(tasks, found, strict=True):
        maps = each.pop("maps")
        assert library is None or os.path.realpath(library) in maps
        worker = kind == "worker"
        # Servers may use all cores. One more thread runs operations: it may wait.
        threads = [len(cores[index]) + more for more in (0, 1, 0)] if worker else []
        assert each == {
            "config": {"cluster": cluster, "task": {"type": kind, "index": index}},
            **{"secret": found[0]["secret"], "port": each["port"], "accepts": 1},
            **{"args": ["--epochs", "3", "-n", "x", "--"], "unbuffered": "1"},
            **{"path": str(launcher.folder), "executable": sys.executable},
            "other": "kept",
            "cores": cores[index] if worker else mine,
            "typed": "typed" if (kind, index) == ("worker", 0) else "",
            "threads": list(map(str, threads)) or ["1", None, "77"],
        }
    assert re.fullmatch("[0-9a-f]{64}", found[0]["secret"])
    logs = launcher.folder / "logs"
    names = ["ps-0.log", "ps-1.log", "rank-1.log", "rank-2.log"]
    assert sorted(os.listdir(logs)) == names
    assert (logs / "ps-1.log").read_text() == "out ps 1\n"
    assert f"the others' output goes to {Path('logs/rank-1.log')} ... ps-1.log\n" in err


@pytest.fixture
def started(tmp_path, monkeypatch):
    jobs = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    monkeypatch.setattr(command, "run_supervised", lambda job: jobs.append(job) or 0)
    return jobs


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("-n 0 none.py", "-n must be an integer >= 1. Received: -n 0\n  there is no s"),
        ("-n two script.py", "-n must be an integer >= 1. Received: -n two"),
        ("-n 2 .", ". is a folder without a __main__.py"),
        ("-n 2 -m no_such.module", "there is no module 'no_such.module'"),
        ("-n 2 -m", "-m must be followed by the name of a module"),
        ("-n 2", "expected a script"),
        ("script.py", "-n, the number of workers, is missing"),
        ("-n 2 --malloc x script.py", "'none', 'auto' or the path"),
        ("-n 2 --log-dir script.py script.py", "--log-dir must be a folder"),
        ("-n 2 --color script.py", "kerasdist run: error: unrecognized"),
        ("-n 2 --restarts 1 script.py", "Received: --restarts 1 without --elastic"),
        ("-n 2 --max-workers 3 script.py", "--max-workers 3 without --elastic"),
        ("-n 2 --elastic --min-workers 3 script.py", "--min-workers 3 and -n 2"),
        ("-n 2 --elastic --max-workers 1 script.py", "--max-workers 1 and -n 2"),
        ("-n 2 --elastic --min-workers 0 script.py", "must be an integer >= 1"),
        ("-n 3 script.py", "this host has 2 GPUs for 3 workers. Expected at least"),
        ("-n 3 --gpus 1 script.py", "2 GPUs for 3 workers, which isn't enough. Rec"),
        ("-n 2 --gpus some script.py", "--gpus must be 'auto', 'all', 'none' or a nu"),
        ("-n 2 --ssh ssh script.py", "--ssh is an option for jobs on several hosts"),
        ("-H localhost:2,b:2 script.py", "reach each other. Received: localhost"),
        ("-n 1 --nnodes 2:4 --rendezvous a:1 script.py", "2:4. Start 4 hosts with --"),
        ("-n 1 --nnodes 2 --rendezvous a:1 script.py", "several hosts need a secret"),
        ("SHORT -n 1 script.py", "KERASDIST_SECRET is too short. Received: 4 bytes, "),
    ],
)
def test_mistakes_are_said_at_once(started, monkeypatch, capsys, arguments, said):
    """Before anything starts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    if arguments.startswith("SHORT "):
        monkeypatch.setenv("KERASDIST_SECRET", "mine")
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["run", *arguments.removeprefix("SHORT ").split()])
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("usage: kerasdist run (-n N | -H HOSTS) [options]")
    assert started == []


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("python script.py x", ("script.py", "x")),
        ("python3.11 -m json.tool -n", ("-m", "json.tool", "-n")),
        ("python3 -u script.py", ("script.py",)),
        ("-- script.py -- -n", ("script.py", "--", "-n")),
    ],
)
def test_an_interpreter_before_the_script_is_left_out(started, typed, expected):
    assert cli.main(["run", "-n", "1", *typed.split()]) == 0
    (job,) = started
    assert job.command == expected
    assert (job.environ.get("PYTHONUNBUFFERED") == "1") or "-u" not in typed


def test_each_job_has_a_secret_of_its_own_unless_the_user_has_one(started, monkeypatch):
    monkeypatch.delenv("KERASDIST_SECRET", raising=False)
    monkeypatch.setenv("LD_PRELOAD", "libdl.so.2")
    # Any library will do.
    path = re.search(r"/\S*/libm\.so\S*", Path("/proc/self/maps").read_text())[0]
    for own in ("", "", "s" * 16):
        if own:
            monkeypatch.setenv("KERASDIST_SECRET", own)
        assert cli.main(["run", "-n", "1", "--malloc", path, "script.py"]) == 0
    first, second, third = started
    assert first.secret != second.secret
    assert third.secret == "s" * 16
    assert first.environ["LD_PRELOAD"] == f"{path}:libdl.so.2"
    assert first.cores == ()


def test_logs_are_temporary_and_nothing_is_left_after_success(launcher):
    """The chief's output passes; grandchildren in sessions of their own are ended."""
    code, out, err = launcher.run(
        *("-n", 2, "script.py"),
        script="""
        print("out", rank)
        print("err", rank, file=sys.stderr)
        mark(f"log-{rank}", os.readlink("/proc/self/fd/1"))
        sleep = [sys.executable, "-c", "import signal, time\\n"
                 "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\ntime.sleep(600)"]
        if os.fork() == 0:  # a daemon: its parent ends at once
            os.setsid()
            subprocess.Popen(sleep, start_new_session=True)
            os._exit(0)
        os.wait()
        subprocess.Popen(sleep)
        """,
        quick=True,
    )
    assert (code, out) == (0, "out 0\n")
    (log,) = launcher.wait_for("log-1")
    assert f"the others' output goes to {log}\nerr 0\n" in err
    assert "err 1" not in err
    assert launcher.temporary() == []
    launcher.nothing_runs(within=5.0)


def test_tagged_output_and_logs(launcher):
    """Much output of all comes whole: no line cuts another."""
    code, out, err = launcher.run(
        *("-n", 3, "--ps", 1, "--output", "all", "--log-dir", "a/b", "script.py"),
        script="""
        name = f"{config['task']['type']}-{rank}"
        print("err", file=sys.stderr)
        for i in range(5000):  # in pieces, as Python writes them
            print(name, i, sep=":")
        if name != "worker-0":
            print("10%\\r20%\\r30%\\nno end", end="")
        """,
    )
    assert code == 0
    whole = [f"{{}}:{i}" for i in range(5000)]
    for tag, name in (("[1] ", "worker-1"), ("[2] ", "worker-2"), ("[ps 0] ", "ps-0")):
        found = [line for line in out.splitlines() if line.startswith(tag)]
        text = [line.format(name) for line in whole]
        assert found == [tag + line for line in ["err", *text, "30%", "no end"]]
    chief = [line for line in out.splitlines() if not line.startswith("[")]
    assert chief == [line.format("worker-0") for line in whole]
    assert err.endswith("err\n")
    log = (launcher.folder / "a/b/rank-1.log").read_bytes().decode().split("\n")
    assert log[:-2] == ["err", *(line.format("worker-1") for line in whole)]
    assert launcher.temporary() == []


def test_a_log_is_written_to_no_link_and_waits_for_no_reader(launcher):
    """Another user may have prepared the folder."""
    folder = launcher.folder / "logs"
    folder.mkdir()
    mine = launcher.folder / "mine"
    mine.write_text("my file")
    log = folder / "rank-1.log"
    for prepare in (lambda: log.symlink_to(mine), lambda: os.mkfifo(log)):
        prepare()
        code, _, err = launcher.run(
            *("-n", 2, "--log-dir", "logs", "script.py"), script='mark("ran")'
        )
        assert code == 1
        assert "A task's log can't be written" in err
        assert "rank-1.log" in err
        assert mine.read_text() == "my file"
        log.unlink()


def test_the_first_failing_rank_is_shown_and_the_rest_is_ended(launcher):
    code, _, err = launcher.run(
        *("-n", 3, "script.py"),
        script="""
        if rank != 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the worst case
            mark(f"up-{rank}", os.getpid())
            if rank == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
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
    assert time.monotonic() - float(launcher.wait_for("failed")[0]) < 40.0
    assert code == 3, err
    assert "rank 1 failed with exit code 3; the other workers were ended" in err
    traceback = err[err.index("Traceback") :]
    assert 'raise ValueError("the real reason")' in traceback
    assert "ValueError: the real reason\n" in traceback
    (folder,) = launcher.temporary()
    assert f"all of its output: {folder / 'rank-1.log'}\n" in err
    assert (folder / "rank-1.log").read_text().endswith("the real reason\n")
    launcher.nothing_runs(within=5.0)


def test_nobody_waits_for_what_is_stopped_when_all_others_have_ended(launcher):
    """A chief that freezes while it saves the model: its job needs it no longer.

    The launcher ends it although nobody reads what it says of that.
    """
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
        process.wait(1.5)
    # After Ctrl-Z the launcher is stopped, too.
    os.kill(process.pid, signal.SIGSTOP)
    (launcher.folder / "stopped").touch()
    time.sleep(1.5)
    assert psutil.pid_exists(chief)
    pipe = f"/proc/self/fd/{process.stderr.fileno()}"
    full = contextlib.suppress(BlockingIOError)
    with open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb", 0) as writing, full:
        while os.write(writing.fileno(), b"x" * 4096):
            pass
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: not psutil.pid_exists(chief), "the end of rank 0")
    assert (
        "kerasdist run: rank 0 was stopped by a signal, and all others have ended: "
        "waiting no longer\n" in process.stderr.read()
    )
    assert process.wait(bound(30)) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_signal_to_the_launcher_ends_everything(launcher, number):
    """Also if nobody reads what the tasks print."""
    options = ("-n", 2, "--output", "all", "script.py")
    script = 'wait_for("closed")\nif rank:\n    print("x" * 500_000)\n' + HANG
    process = launcher.start(*options, script=script)
    process.stdout.close()
    process.stdout = None
    (launcher.folder / "closed").touch()
    launcher.pids("up-0", "up-1")
    process.send_signal(number)
    _, err = process.communicate(timeout=bound(60))
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
    _, err = process.communicate(timeout=bound(60))
    assert process.returncode == 130
    assert "ended by SIGINT; all workers and servers are ended" in err
    launcher.wait_for("worker-0", "worker-1", "served")
    assert not (launcher.folder / "ps-0").exists()
    launcher.nothing_runs(within=5.0)


def test_a_second_signal_doesnt_wait_and_an_ignored_one_stays_ignored(launcher):
    process = launcher.start(
        *("-n", 2, "script.py"),
        script="""
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: mark(f"got-{rank}"))
        hang()
        """,
        # Otherwise two at once would count as one.
        before="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "from kerasdist.cli.run import supervisor as s; s.TWICE = 0; "
        "s.INTERRUPT_TO_TERM = s.TERM_TO_KILL = 100",
    )
    launcher.pids("up-0", "up-1")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    launcher.wait_for("got-0", "got-1")
    process.send_signal(signal.SIGINT)
    assert process.wait(bound(60)) == 130


def test_the_chief_has_the_terminal_and_ctrl_c_reaches_each_rank_once(
    launcher, terminal
):
    """The launcher's lines come through one that stops what the background writes."""
    opened = terminal(
        *("-n", 3, "script.py"),
        script="""
        import termios
        mark(f"is-{rank}", json.dumps([os.isatty(i) for i in range(3)]))
        if rank == 0:
            print("bar 1\\rbar 2\\r", end="")
            mark("asks")
            mark("answer", input("name? "))
            settings = termios.tcgetattr(0)
            settings[3] |= termios.TOSTOP
            termios.tcsetattr(0, termios.TCSANOW, settings)  # a debugger does this
        try:
            mark(f"up-{rank}", os.getpid())  # from then on Ctrl-C may come
            wait_for("never")
        except KeyboardInterrupt:
            time.sleep(0.3)  # a second one would break this off
            mark(f"tidied-{rank}")
            raise
        """,
    )
    launcher.wait_for("asks")
    os.write(opened.fd, b"me\n")
    launcher.wait_for("up-0", "up-1", "up-2")
    os.write(opened.fd, b"\x03")
    output = opened.read()
    assert opened.wait() == 130
    assert launcher.wait_for("answer") == ["me"]
    assert json.loads(launcher.wait_for("is-0")[0]) == [True] * 3
    assert json.loads(launcher.wait_for("is-1")[0]) == [False] * 3
    # What is typed may be echoed between the two.
    assert "bar 1\rbar 2\r" in output
    assert "name? " in output
    launcher.wait_for("tidied-0", "tidied-1", "tidied-2")
    assert output.count("KeyboardInterrupt") == 1
    assert "kerasdist run: ended by SIGINT" in output
    launcher.nothing_runs(within=5.0)


def test_closing_the_terminal_ends_everything(launcher, terminal):
    opened = terminal("-n", 2, "script.py", script=HANG)
    launcher.pids("up-0", "up-1")
    os.close(opened.fd)
    opened.fd = os.open(os.devnull, os.O_RDONLY)
    assert opened.wait() == 128 + signal.SIGHUP
    launcher.nothing_runs()


@pytest.mark.parametrize("victim", ["launcher", "its group", "supervisor", "both"])
def test_kill_9_leaves_nothing(launcher, victim):
    child = [sys.executable, "-c", "import time; time.sleep(600)"]
    # Nobody looks for those of both.
    child = f"subprocess.Popen({child}, start_new_session=True)\n"
    script = HANG if victim == "both" else child + HANG
    process = launcher.start("-n", 2, "script.py", script=script)
    launcher.pids("up-0", "up-1")
    (supervisor,) = psutil.Process(process.pid).children()
    if victim == "its group":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        killed = {"launcher": [process], "supervisor": [supervisor]}.get(
            victim, [supervisor, process]
        )
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for each in killed:
                os.kill(each.pid, number)
    _, err = process.communicate(timeout=bound(60))
    if victim == "supervisor":
        assert process.returncode == 137
        assert "the supervisor of the workers was ended by signal 9" in err
    launcher.nothing_runs()


def test_cores_are_shared_and_hardware_threads_of_one_stay_together(monkeypatch):
    assert shares([0, 1, 2, 3], 1) == [(0, 1, 2, 3)]
    assert shares([4, 5, 6], 2) == [(4,), (5, 6)]
    assert shares([0, 1], 4) == [(0,), (0,), (1,), (1,)]
    assert set(thread_variables(0).values()) == {"1", "2"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})

    def read(path):  # 0 and 2 are one core, 1 and 3 the other
        core = int(re.search(r"cpu(\d+)", path)[1])
        return f"{core % 2}\n" if path.endswith("core_id") else "0\n"

    assert cores_in_order(read) == [0, 2, 1, 3]
