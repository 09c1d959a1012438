"""Where the library's lines go: in a script, an application, a notebook, a test."""

import ast
import json
import logging
import os
import re
import sys
import textwrap
import threading

import pytest

from kerasdist.transport import log
from kerasdist.transport.log import format_fault, level_fault
from pace import bound
from places import ROOT
from waiting import wait_until
from workers import ended, python_env

SAY = """
    from kerasdist.transport import log
    log.log(10, "kerasdist: debug %d", 1)
    log.info("kerasdist: info %d", 2)
    log.log(30, "kerasdist: warning")
"""


def stderr_of(script, code=0, **env):
    """What a script without TensorFlow writes to standard error, in lines."""
    command = (sys.executable, "-c", textwrap.dedent(script))
    done = ended(*command, env=python_env(env))
    assert (done.returncode, done.stdout) == (code, "")
    return done.stderr.splitlines()


INFO = ["kerasdist: info 2", "kerasdist: warning"]
FORMATTED = ["INFO:kerasdist:kerasdist: info 2", "WARNING:kerasdist:kerasdist: warning"]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        # Nobody has configured anything: the words alone, from INFO on.
        ("import kerasdist", INFO),
        # The application has: its level, its format, and each line once.
        (
            "import logging; logging.basicConfig(level='INFO'); import kerasdist",
            FORMATTED,
        ),
        ("import kerasdist, logging; logging.basicConfig()", FORMATTED[1:]),
        (
            "import kerasdist, logging; logging.getLogger('kerasdist').setLevel(30)",
            ["kerasdist: warning"],
        ),
        # A handler of its own for these lines alone, and silence.
        (
            "import kerasdist, logging; log = logging.getLogger('kerasdist');"
            "log.addHandler(logging.StreamHandler()); log.setLevel('INFO')",
            INFO,
        ),
        (
            "import kerasdist, logging; log = logging.getLogger('kerasdist');"
            "log.handlers.clear(); log.addHandler(logging.NullHandler())",
            [],
        ),
        # absl's application configures the root logger; its import doesn't.
        ("import absl.logging, kerasdist", INFO),
    ],
)
def test_who_configures_decides(before, expected):
    assert stderr_of(f"    {before}{SAY}") == expected


@pytest.mark.parametrize(("level", "count"), [("debug", 3), ("Warning", 1), ("40", 0)])
def test_the_environments_level_holds_with_and_without_an_application(level, count):
    for before in ("", "import logging; logging.basicConfig(); "):
        script = f"    {before}import kerasdist{SAY}"
        assert len(stderr_of(script, KERASDIST_LOG_LEVEL=level)) == count


def test_wrong_settings_are_warned_of_and_ignored():
    wrong = {"KERASDIST_LOG_LEVEL": "loud", "KERASDIST_LOG_FORMAT": "xml"}
    lines = stderr_of(f"    import kerasdist{SAY}", **wrong)
    assert lines[2:] == INFO
    for fault in (level_fault(wrong), format_fault(wrong)):
        assert f"kerasdist: {fault}. It is ignored." in lines[:2]
    assert "Received: KERASDIST_LOG_LEVEL='loud'. Expected one of DEBUG, " in lines[0]
    assert "Received: KERASDIST_LOG_FORMAT='xml'. Expected text or json" in lines[1]
    assert level_fault({}) is format_fault({}) is None


def test_json():
    script = f"""    import kerasdist
    from kerasdist.transport.log import name_task
    name_task("worker", 3, 3){SAY}
    try:
        1 / 0
    except ZeroDivisionError:
        log.log(40, "two\\nlines", exc_info=True, seconds=1.5, why=OSError)
    """
    lines = stderr_of(script, KERASDIST_LOG_FORMAT="JSON")
    first, _, last = (json.loads(line) for line in lines)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "INFO",
        "logger": "kerasdist",
        "task": "worker 3",
        "rank": 3,
        "message": "info 2",
    }
    assert last["message"] == "two\nlines"
    assert last["seconds"] == 1.5
    assert last["why"] == "<class 'OSError'>"
    assert last["exception"].endswith("ZeroDivisionError: division by zero")


def test_a_closed_standard_error_ends_nothing():
    assert stderr_of(f"    import kerasdist, os; os.close(2){SAY}") == []
    assert stderr_of(f"    import kerasdist, sys; sys.stderr = None{SAY}") == []


def test_a_notebooks_stream_is_the_one_of_the_moment():
    script = f"""    import kerasdist, io, sys
    sys.stderr = cell = io.StringIO(){SAY}
    sys.stderr = sys.__stderr__
    sys.stderr.write(cell.getvalue().upper())
    """
    assert stderr_of(script) == [line.upper() for line in INFO]


# `print` is for what a command was asked for, and for what its tasks have written.
PRINTS = {
    "kerasdist/cli/advise.py",
    "kerasdist/cli/first_fit.py",
    "kerasdist/cli/completion.py",
    "kerasdist/cli/doctor.py",
    "kerasdist/cli/env.py",
    "kerasdist/cli/console.py",
    "kerasdist/cli/plan_command.py",
    "kerasdist/cli/predict.py",
    "kerasdist/cli/run/bootstrap.py",
    "kerasdist/cli/run/outcome.py",
}


def test_nothing_else_prints():
    found = set()
    for folder in ("kerasdist", "callbacks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if not re.search(r"print|write\(", text):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                    *("print", "io_utils.print_msg", "sys.stdout.write"),
                    "sys.stderr.write",
                ):
                    found.add(str(path.relative_to(ROOT)))
    # Keras's own line of its progress bar, in its place.
    assert found - {"kerasdist/_keras/training/fit_loop.py"} == PRINTS


# Lines are written by a thread of their own, in order, none too many are kept.


class Slow(logging.Handler):
    def __init__(self):
        super().__init__()
        self.begun, self.may = threading.Event(), threading.Event()
        self.lines = []

    def emit(self, record):
        self.begun.set()
        self.may.wait(bound(60))
        self.lines.append(record.getMessage())


@pytest.fixture
def slow():
    handler = Slow()
    logger = logging.getLogger("kerasdist")
    logger.addHandler(handler)
    yield handler
    handler.may.set()
    log.flush(60)
    logger.removeHandler(handler)


def test_nobody_waits_for_a_reader_that_has_stopped_and_order_is_kept(slow):
    for number in range(5):
        log.log_in_background(logging.WARNING, "line %d", number)
    log.flush(0.01)
    assert slow.lines == []
    slow.may.set()
    log.flush(60)
    assert slow.lines == [f"line {number}" for number in range(5)]
    wait_until(
        lambda: all(t.name != "kerasdist-log" for t in threading.enumerate()),
        "the end of the thread that has nothing to write",
    )


def test_a_queue_that_is_full_counts_what_it_drops(slow, monkeypatch):
    monkeypatch.setattr(log, "MOST_LINES", 3)
    log.log_in_background(logging.WARNING, "first")
    assert slow.begun.wait(bound(60))
    for number in range(8):
        log.log_in_background(logging.WARNING, "line %d", number)
    slow.may.set()
    log.flush(60)
    assert slow.lines[:4] == ["first", "line 0", "line 1", "line 2"]
    assert slow.lines[4:] == ["kerasdist: 5 more lines were not written"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_writes_its_own_lines_only(slow):
    log.log_in_background(logging.WARNING, "the parent's")
    assert slow.begun.wait(bound(60))
    log.log_in_background(logging.WARNING, "the parent's, too")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        slow.may.set()
        log.log_in_background(logging.WARNING, "the child's")
        log.flush(60)
        os.write(writing, f"{slow.lines}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == '["the child\'s"]'
    os.waitpid(pid, 0)
    slow.may.set()
    log.flush(60)
    assert slow.lines == ["the parent's", "the parent's, too"]


def test_what_is_logged_last_is_written_before_the_process_ends():
    script = """
        import atexit, logging
        from kerasdist.transport import log
        def last():
            log.log_in_background(logging.WARNING, "at exit")
            log.flush(5)
        atexit.register(last)
        for number in range(200):
            log.log_in_background(logging.WARNING, "line %d", number)
        raise SystemExit(3)
    """
    lines = stderr_of(script, code=3)
    assert lines == [*(f"line {number}" for number in range(200)), "at exit"]
