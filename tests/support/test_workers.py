"""The helper that starts worker processes keeps its promises."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import psutil
import pytest

import workers
from workers import Workers, free_ports, kill_tagged, python_env

HANG = """
    import signal
    print("up", flush=True)
    while True:
        signal.pause()
"""


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_each_worker_gets_its_own_tf_config_and_the_same_secret():
    script = """
        import json, os, sys
        config = json.loads(os.environ["TF_CONFIG"])
        print("RESULT", json.dumps(
            [config, os.environ["KERASDIST_SECRET"], sys.argv[1:]]))
    """
    with Workers(script, 3, args=["--epochs", "2"]) as job:
        results = [worker.result for worker in job.succeed()]

    for rank, (config, secret, args) in enumerate(results):
        assert config["cluster"] == {"worker": job.addresses}
        assert config["task"] == {"type": "worker", "index": rank}
        assert secret == job.secret
        assert args == ["--epochs", "2"]
    assert len(set(job.addresses)) == 3


def test_the_listening_socket_is_handed_over_and_can_be_accepted_on():
    script = """
        import json, os, socket
        config = json.loads(os.environ["TF_CONFIG"])
        rank = config["task"]["index"]
        addresses = config["cluster"]["worker"]
        own = socket.socket(fileno=int(os.environ["KERASDIST_LISTEN_FD"]))
        host, port = own.getsockname()
        assert addresses[rank] == f"{host}:{port}"
        if rank == 0:
            connection, _ = own.accept()
            print("RESULT", json.dumps(connection.recv(5).decode()))
        else:
            host, port = addresses[0].split(":")
            with socket.create_connection((host, int(port)), timeout=30) as sock:
                sock.sendall(b"hello")
            print("RESULT", "null")
    """
    with Workers(script, 2) as job:
        assert [worker.result for worker in job.succeed()] == ["hello", None]


def test_without_handover_the_workers_bind_their_ports_themselves():
    script = """
        import json, os, socket
        config = json.loads(os.environ["TF_CONFIG"])
        host, port = config["cluster"]["worker"][config["task"]["index"]].split(":")
        socket.create_server((host, int(port))).close()
        print("RESULT", json.dumps("KERASDIST_LISTEN_FD" in os.environ))
    """
    with Workers(script, 2, handover=False) as job:
        assert [worker.result for worker in job.succeed()] == [False, False]


def test_free_ports_differ_and_are_free():
    first, second = free_ports(3), free_ports(3)

    assert len({*first, *second}) == 6
    for port in first:
        socket.create_server(("127.0.0.1", port)).close()


def test_env_may_differ_per_rank_and_remove_variables():
    script = """
        import json, os
        print("RESULT", json.dumps([os.environ.get(n) for n in ("A", "TF_CONFIG")]))
    """

    def env(rank):
        return {"A": str(rank), "TF_CONFIG": None}

    with Workers(script, 2, env=env) as job:
        results = [worker.result for worker in job.succeed()]
    assert results == [["0", None], ["1", None]]


def test_a_script_may_be_a_path(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print('RESULT', 1)\n")
    with Workers(path, 1) as job:
        assert job.succeed()[0].result == 1


def test_workers_import_the_kerasdist_of_the_test():
    import kerasdist

    script = """
        import json, kerasdist
        print("RESULT", json.dumps(list(kerasdist.__path__)))
    """
    with Workers(script, 1) as job:
        path, *_ = job.succeed()[0].result
    assert Path(path).samefile(next(iter(kerasdist.__path__)))


def test_python_env_holds_no_cluster_settings_of_the_surroundings(monkeypatch):
    settings = {"TF_CONFIG": "{}", "SLURM_PROCID": "1", "KERASDIST_SECRET": "x"}
    monkeypatch.setattr(workers, "_SURROUNDINGS", {"OTHER": "0", **settings})

    env = python_env({"EXTRA": "1"})

    assert (env["EXTRA"], env["OTHER"]) == ("1", "0")
    assert not settings.keys() & env.keys()


def test_python_env_does_not_depend_on_what_was_imported_or_set(monkeypatch):
    before = python_env()
    monkeypatch.setenv("TF2_BEHAVIOR", "from an import")
    monkeypatch.setenv("LATER", "1")

    assert python_env() == before


def test_a_hanging_worker_is_killed_at_the_deadline_its_output_and_stacks_shown():
    script = """
        import os, signal
        print("I am", os.environ["TF_CONFIG"], flush=True)
        signal.pause()
    """
    with (
        pytest.raises(
            pytest.fail.Exception,
            match=r"^Ranks \[0, 1\] were still running at the deadline\.\n"
            r"---- rank 0, 127\.0\.0\.1:\d+, running ----\nI am (.|\n)*"
            r"---- rank 1, 127\.0\.0\.1:\d+, running ----\nI am (.|\n)*"
            r"script\.py\", line 4 in <module>",
        ),
        Workers(script, 2) as job,
    ):
        job.wait_for_line(0, "I am")
        job.wait_for_line(1, "I am")
        job.wait(deadline=0.1)

    assert not any(_alive(process.pid) for process in job.processes)


def test_the_deadline_of_the_job_bounds_every_wait():
    with (
        pytest.raises(
            pytest.fail.Exception,
            match=r"^Rank 0 didn't print 'never' by the deadline\.",
        ),
        Workers(HANG, 1, deadline=0.5) as job,
    ):
        job.wait_for_line(0, "never")


def test_succeed_shows_the_output_of_all_when_one_fails():
    script = """
        import json, os, sys
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        print("output of", rank)
        sys.exit(3 * rank)
    """
    with (
        pytest.raises(
            pytest.fail.Exception,
            match=r"^Ranks \[1\] failed\.\n"
            r".*returned 0 ----\noutput of 0\n.*returned 3 ----\noutput of 1\n$",
        ),
        Workers(script, 2) as job,
    ):
        job.succeed()


def test_wait_for_line_fails_when_the_worker_ends_first():
    with (
        pytest.raises(
            pytest.fail.Exception, match=r"^Rank 0 ended before it printed 'ready'\."
        ),
        Workers("print('something else')", 1) as job,
    ):
        job.wait_for_line(0, "ready")


def test_wait_for_line_returns_whole_lines_also_of_a_worker_that_has_ended():
    with Workers("print('ready', 42)", 1) as job:
        job.succeed()
        assert job.wait_for_line(0, "ready") == "ready 42"


def test_a_failing_test_prints_every_workers_output(capsys):
    with pytest.raises(ZeroDivisionError), Workers(HANG, 2) as job:
        job.wait_for_line(0, "up")
        job.wait_for_line(1, "up")
        raise ZeroDivisionError

    assert re.findall(r"rank (\d).*running ----\nup\n", capsys.readouterr().out) == [
        "0",
        "1",
    ]


def test_a_killed_workers_return_code_is_its_signal():
    with Workers(HANG, 2) as job:
        job.wait_for_line(0, "up")
        job.kill(0)
        assert job.wait_one(0).returncode == -signal.SIGKILL
        assert job.is_running(1)


def test_a_stopped_worker_is_ended_on_exit():
    with Workers(HANG, 1) as job:
        job.wait_for_line(0, "up")
        job.kill(0, signal.SIGSTOP)
        os.waitid(os.P_PID, job.processes[0].pid, os.WSTOPPED | os.WNOWAIT)
        assert job.is_running(0)

    assert not _alive(job.processes[0].pid)


def test_grandchildren_are_ended_on_exit_even_in_their_own_session():
    script = """
        import subprocess, sys
        child = subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.pause()"],
            start_new_session=True)
        print("RESULT", child.pid)
    """
    with Workers(script, 1) as job:
        (worker,) = job.succeed()
        assert _alive(worker.result)

    assert not _alive(worker.result)


def test_kill_tagged_finds_only_its_own_job():
    with Workers(HANG, 1) as kept, Workers(HANG, 1) as killed:
        killed.wait_for_line(0, "up")
        (description,) = kill_tagged(killed.tag)
        assert description.startswith(f"process {killed.processes[0].pid}: ")
        assert killed.wait_one(0).returncode == -signal.SIGKILL
        assert kept.is_running(0)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"cluster": ["10.0.0.1"]}, r"^`cluster` must be 'loopback' or one host per"),
        (
            {"cluster": ["a", "b"], "handover": True},
            r"^handover=True needs cluster='loopback'\.$",
        ),
    ],
)
def test_wrong_arguments_are_refused(kwargs, match):
    with pytest.raises(ValueError, match=match):
        Workers("", 2, **kwargs)


def test_a_result_is_whole_whatever_other_threads_log():
    script = """
        import json, os, threading
        end = threading.Event()
        def log():
            while not end.is_set():
                os.write(2, b"a line of the log\\n")
        thread = threading.Thread(target=log)
        thread.start()
        for number in range(5000):
            print("RESULT", json.dumps([number]), flush=True)
        end.set()
        thread.join()
    """
    with Workers(script, 1) as job:
        (worker,) = job.succeed()
    assert worker.results == [[number] for number in range(5000)]
