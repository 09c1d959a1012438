import psutil
import pytest

import workers
from sessions import Session
from workers import Workers, python_env

HANG = """
    import signal
    print("up", flush=True)
    while True:
        signal.pause()
"""


def test_python_env_holds_no_cluster_settings_of_the_surroundings(monkeypatch):
    settings = {"TF_CONFIG": "{}", "SLURM_PROCID": "1", "KERASDIST_SECRET": "x"}
    monkeypatch.setattr(workers, "_SURROUNDINGS", {"OTHER": "0", **settings})
    env = python_env({"EXTRA": "1"})
    assert (env["EXTRA"], env["OTHER"]) == ("1", "0")
    assert not settings.keys() & env.keys()


def test_a_hanging_worker_is_killed_at_the_deadline_its_output_and_stacks_shown():
    words = (
        r"^Ranks \[0, 1\] were still running at the deadline\.\n"
        r"---- rank 0, 127\.0\.0\.1:\d+, running ----\nup\n(.|\n)*"
        r"---- rank 1, 127\.0\.0\.1:\d+, running ----\nup\n(.|\n)*"
        r"script\.py\", line 5 in <module>"
    )
    with pytest.raises(pytest.fail.Exception, match=words), Workers(HANG, 2) as job:
        job.wait_for_line(0, "up")
        job.wait_for_line(1, "up")
        job.wait(deadline=0.1)
    assert not any(psutil.pid_exists(process.pid) for process in job.processes)


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


def test_scripts_of_a_session_have_their_own_names_output_and_failures():
    setup = "import json, os\nshared = []\n"
    before = "mine = []\n"
    body = (
        'shared.append(1); mine.append(1); print("said")\n'
        'print("RESULT", json.dumps([len(shared), len(mine), os.environ["WHAT"]]))\n'
    )
    with Session(setup, 2, before=before) as session:
        assert session.run(body, WHAT="a") == [[1, 1, "a"]] * 2
        first, _ = session.finish(body, WHAT="b")
        assert first.result == [2, 1, "b"]
        assert first.output.count("said") == 1
        with pytest.raises(pytest.fail.Exception, match="ZeroDivisionError"):
            session.run("1 / 0")
        # In a job of its own.
        assert session.run(body, WHAT="c") == [[1, 1, "c"]] * 2
