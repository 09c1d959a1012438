"""`kerasdist.run`: real launchers and workers, which don't need TensorFlow."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kerasdist
from kerasdist import errors
from launching import Launcher, launcher_in
from pace import bound

# What scripts and cells begin with.
WHO = """
import json, os, signal, sys, time
import kerasdist

def who():
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    return task["type"], task["index"]
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logs of failed jobs are kept; here they aren't needed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launcher_in(tmp_path) as made:
        yield made


def start(launcher: Launcher, script: str) -> subprocess.Popen[bytes]:
    (launcher.folder / "script.py").write_text(WHO + script)
    return launcher.start_plain("script.py", env={})


def run_script(launcher: Launcher, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=launcher.folder,
        env=launcher.env,
        capture_output=True,
        text=True,
        timeout=bound(60),
        check=False,
    )


@functools.cache
def worker_function():
    """A function that has a name in no module, as in a notebook."""

    def rank() -> int:
        import json

        return json.loads(os.environ["TF_CONFIG"])["task"]["index"]

    return rank


# What arrives, and what returns.


def test_results_of_closures_by_rank_and_the_chiefs_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The workers have this process's environment, folder, path and arguments."""
    (tmp_path / "mine.py").write_text("VALUE = 7\n")
    # A file in the working folder, which may be another user's, is no standard module.
    (tmp_path / "json.py").write_text("raise SystemExit('not json')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MINE", "yes")
    monkeypatch.setattr(sys, "argv", ["script", "--flag"])
    rank = worker_function()

    def function(factor, *, plus):
        import mine

        print(f"I am {rank()} ünïcödé", flush=True)
        print("to stderr", file=sys.stderr)
        return {
            "rank": rank(),
            "number": factor * mine.VALUE + plus,
            "mine": [os.environ["MINE"], os.environ["OTHER"]],
            "folder": os.getcwd(),
            "arguments": sys.argv,
            "python_path": os.environ.get("PYTHONPATH"),
            "big": np.arange(2_000_000.0) if rank() else None,
        }

    found = kerasdist.run(
        function, 2, args=(2,), kwargs={"plus": 1}, env={"OTHER": "too"}
    )
    # 16 MB.
    np.testing.assert_array_equal(found[1].pop("big"), np.arange(2_000_000.0))
    assert found[0].pop("big") is None
    assert found == [
        {
            "rank": rank_,
            "number": 15,
            "mine": ["yes", "too"],
            "folder": str(tmp_path),
            "arguments": ["script", "--flag"],
            "python_path": os.environ.get("PYTHONPATH"),
        }
        for rank_ in range(2)
    ]
    out, err = capsys.readouterr()
    assert out == "I am 0 ünïcödé\n"
    assert "to stderr" in err
    assert "the others' output goes to" in err


def test_a_script_runs_once_and_its_classes_are_the_same(launcher: Launcher) -> None:
    """Functions of `__main__` are sent: the workers don't run the script again."""
    script = """
    class Found:
        def __init__(self, task):
            self.task = task

    def function():
        print("in the chief")
        return Found(who())

    with open("runs", "a") as file:
        file.write("once ")
    found = kerasdist.run(function, n=1, ps=1)
    print([(type(each) is Found, each.task) for each in found])
    print(kerasdist.run(lambda: 1 + 1, n=1))
    """
    (launcher.folder / "script.py").write_text(WHO + textwrap.dedent(script))
    done = run_script(launcher, "script.py")
    assert done.returncode == 0, done.stderr
    # The launcher writes to this process's standard output by itself.
    assert done.stdout == "in the chief\n[(True, ('worker', 0))]\n[2]\n"
    assert (launcher.folder / "runs").read_text() == "once "
    assert launcher.temporary() == []


# What goes wrong there.


class _Odd(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, one, other):
        super().__init__(f"{one} {other}")


def test_the_first_error_is_raised_here(capsys: pytest.CaptureFixture[str]) -> None:
    rank = worker_function()

    def function():
        if rank() == 1:
            raise LookupError("made")
        time.sleep(1000)

    with pytest.raises(
        errors.FunctionError, match=r"^The function failed in rank 1: LookupError: made"
    ) as info:
        kerasdist.run(function, n=2)
    assert info.value.rank == 1
    assert info.value.traceback.startswith("Traceback (most recent call last)")
    # Our own frames aren't shown, but the line of the function is.
    assert 'raise LookupError("made")' in info.value.traceback
    assert "worker.py" not in info.value.traceback
    assert info.value.traceback in str(info.value)
    cause = info.value.__cause__
    assert isinstance(cause, LookupError)
    assert str(cause) == "made"
    assert pickle.loads(pickle.dumps(info.value)).rank == 1
    assert "rank 1 failed with exit code 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "words", "cause"),
    [
        ("odd", r"^The function failed in rank 0: .*_Odd: a b\. ", None),
        ("exit", r"^The function failed in rank 0: SystemExit: 3\. ", SystemExit),
        ("leave", r"^Rank 0 ended without a result\. Received: exit code 0", None),
        ("kill", r"^The process of rank 0 was ended by signal SIGKILL", None),
        ("result", r"^The result of rank 0 can't be pickled: TypeError: ", TypeError),
        ("load", r"^The function can't be loaded in rank 0: Mod", ModuleNotFoundError),
    ],
)
def test_other_ends(how: str, words: str, cause: type | None) -> None:
    odd = _Odd

    def function():
        if how == "odd":
            raise odd("a", "b")
        if how == "exit":
            sys.exit(3)
        if how == "leave":
            os._exit(0)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return [threading.Lock()]

    if how == "load":
        function = _of_a_lost_module()
    with pytest.raises(errors.FunctionError, match=words) as info:
        kerasdist.run(function, n=1)
    assert type(info.value.__cause__) is (cause or type(None))


def _of_a_lost_module():
    """A function of a module that the workers won't find."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "lost_module.py").write_text("def function(): pass\n")
        sys.path.insert(0, folder)
        try:
            import lost_module  # type: ignore[import-not-found]
        finally:
            sys.path.remove(folder)
    return lost_module.function


def test_elastic_jobs_have_the_error_of_a_lost_worker_in_its_place(
    tmp_path: Path,
) -> None:
    """A worker that is started again has a result; one that isn't has its error."""
    rank = worker_function()

    def function():
        if rank() == 2:
            raise LookupError("made")
        if rank() == 1 and os.environ["KERASDIST_INCARNATION"] == "0":
            while not (tmp_path / "lost").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank() == 0:
            while not (tmp_path / "again").exists():
                time.sleep(0.01)
        if rank() == 1:
            (tmp_path / "again").touch()
        return rank()

    def watched(function):
        try:
            return function()
        except LookupError:
            (tmp_path / "lost").touch()
            raise

    # Rank 2 fails first and uses the first restart, rank 1 the second.
    with pytest.raises(ValueError, match=r"--min-workers must be at most"):
        kerasdist.run(watched, 3, (function,), elastic=True, min_workers=4)
    found = kerasdist.run(watched, 3, (function,), elastic=True, restarts=3)
    assert found[:2] == [0, 1]
    assert isinstance(found[2], errors.FunctionError)
    assert isinstance(found[2].__cause__, LookupError)


# What is refused before anything starts.


class _NotPicklable:
    def __reduce__(self):
        raise ValueError("never")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"function": 5}, TypeError, "`function` must be callable"),
        ({"args": [1]}, TypeError, "`args` must be a tuple"),
        ({"args": (1,)}, TypeError, "The function can't be called with these argum"),
        ({"kwargs": {1: 1}}, TypeError, "`kwargs` must be a mapping from names"),
        ({"n": None}, TypeError, "`n` must be an integer"),
        ({"n": 0}, ValueError, "`n` must be at least 1"),
        ({"n": True}, TypeError, "`n` must be an integer"),
        ({"ps": -1}, ValueError, "`ps` must be at least 0"),
        ({"elastic": 1}, TypeError, "`elastic` must be True or False"),
        ({"restarts": 1}, errors.ClusterError, ".*--restarts 1 without --elastic"),
        ({"hosts": 3}, TypeError, "`hosts` must be a text or a list of texts"),
        ({"hosts": "a:b"}, errors.ClusterError, ".*Received: 'a:b' in -H a:b"),
        ({"ssh": "ssh"}, errors.ClusterError, ".*--ssh is an option for jobs on sev"),
        ({"output": "some"}, ValueError, "`output` must be one of"),
        ({"log_dir": 3}, TypeError, "`log_dir` must be a text"),
        ({"env": {"A=": ""}}, ValueError, "`env` has names or values that no env"),
        ({"env": {"A": 1}}, TypeError, "`env` must be a mapping from names to texts"),
        ({"function": _NotPicklable().__reduce__}, TypeError, "The function or its a"),
    ],
)
def test_bad_arguments(
    arguments: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=f"^{words}|can't start the job. {words}") as info:
        kerasdist.run(**{"function": worker_function(), "n": 2, **arguments})
    assert type(info.value) is error
    assert "Received: " in str(info.value)


def test_a_call_in_a_worker_is_refused(launcher: Launcher) -> None:
    """Workers import the script's module; each would start a job of its own."""
    (launcher.folder / "mine.py").write_text(
        "import kerasdist\ndef function(): pass\nkerasdist.run(function, n=1)\n"
    )
    done = run_script(launcher, "-c", "import mine")
    assert done.returncode == 1
    assert "ClusterError: `kerasdist.run` was called in a task of a job" in done.stderr
    assert 'under `if __name__ == "__main__":`' in done.stderr


# How it is ended.

HANG = """
def stop(*_):
    raise SystemError("stop")

signal.signal(signal.SIGALRM, stop)

def hang():
    rank = who()[1]
    with open(f"up-{rank}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"up-{rank}.part", f"up-{rank}")
    time.sleep(1000)

try:
    kerasdist.run(hang, n=2)
except KeyboardInterrupt:
    sys.exit(7)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGALRM])
def test_the_end_of_the_caller_is_that_of_the_workers(
    launcher: Launcher, number: signal.Signals
) -> None:
    """By Ctrl-C, without a word, or by an exception of another handler."""
    job = start(launcher, HANG)
    launcher.wait_for("up-0", "up-1")
    job.send_signal(number)
    codes = {signal.SIGINT: 7, signal.SIGKILL: -9, signal.SIGALRM: 1}
    assert job.wait(60) == codes[number]
    launcher.nothing_runs(within=30.0 if number == signal.SIGKILL else 0.5)


def test_a_lost_launcher_is_reported(launcher: Launcher) -> None:
    script = """
def function():
    # The parent is the supervisor, that one's the launcher.
    with open(f"/proc/{os.getppid()}/stat") as file:
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
    time.sleep(1000)

try:
    kerasdist.run(function, n=1)
except kerasdist.errors.FunctionError as error:
    assert "Received: signal SIGKILL of the launcher" in str(error), error
    sys.exit(7)
"""
    assert start(launcher, script).wait(bound(60)) == 7
    launcher.nothing_runs(within=0.5)
