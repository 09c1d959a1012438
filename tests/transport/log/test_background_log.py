"""Lines are written by a thread of their own, in order, and none too many are kept."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from kerasdist.transport.log import background_log
from waiting import wait_until
from workers import python_env

pytestmark = pytest.mark.timeout(60)


class Slow(logging.Handler):
    """Writes when it is allowed to."""

    def __init__(self):
        super().__init__()
        self.begun, self.may = threading.Event(), threading.Event()
        self.lines = []

    def emit(self, record):
        self.begun.set()
        self.may.wait(30)
        self.lines.append(record.getMessage())


@pytest.fixture
def slow():
    handler = Slow()
    logger = logging.getLogger("kerasdist")
    logger.addHandler(handler)
    yield handler
    handler.may.set()
    background_log.flush(10)
    logger.removeHandler(handler)


def test_nobody_waits_for_a_reader_that_has_stopped_and_order_is_kept(slow):
    for number in range(5):
        background_log.log(logging.WARNING, "line %d", number)
    background_log.flush(0.01)
    assert slow.lines == []
    slow.may.set()
    background_log.flush(10)
    assert slow.lines == [f"line {number}" for number in range(5)]
    wait_until(
        lambda: all(t.name != "kerasdist-log" for t in threading.enumerate()),
        "the end of the thread that has nothing to write",
    )


def test_a_queue_that_is_full_counts_what_it_drops(slow, monkeypatch):
    monkeypatch.setattr(background_log, "MOST_LINES", 3)
    background_log.log(logging.WARNING, "first")
    assert slow.begun.wait(10)
    for number in range(8):
        background_log.log(logging.WARNING, "line %d", number)
    slow.may.set()
    background_log.flush(10)
    assert slow.lines[:4] == ["first", "line 0", "line 1", "line 2"]
    assert slow.lines[4:] == ["kerasdist: 5 more lines were not written"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_writes_its_own_lines_only(slow):
    background_log.log(logging.WARNING, "the parent's")
    assert slow.begun.wait(10)
    background_log.log(logging.WARNING, "the parent's, too")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        background_log.log(logging.WARNING, "the child's")
        background_log.flush(10)
        os.write(writing, f"{slow.lines}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "[]"
    os.waitpid(pid, 0)
    slow.may.set()
    background_log.flush(10)
    assert slow.lines == ["the parent's", "the parent's, too"]


def test_what_is_logged_last_is_written_before_the_process_ends():
    script = """
        import atexit, logging
        from kerasdist.transport.log import background_log
        def last():
            background_log.log(logging.WARNING, "at exit")
            background_log.flush(5)
        atexit.register(last)
        for number in range(200):
            background_log.log(logging.WARNING, "line %d", number)
        raise SystemExit(3)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=python_env(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 3
    lines = done.stderr.splitlines()
    assert lines == [*(f"line {number}" for number in range(200)), "at exit"]
