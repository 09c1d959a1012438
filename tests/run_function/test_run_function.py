import functools
import importlib.util
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import psutil
import pytest

import kerasdist
from kerasdist import errors
from kerasdist.run_function import launcher as files
from launching import Launcher, launcher_in
from workers import ended


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launcher_in(tmp_path) as made:
        yield made


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logs of failed jobs are kept; here they aren't needed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def run_script(launcher: Launcher, *args: str) -> subprocess.CompletedProcess[str]:
    return ended(sys.executable, *args, cwd=launcher.folder, env=launcher.env)


@functools.cache
def worker_function():
    """A function that has a name in no module, as in a notebook."""

    def rank() -> int:
        import json

        return json.loads(os.environ["TF_CONFIG"])["task"]["index"]

    return rank


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
            "number": factor * mine.VALUE + plus,
            "mine": [os.environ["MINE"], os.environ["OTHER"]],
            "folder": os.getcwd(),
            "arguments": sys.argv,
            "python_path": os.environ.get("PYTHONPATH"),
            "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
        }, np.arange(2_000_000.0) * rank()  # 16 MB

    more = {"OTHER": "too", "CUDA_VISIBLE_DEVICES": "4,5,6"}
    found = kerasdist.run(function, 2, args=(2,), kwargs={"plus": 1}, env=more, gpus=1)
    for each, (settings, big) in enumerate(found):
        np.testing.assert_array_equal(big, np.arange(2_000_000.0) * each)
        assert settings == {
            **{"number": 15, "mine": ["yes", "too"], "folder": str(tmp_path)},
            **{"arguments": ["script", "--flag"], "gpus": "45"[each]},
            "python_path": os.environ.get("PYTHONPATH"),
        }
    out, err = capsys.readouterr()
    assert out == "I am 0 ünïcödé\n"
    assert "to stderr" in err
    assert "the others' output goes to" in err


def test_a_script_runs_once_and_its_classes_are_the_same(launcher: Launcher) -> None:
    """Functions of `__main__` are sent: the workers don't run the script again."""
    script = """
    import json, os
    import kerasdist

    class Found:
        def __init__(self, task):
            self.task = task

    def function():
        print("chief")
        return Found(json.loads(os.environ["TF_CONFIG"])["task"])

    with open("runs", "a") as file:
        file.write("once ")
    found = kerasdist.run(function, n=1, ps=1)
    print([(type(each) is Found, each.task) for each in found])
    print(kerasdist.run(lambda: 1 + 1, n=1))
    """
    (launcher.folder / "script.py").write_text(textwrap.dedent(script))
    done = run_script(launcher, "script.py")
    assert done.returncode == 0, done.stderr
    # The launcher writes to this process's standard output by itself.
    assert done.stdout == "chief\n[(True, {'type': 'worker', 'index': 0})]\n[2]\n"
    assert (launcher.folder / "runs").read_text() == "once "
    assert launcher.temporary() == []


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


@pytest.mark.soak
def test_elastic_jobs_have_errors_in_the_places_of_results() -> None:
    rank, odd = worker_function(), _Odd

    def function():
        match rank():
            case 0:
                return "result"
            case 1:
                raise odd("a", "b")
            case 2:
                sys.exit(3)
            case 3:
                os.kill(os.getpid(), signal.SIGKILL)
            case 4:
                raise LookupError(threading.Lock())
        return [threading.Lock()]

    first, *errors_ = kerasdist.run(function, 6, elastic=True)
    assert first == "result"
    expected = [
        (r"The function failed in rank 1: .*_Odd: a b\. ", None),
        (r"The function failed in rank 2: SystemExit: 3\. ", SystemExit),
        (r"The process of rank 3 was ended by signal SIGKILL", None),
        (r"The function failed in rank 4: LookupError: <unlocked", None),
        (r"The result of rank 5 can't be pickled: TypeError: ", TypeError),
    ]
    for error, (words, cause) in zip(errors_, expected, strict=True):
        assert isinstance(error, errors.FunctionError)
        assert re.match(words, str(error))
        assert type(error.__cause__) is (cause or type(None))


def test_a_worker_that_is_started_again_has_a_result(tmp_path: Path) -> None:
    rank = worker_function()

    def function():
        if rank() == 0:
            while not (tmp_path / "again").exists():
                time.sleep(0.01)
        elif os.environ["KERASDIST_INCARNATION"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / "again").touch()
        return rank()

    assert kerasdist.run(function, 2, elastic=True, restarts=1) == [0, 1]


def test_a_module_that_the_workers_do_not_find_and_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lost_module.py").write_text("def function(): pass\n")
    with monkeypatch.context() as here:
        here.syspath_prepend(str(tmp_path))
        import lost_module  # type: ignore[import-not-found]
    words = r"^The function can't be loaded in rank 0: Mod"
    with pytest.raises(errors.FunctionError, match=words) as info:
        kerasdist.run(lost_module.function, n=1)
    assert isinstance(info.value.__cause__, ModuleNotFoundError)
    words = r"^Rank 0 ended without a result\. Received: exit code 0"
    with pytest.raises(errors.FunctionError, match=words):
        kerasdist.run(os._exit, n=1, args=(0,))


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
        ({"n": 0}, ValueError, "`n` must be at least 1"),
        ({"n": True}, TypeError, "`n` must be an integer"),
        ({"elastic": 1}, TypeError, "`elastic` must be True or False"),
        ({"restarts": 1}, errors.ClusterError, ".*--restarts 1 without --elastic"),
        ({"hosts": 3}, TypeError, "`hosts` must be a text or a list of texts"),
        ({"gpus": True}, TypeError, "`gpus` must be a text or an integer"),
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


def test_an_exception_of_a_handler_ends_the_workers(tmp_path: Path) -> None:
    def stop(*_):
        raise SystemError("stop")

    caller, handler = os.getpid(), signal.signal(signal.SIGUSR2, stop)

    def function():
        (tmp_path / "worker").write_text(str(os.getpid()))
        os.kill(caller, signal.SIGUSR2)
        time.sleep(1000)

    try:
        with pytest.raises(SystemError, match=r"^stop$"):
            kerasdist.run(function, 1)
    finally:
        signal.signal(signal.SIGUSR2, handler)
    assert not psutil.pid_exists(int((tmp_path / "worker").read_text()))


def test_a_lost_launcher_is_reported(launcher: Launcher) -> None:
    script = """
import os, signal, sys, time
import kerasdist

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
    (launcher.folder / "script.py").write_text(script)
    assert run_script(launcher, "script.py").returncode == 7
    launcher.nothing_runs(within=0.5)


@pytest.fixture
def file() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as made:
        yield made


def test_a_value_and_its_absence(file: IO[bytes]) -> None:
    """A file that isn't whole has none: its process was killed."""
    assert files.read_result(file) is None
    with pytest.raises((TypeError, pickle.PicklingError)):
        files.write_value(file.fileno(), [bytes(1_000_000), threading.Lock()])
    assert files.read_result(file) is None
    files.write_value(file.fileno(), None)
    assert files.read_result(file) == (None,)
    assert files.read_error(file) is None
    files.write_value(file.fileno(), {"a": [1, 2]})
    assert files.read_result(file) == ({"a": [1, 2]},)
    file.truncate(file.seek(0, 2) - 1)
    assert files.read_result(file) is None


def test_an_error_after_the_disk_was_full(file: IO[bytes]) -> None:
    """The part of the value that was written makes room for the error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"^\[Errno 27\]") as info:
            files.write_value(file.fileno(), ["a" * 10, bytes(1_000_000)])
        files.write_error(file.fileno(), "result", info.value, "list")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found = files.read_error(file)
    assert found is not None
    assert (found.stage, found.result) == ("result", "list")
    assert isinstance(found.exception(), OSError)


_NEEDED = ("ipykernel", "jupyter_client")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]

# A notebook's server, with a user who waits for what is shown.
DRIVER = """
import os, threading, time
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60)

def shown(code, look=lambda text: None):
    parts = []

    def add(message):
        content = message["content"]
        lines = content.get("traceback", [content.get("text", "")])
        parts.extend([*lines, content.get("data", {}).get("text/plain", "")])
        look("".join(parts))

    client.execute_interactive(code, timeout=60, output_hook=add)
    return "".join(parts)

def when_both_are_up(act):
    while not (os.path.exists("up-0") and os.path.exists("up-1")):
        time.sleep(0.01)
    act()

def look(text):
    if "step 1 of 0\\n" in text:
        open("seen", "w").close()

try:
    assert shown('''
import inspect, json, os, time
import kerasdist

def rank():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]

def wait():
    print(f"step 1 of {rank()}")
    while not os.path.exists("seen"):
        time.sleep(0.01)
    print("step 2\\\\rstep 3")
    return rank(), inspect.getsource(rank).count("TF_CONFIG")

def fail():
    raise LookupError("made")  # here

def hang():
    open(f"up-{rank()}", "w").close()
    time.sleep(1000)
''') == ""

    text = shown("kerasdist.run(wait, n=2)", look)
    assert "step 2\\rstep 3\\n" in text, text
    # Cells have no file; the workers know their lines.
    assert text.endswith("[(0, 1), (1, 1)]"), text
    assert "of 1" not in text, text

    text = shown("kerasdist.run(fail, n=1)")
    assert "FunctionError" in text and "LookupError" in text, text
    assert 'raise LookupError("made")  # here' in text, text

    stop = threading.Thread(target=when_both_are_up, args=[manager.interrupt_kernel])
    stop.start()
    text = shown("kerasdist.run(hang, n=2)")
    assert "KeyboardInterrupt" in text, text
    os.remove("up-0")
    os.remove("up-1")

    client.execute("kerasdist.run(hang, n=2)")
    when_both_are_up(lambda: None)
finally:
    manager.shutdown_kernel(now=True)
    client.stop_channels()
print("DONE")
"""


@pytest.mark.skipif(
    bool(_MISSING) and not os.environ.get("CI"), reason=f"{_MISSING} isn't installed"
)
def test_a_notebook(launcher: Launcher) -> None:
    """Output is there while it's made; interrupt and kill leave nothing behind."""
    launcher.env["JUPYTER_RUNTIME_DIR"] = str(launcher.folder / "runtime")
    launcher.env["IPYTHONDIR"] = str(launcher.folder / "ipython")
    (launcher.folder / "driver.py").write_text(DRIVER)
    done = run_script(launcher, "driver.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "DONE\n"
    launcher.nothing_runs()
