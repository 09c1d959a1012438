import shutil
import sys

import pytest

from places import SUPPORT, TESTS
from workers import ended

# Each of these tests leaves something behind; the last doesn't.
BAD = """
import mmap, os, socket, subprocess, sys, threading, pytest
import conftest, hosts
from kerasdist.transport.memory import create_segment

conftest._GRACE = 0.1
kept = []

def test_process():
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    kept.append(subprocess.Popen(command))

def test_orphan():
    subprocess.run(["sh", "-c", "sleep 1000 & exit"], start_new_session=True)

def test_listener():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_segment():
    open(f"/dev/shm/kerasdist-test-{os.getpid()}", "w").close()

def test_mapping():
    fd = create_segment(4096)
    kept.append(mmap.mmap(fd, 4096))
    os.close(fd)

def test_fd():
    kept.append(open(create_segment(4096), "wb"))

def test_thread():
    threading.Thread(
        target=kept.append, args=[None], name="kerasdist-done").start()
    threading.Thread(
        target=threading.Event().wait, name="kerasdist-left", daemon=True).start()

@pytest.mark.netns
def test_namespace():
    kept.append(hosts.Hosts(1).__enter__())

def test_good():
    with socket.create_server(("127.0.0.1", 0)):
        subprocess.run(["true"])

@pytest.fixture(scope="module", autouse=True)
def clean_up():
    yield
    for thing in kept:
        if isinstance(thing, subprocess.Popen):
            thing.kill()
            thing.wait()
        if hasattr(thing, "close"):
            thing.close()
    os.unlink(f"/dev/shm/kerasdist-test-{os.getpid()}")
    import psutil
    for child in psutil.Process().children():
        child.kill()
"""


@pytest.mark.netns
def test_what_is_left_behind_fails_the_test_and_is_named(tmp_path):
    shutil.copy(TESTS / "conftest.py", tmp_path)
    for name in ("closing", "hosts", "pace", "warm", "workers"):
        shutil.copy(SUPPORT / f"{name}.py", tmp_path)
    (tmp_path / "test_bad.py").write_text(BAD)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = netns\n")

    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_bad.py")
    done = ended(*command, cwd=tmp_path)

    # Every test body passes; the check afterwards is an error.
    assert "9 passed, 8 errors" in done.stdout, done.stdout + done.stderr
    for test, left in [
        ("process", "process "),
        ("orphan", "process "),
        ("listener", "listening socket 127.0.0.1:"),
        ("segment", "segment /dev/shm/kerasdist-test-"),
        ("mapping", "mapped segment "),
        ("fd", "open segment "),
        ("thread", "thread kerasdist-left"),
        ("namespace", "network namespace kerasdist-"),
    ]:
        _, _, after = done.stdout.partition(f"ERROR at teardown of test_{test} ")
        assert f"The test left behind:\n  {left}" in after.partition("____ ERROR")[0]
