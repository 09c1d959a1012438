"""Forked workers: what a new interpreter would be, but for what is imported."""

import importlib
import json
import os
import re
import subprocess

import pytest

import warm
from workers import WARM, Workers

IMPORT = """
import sys
import keras, tensorflow
from kerasdist import ModelParallelStrategy, ParameterServerStrategy, RingStrategy
"""


def both(script, size=1, **more):
    """The finished workers: of new interpreters, and of forks."""
    finished = []
    for cold in (True, False):
        with Workers(script, size, cold=cold, **more) as job:
            kinds = {type(process) for process in job.processes}
            assert kinds == {subprocess.Popen if cold else warm.Forked}
            finished.append(job.wait())
    return finished


def test_forks_can_be_made_here():
    if not WARM.prepare(1):
        if os.environ.get("CI"):
            pytest.fail(f"The tests would take long: {WARM.why_cold}.")
        pytest.skip(WARM.why_cold)


STATE = """
import faulthandler, locale, os, resource, signal, stat, threading

def named(fd):
    return os.readlink(f"/proc/self/fd/{fd}").replace(sys.path[0], "FOLDER")

def status(name):
    with open("/proc/self/status") as file:
        return [line.split()[1:] for line in file if line.startswith(name)]

listener = int(os.environ["KERASDIST_LISTEN_FD"])
print("RESULT", json.dumps({
    "argv": [sys.argv[1:], sys.orig_argv == [sys.executable, *sys.argv]],
    "path": [sys.path[0] == os.path.dirname(sys.argv[0]), sys.path[1:]],
    "names": sorted(before), "name": __name__, "file": __file__ == sys.argv[0],
    "module": [__spec__, __package__, type(__loader__).__name__],
    "folder": os.getcwd(), "flags": str(sys.flags), "executable": sys.executable,
    "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "parent": os.getppid(),
    "environment": {k: v for k, v in os.environ.items() if k not in (
        "TF_CONFIG", "KERASDIST_SECRET", "KERASDIST_LISTEN_FD", "KERASDIST_TEST_JOB")},
    "output": [named(1), named(2), sys.stdout.encoding, sys.stdout.line_buffering,
               sys.stdout.write_through, sys.stderr.write_through],
    "input": [named(0), sys.stdin.read()],
    "descriptors": sorted(named(fd) for fd in os.listdir("/proc/self/fd")
                          if os.path.exists(f"/proc/self/fd/{fd}")
                          and not named(fd).startswith(("socket", "/proc"))),
    "listener": [stat.S_ISSOCK(os.fstat(listener).st_mode),
                 os.get_inheritable(listener)],
    "handlers": {s: str(signal.getsignal(s)) for s in signal.valid_signals()
                 if s != signal.SIGINT},
    "signals": [status("SigBlk"), status("SigIgn"), status("SigCgt")],
    "threads": [t.name for t in threading.enumerate()], "tasks": status("Threads"),
    "faulthandler": faulthandler.is_enabled(),
    "locale": locale.setlocale(locale.LC_ALL), "umask": os.umask(0o22),
    "limits": [resource.getrlimit(n) for n in (
        resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_STACK)],
    "modules": sorted(name for name in sys.modules if "." not in name),
}))
"""


@pytest.mark.soak
def test_a_fork_is_in_the_state_of_a_new_interpreter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = "before = list(globals())\nimport json, sys\n" + IMPORT + STATE
    (cold,), (forked,) = both(
        script, args=["--epochs", "2", ""], env={"FOLDER": "ä", "HOSTNAME": None}
    )
    for name, value in cold.result.items():
        assert forked.result[name] == value, name


END = """
import atexit, multiprocessing, sys, threading
from concurrent.futures import ProcessPoolExecutor as Pool

def square(x):
    return x * x

def outlive():
    threading.main_thread().join()
    print("thread")

if __name__ == "__main__":
    for way in ("fork", "spawn"):
        with Pool(2, mp_context=multiprocessing.get_context(way)) as pool:
            print(list(pool.map(square, range(3))))
    atexit.register(print, "at exit")
    threading.Thread(target=outlive).start()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    sys.exit("why")
"""


def test_a_fork_ends_like_a_new_interpreter():
    """With threads, processes, functions that are called at the end, and an error."""
    # The text alone makes it a script that is run by a fork; nobody has to wait for
    # the import in a new interpreter.
    (cold,), (forked,) = both(END + "\n# tensorflow\n")

    def told(finished):
        return re.sub(r"/\S*/kerasdist-test-\w+", "FOLDER", finished.output)

    assert (forked.returncode, told(forked)) == (cold.returncode, told(cold))
    assert "thread\n" in forked.output


def test_random_numbers_and_hashes_differ_between_workers_and_jobs():
    script = """
import json, random
import keras
import numpy as np
print("RESULT", json.dumps([
    random.random(), np.random.rand(), keras.random.uniform([]).numpy().item(),
    keras.random.SeedGenerator().state.numpy().tolist(), hash("a")]))
"""
    said = []
    for _ in range(2):
        said += Workers(script, 2).results()
    for i in range(4):
        assert len({json.dumps(result[i]) for result in said}) == 4
    # A warm process forks workers of one rank only.
    assert said[0][4] != said[1][4]


@pytest.mark.parametrize(
    ("script", "more", "cold"),
    [
        (IMPORT, {"env": {"FOLDER": "/", "KERASDIST_LOG": "1"}}, False),
        (IMPORT, {"prefix": lambda rank: ["env", "A=1"]}, True),
        ("import kerasdist", {}, True),
        (IMPORT, {"env": {"TF_XLA_FLAGS": "1"}}, True),
        (IMPORT, {"env": {"OMP_NUM_THREADS": None}}, True),
    ],
)
def test_which_workers_start_cold(script, more, cold):
    """Those that would see other variables while they import are among them."""
    importlib.import_module("tensorflow")  # sets some, in this process
    with Workers("import sys\nsys.exit()\n" + script, 1, **more) as job:
        assert isinstance(job.processes[0], warm.Forked) is not cold
