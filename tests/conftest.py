"""Fixtures on top of `workers` and `hosts`, and the check that nothing is left."""

import collections
import contextlib
import ctypes
import gc
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import sitecustomize  # noqa: F401  # as in all processes that tests start

from hosts import Hosts
from kerasdist.transport.memory import SEGMENT_NAME
from pace import bound, calibrate, slowness
from workers import WARM

# Before anything imports TensorFlow.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
# What pytest makes of asserts is kept for the next run, whatever the environment says:
# it takes each process that runs tests as long as the import of TensorFlow.
sys.dont_write_bytecode = False

# The same examples in each run, and none that depends on how fast the machine is.
hypothesis.settings.register_profile(
    "suite", derandomize=True, deadline=None, database=None
)
hypothesis.settings.load_profile("suite")

_PR_SET_CHILD_SUBREAPER = 36
_SHM = Path("/dev/shm")
# How a file made with O_TMPFILE shows in /proc.
_UNNAMED = f"/memfd:{SEGMENT_NAME}"
# What ends by itself after a test (a peer's thread, a killed process) may take
# this long, in seconds, see `bound`.
_GRACE = 15.0
# Files with a test that may take so many seconds are long.
_LONG = 400.0
# The file of the latest test.
_FILE = pytest.StashKey[Path]()
# Segments that were found mapped after a test.
_left_mapped: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    calibrate()
    # Orphaned grandchildren become children of this process, so that they are
    # found here instead of living on under init.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    # Where the suite runs in the background (`&`, nohup) these are ignored, and
    # would be in every process that a test starts.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            default = signal.SIG_DFL
            if number == signal.SIGINT:
                default = signal.default_int_handler
            signal.signal(number, default)


# With `pytest -n` several processes run tests, and tell another one, which runs none,
# what they have found.


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    found = getattr(node, "workeroutput", {}).get("why_cold")
    WARM.why_cold = WARM.why_cold or found


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["why_cold"] = WARM.why_cold
    WARM.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if reason := WARM.why_cold:
        terminalreporter.write_line(f"Slow: workers started cold: {reason}.", red=True)
    if slowness() > 1.2:
        terminalreporter.write_line(
            f"This machine was {slowness():.1f} times as slow as the usual one."
        )
    skipped = collections.Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
    )
    for why, count in skipped.items():
        tests = "1 test was" if count == 1 else f"{count} tests were"
        terminalreporter.write_line(f"Not checked here: {tests} skipped: {why}")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Time-outs of tests grow as all bounds do; long files are begun first."""
    long = set()
    for item in items:
        mark = item.get_closest_marker("timeout")
        if seconds := mark.args[0] if mark else config.getini("timeout"):
            if float(seconds) >= _LONG and not item.get_closest_marker("soak"):
                long.add(item.path)
            scaled = pytest.mark.timeout(bound(float(seconds)))
            item.add_marker(scaled, append=False)
    # Or `pytest -n` would wait for one of them in the end.
    items.sort(key=lambda item: item.path not in long)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path != item.config.stash.get(_FILE, None):
        # What lives on after a file of tests, TensorFlow and its graphs among it, would
        # be looked at by each collection from then on: in the end that took seconds.
        item.config.stash[_FILE] = item.path
        gc.collect()
        gc.freeze()
    if item.get_closest_marker("netns") and (reason := Hosts.available()):
        if os.environ.get("CI"):
            # There it would be a hole in the net that nobody sees.
            pytest.fail(f"This test must run in CI, but {reason}.")
        pytest.skip(reason)


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    """Two hosts with an address each. The test needs the marker `netns`."""
    with Hosts(2) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `placement_zoo.plain_numbers` keeps what several jobs compare with."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all processes that run tests
    folder = base / "plain"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def _no_surrounding_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run inside a Slurm job or a worker; they mustn't notice."""
    for name in os.environ:
        if name == "TF_CONFIG" or name.startswith(("KERASDIST_", "SLURM_")):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = existing(before=True)
    yield
    deadline = time.monotonic() + bound(_GRACE)
    named = {_name(each) for each in before}
    while left := {each for each in existing() if _name(each) not in named}:
        gc.collect()  # an array in a cycle keeps its segment mapped
        if time.monotonic() > deadline:
            pytest.fail(
                "The test left behind:\n  " + "\n  ".join(sorted(left)), pytrace=False
            )
        time.sleep(0.02)  # rare: nothing tells when all of them are gone


def existing(*, before: bool = False) -> set[str]:
    """What a test could leave behind and exists now, described.

    `before` a test mapped segments of which nothing is in memory needn't be among it,
    as long as no test has left any.
    """
    return {
        *_segments(before),
        *_processes(),
        *_listeners(),
        *_threads(),
        *(f"network namespace {name}" for name in Hosts.leftovers()),
    }


def _segments(before: bool) -> Iterator[str]:
    found = [name for name in os.listdir(_SHM) if name.startswith("kerasdist")]
    # Other jobs of this machine have theirs, and rightly.
    others = _mapped_by_others() if found else ""
    for name in found:
        if f"{_SHM / name}" not in others:
            yield f"segment {_SHM / name}"
    # A segment without a name lives as long as somebody has it open or mapped.
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            continue  # the one by which the folder was read
        if target.startswith(_UNNAMED):
            with contextlib.suppress(FileNotFoundError):
                yield f"open segment {link.stat().st_ino}"
    # With TensorFlow in memory the next file takes some ms, and there are many tests.
    quick = before and not _left_mapped
    if quick and "RssShmem:\t       0 kB" in Path("/proc/self/status").read_text():
        return
    maps = Path("/proc/self/maps").read_bytes()
    if _UNNAMED.encode() in maps:
        for line in maps.decode().splitlines():
            if _UNNAMED in line:
                number = line.split(maxsplit=5)[4]
                _left_mapped.add(number)
                yield f"mapped segment {number}"


def _mapped_by_others() -> str:
    ours = {os.getpid(), *_descendants(os.getpid())}
    texts = []
    for pid in psutil.pids():
        if pid not in ours:
            try:
                texts.append(Path(f"/proc/{pid}/maps").read_text())
            except OSError:
                continue  # it has ended, or isn't ours to see
    return "\n".join(texts)


def _name(thing: str) -> str:
    """What a thing is called all the time: processes change their command lines."""
    return thing.partition(":")[0] if thing.startswith("process ") else thing


def _processes() -> Iterator[str]:
    kept = WARM.pids
    for pid in _descendants(os.getpid()):
        if pid in kept:
            continue  # they end with the last test
        try:
            child = psutil.Process(pid)
            if child.status() == psutil.STATUS_ZOMBIE:
                continue  # it has ended
            command = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        # Python starts it once for multiprocessing, and it ends with us.
        if "multiprocessing.resource_tracker" not in command:
            yield f"process {pid}: {command}"


def _descendants(pid: int) -> list[int]:
    try:
        # psutil would read a file of each process of the machine.
        lists = [
            (Path(f"/proc/{pid}/task") / thread / "children").read_text()
            for thread in os.listdir(f"/proc/{pid}/task")
        ]
    except OSError:  # a thread or a process that has ended
        with contextlib.suppress(psutil.NoSuchProcess):
            return [p.pid for p in psutil.Process(pid).children(recursive=True)]
        return []
    children = [int(child) for one in lists for child in one.split()]
    return [*children, *(one for child in children for one in _descendants(child))]


def _listeners() -> Iterator[str]:
    # psutil would read a table of all connections of the machine.
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            number = os.dup(fd)
        except OSError:
            continue  # closed since
        # Closed again is the number, not the socket.
        found = socket.socket(fileno=number)
        with found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                host, port = found.getsockname()[:2]
                yield f"listening socket {host}:{port}"


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if thread.name.startswith("kerasdist"):
            yield f"thread {thread.name}"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """A function that returns what the library has logged, from level INFO on."""
    caplog.set_level("INFO", "kerasdist")
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name.partition(".")[0] == "kerasdist"
    ]
