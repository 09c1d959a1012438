"""Forked workers: what a new interpreter would be, but for what is imported."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

import warm
from pace import bound
from waiting import wait_until
from workers import TAG, WARM, Workers, python_env

# Scripts that import TensorFlow are run by forks; of Keras without scikit-learn.
IMPORT = """
import sys
sys.modules["sklearn"] = None
import keras, tensorflow
del sys.modules["sklearn"]
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


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_forks_can_be_made_here():
    if not WARM.prepare(1):
        if os.environ.get("CI"):
            pytest.fail(f"The tests would take long: {WARM.why_cold}.")
        pytest.skip(WARM.why_cold)


STATE = """
import faulthandler, gc, locale, os, resource, signal, stat, threading, warnings

def named(fd):
    return os.readlink(f"/proc/self/fd/{fd}").replace(sys.path[0], "FOLDER")

def status(name):
    with open("/proc/self/status") as file:
        return [line.split()[1:] for line in file if line.startswith(name)]

print("RESULT", json.dumps({
    "argv": sys.argv[1:], "script": os.path.basename(sys.argv[0]),
    "orig_argv": sys.orig_argv == [sys.executable, *sys.argv],
    "first on the path": sys.path[0] == os.path.dirname(__file__),
    "path": sys.path[1:],
    "main": sys.modules["__main__"].__dict__ is globals(),
    "names": sorted(before), "name": __name__, "file": __file__ == sys.argv[0],
    "spec": __spec__, "package": __package__,
    "loader": [type(__loader__).__name__, __loader__.path == __file__],
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
    "listener": stat.S_ISSOCK(os.fstat(int(os.environ["KERASDIST_LISTEN_FD"])).st_mode),
    "inherited": os.get_inheritable(int(os.environ["KERASDIST_LISTEN_FD"])),
    "handlers": {s: str(signal.getsignal(s)) for s in signal.valid_signals()
                 if s != signal.SIGINT},
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "signals": [status("SigBlk"), status("SigIgn"), status("SigCgt")],
    "threads": [t.name for t in threading.enumerate()], "tasks": status("Threads"),
    "main thread": threading.main_thread() is threading.current_thread(),
    "native": threading.get_native_id() == os.getpid(),
    "faulthandler": faulthandler.is_enabled(),
    "locale": locale.setlocale(locale.LC_ALL), "umask": os.umask(0o22),
    "limits": [resource.getrlimit(n) for n in (
        resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_STACK)],
    "affinity": sorted(os.sched_getaffinity(0)), "nice": os.nice(0),
    "recursion": sys.getrecursionlimit(), "switch": sys.getswitchinterval(),
    "hooks": [sys.excepthook is sys.__excepthook__,
              threading.excepthook is threading.__excepthook__,
              sys.stdout is sys.__stdout__, sys.gettrace(), sys.getprofile()],
    "gc": [gc.isenabled(), gc.get_threshold()],
    "filters": [str(f) for f in warnings.filters],
    "modules": sorted(name for name in sys.modules if "." not in name),
    "helpers": [name for name in ("warm", "warm_process", "workers", "psutil", "pytest")
                if name in sys.modules and name != "psutil"],
}))
"""


def test_a_fork_is_in_the_state_of_a_new_interpreter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = "before = list(globals())\nimport json, sys\n" + IMPORT + STATE
    (cold,), (forked,) = both(
        script, args=["--epochs", "2", ""], env={"FOLDER": "ä", "HOSTNAME": None}
    )
    expected, result = cold.result, forked.result
    assert expected.keys() == result.keys()
    for name, value in expected.items():
        assert result[name] == value, name
    assert result["helpers"] == []


ENDS = {
    "exits with a text": "sys.exit('why')",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "has threads": (
        "atexit.register(print, 'at exit')\n"
        "def outlive():\n"
        "    threading.main_thread().join()\n"
        "    print('thread')\n"
        "threading.Thread(target=outlive).start()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print('main')"
    ),
    "has processes": (
        "from concurrent.futures import ProcessPoolExecutor as Pool\n"
        "import multiprocessing\n"
        "def square(x):\n"
        "    return x * x\n"
        "if __name__ == '__main__':\n"
        "    for way in ('fork', 'spawn'):\n"
        "        context = multiprocessing.get_context(way)\n"
        "        with Pool(2, mp_context=context) as pool:\n"
        "            print(list(pool.map(square, range(3))))"
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_ends_like_a_new_interpreter(end):
    script = "import atexit, os, signal, sys, threading, time\n" + ENDS[end]
    # The text alone makes it a script that is run by a fork; nobody has to wait for
    # the import in a new interpreter.
    (cold,), (forked,) = both(script + "\n# tensorflow\n", args=["a"])

    def told(finished):
        return re.sub(r"/\S*/kerasdist-test-\w+", "FOLDER", finished.output)

    assert (forked.returncode, told(forked)) == (cold.returncode, told(cold))


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
        with Workers(script, 2) as job:
            said += [finished.result for finished in job.succeed()]
    for i in range(4):
        assert len({json.dumps(result[i]) for result in said}) == 4
    # A warm process forks workers of one rank only.
    assert said[0][4] != said[1][4]


@pytest.mark.parametrize(
    ("script", "more", "cold"),
    [
        (IMPORT, {}, False),
        (IMPORT, {"env": {"FOLDER": "/", "KERASDIST_LOG": "1"}}, False),
        (IMPORT, {"cold": True}, True),
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


def test_grandchildren_without_an_environment_of_their_own_carry_the_tag():
    script = """
        import os, signal, sys
        import tensorflow
        child = os.fork()
        if child == 0:
            os.setsid()
            signal.pause()
        print("RESULT", child)
        sys.stdout.flush()
        os._exit(0)
    """
    with Workers(script, 1) as job:
        (worker,) = job.succeed()
        assert psutil.Process(worker.result).environ()[TAG] == job.tag
    assert not _alive(worker.result)


def test_warm_processes_end_with_the_tests():
    """Also if pytest is killed, and can't end them."""
    code = (
        "import ctypes, os, signal, sys\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from workers import WARM\n"
        "assert WARM.prepare(1)\n"
        "print(WARM.pids[0], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=python_env(),
        stdout=subprocess.PIPE,
        timeout=bound(120),
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    wait_until(lambda: not _alive(pid), "the end of the warm process")
