"""Reports to the launcher: one line each, only on its own pipe, never in the way."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kerasdist import errors
from kerasdist.cli.run.outcome import JobOutcome
from kerasdist.transport.liveness.launcher_pipe import (
    REPORT_VARIABLE,
    Notice,
    Report,
    Reporter,
    ServerReporter,
)

LOST = errors.WorkerLost(1, "host1:1", 7, "its connection was closed")
SERVER_LOST = errors.ServerLost(1, "host9:1", 7, "its connection was closed")
MISMATCH = errors.CollectiveMismatch("Ranks differ.")


@pytest.fixture
def verdict():
    verdict = JobOutcome()
    yield verdict
    for descriptor in (verdict.reading, verdict.writing):
        os.close(descriptor)


def sent(verdict):
    """The lines that are in the pipe."""
    try:
        return os.read(verdict.reading, 1 << 20).splitlines()
    except BlockingIOError:
        return []


def test_a_report_is_one_short_line(verdict):
    Reporter("0" * 100, 10_000, verdict.environ).failed(LOST)
    Reporter("a.1", 0, verdict.environ).failed(MISMATCH)
    first, second = sent(verdict)
    assert len(first) < 512  # the least PIPE_BUF there is
    assert Report.decode(first) == Report(
        job="0" * 100, rank=10_000, error="WorkerLost", blames=1
    )
    assert Report.decode(second) == Report(
        job="a.1", rank=0, error="CollectiveMismatch", blames=None
    )


def test_without_a_launcher_nothing_is_said(verdict, tmp_path):
    named = verdict.environ[REPORT_VARIABLE]
    with (tmp_path / "file").open("wb") as file:
        for value in (
            *("", "x", "-1:0", "9" * 30 + ":1", f"{verdict.writing}:1"),
            str(verdict.writing),
            f"{file.fileno()}:{os.fstat(file.fileno()).st_ino}",
        ):
            Reporter("a.1", 0, {REPORT_VARIABLE: value}).failed(LOST)
        Reporter("a.1", 0, {}).failed(LOST)
    assert sent(verdict) == []
    assert (tmp_path / "file").read_bytes() == b""
    assert os.get_inheritable(verdict.writing) is False
    Reporter("a.1", 0, {REPORT_VARIABLE: named}).failed(LOST)
    assert len(sent(verdict)) == 1


def test_a_descriptor_that_became_something_else_is_left_alone(verdict):
    reporter = Reporter("a.1", 0, verdict.environ)
    kept = os.dup(verdict.writing)
    reading, writing = os.pipe()
    try:
        os.dup2(writing, verdict.writing)
        reporter.failed(LOST)
        os.set_blocking(reading, False)
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
        assert sent(verdict) == []
    finally:
        for descriptor in (kept, reading, writing):
            os.close(descriptor)


def test_a_full_pipe_and_one_that_nobody_reads_are_no_obstacle(verdict):
    reporter = Reporter("a.1", 0, verdict.environ)
    for _ in range(2000):  # more than fits
        reporter.failed(LOST)
    lines = sent(verdict)
    assert 100 < len(lines) < 2000
    assert None not in map(Report.decode, lines)

    unread = JobOutcome()
    os.close(unread.reading)
    Reporter("a.1", 0, unread.environ).failed(LOST)
    os.close(unread.writing)


def test_the_scripts_processes_dont_inherit_the_pipe(verdict):
    fd = verdict.writing
    os.set_inheritable(fd, True)  # as a worker gets it
    code = f"import os; os.fstat({fd})"
    command = [sys.executable, "-c", code]
    run = {"close_fds": False, "stderr": subprocess.DEVNULL, "timeout": 60}
    assert subprocess.run(command, check=False, **run).returncode == 0
    Reporter("a.1", 0, verdict.environ)
    assert subprocess.run(command, check=False, **run).returncode != 0


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"1",
        b"[" * 100_000,
        b'{"job": "a", "rank": 0, "error": "E"}',
        b'{"job": "a", "rank": "x", "error": "E", "blames": 1}',
        b'{"job": "a", "rank": 0, "error": "E", "blames": 1e999}',
        b"\xff\xfe",
    ],
)
def test_what_isnt_a_report_says_nothing(verdict, line):
    assert Report.decode(line) is None
    os.write(verdict.writing, line[:1000] + b"\n")
    verdict.read()
    assert verdict.blamed is None


def test_the_first_word_on_the_last_job_counts(verdict):
    def say(job, rank, error):
        Reporter(job, rank, verdict.environ).failed(error)
        verdict.read()
        return verdict.blamed

    assert verdict.blamed is None
    assert say("a.1", 0, LOST) == 1
    # Rank 2 has only seen that rank 0 was gone.
    assert say("a.1", 2, errors.WorkerLost(0, "host0:1", 7, "gone")) == 1
    assert say("a.2", 1, errors.WorkerLost(2, "host2:1", 9, "gone")) == 2
    assert verdict.blamed_server is None
    assert say("a.3", 1, MISMATCH) is None
    assert say("a.4", 0, SERVER_LOST) is None
    assert verdict.blamed_server == 1


def test_half_a_line_waits_for_its_end(verdict):
    line = Report(job="a.1", rank=0, error="WorkerLost", blames=3).encode()
    os.write(verdict.writing, line[:10])
    verdict.read()
    assert verdict.blamed is None
    os.write(verdict.writing, line[10:])
    verdict.read()
    assert verdict.blamed == 3


# Servers.


def test_what_servers_say_is_one_short_line(verdict):
    server = ServerReporter(3, verdict.environ)
    server.begun(7.5)
    server.happened("lost", 12, "\N{SNOWMAN}" * 1000)
    server.failed(MISMATCH)
    lines = sent(verdict)
    assert max(map(len, lines)) < 512
    begun, lost, failed = map(Notice.decode, lines)
    assert begun == Notice(server=3, kind="begun", patience=7.5)
    assert (lost.kind, lost.rank) == ("lost", 12)
    assert lost.reason.strip("\N{SNOWMAN}") == "" != lost.reason
    assert failed.reason == "CollectiveMismatch: Ranks differ."
    assert [Report.decode(line) for line in lines] == [None] * 3


@pytest.fixture
def servers():
    """A verdict on a job with two servers."""
    verdict = JobOutcome(2)
    yield verdict, [ServerReporter(index, verdict.environ) for index in range(2)]
    for descriptor in (verdict.reading, verdict.writing):
        os.close(descriptor)


def test_a_job_goes_on_when_all_servers_have_said_so_until_one_fails(servers):
    verdict, (first, second) = servers
    seen = []
    for say in (
        lambda: first.begun(0.0),
        lambda: first.begun(0.0),
        lambda: second.begun(5.0),
        lambda: first.happened("lost", 1, "it was gone"),
        lambda: second.failed(MISMATCH),
    ):
        say()
        verdict.read()
        seen.append(verdict.goes_on)
    assert seen == [False, False, True, True, False]
    assert verdict.patience == 5.0
    (notice,) = verdict.notices()
    assert (notice.kind, notice.rank, notice.reason) == ("lost", 1, "it was gone")
    assert verdict.notices() == []


def test_who_was_lost_before_is_no_witness(servers):
    verdict, reporters = servers
    for reporter in reporters:
        reporter.begun(0.0)
    # Whichever server sees it first.
    reporters[1].happened("lost", 1, "nothing was received from it")
    Reporter("a.1", 1, verdict.environ).failed(SERVER_LOST)
    Reporter("a.1", 2, verdict.environ).failed(LOST)
    verdict.read()
    assert verdict.gave_up == {1}
    assert (verdict.blamed, verdict.blamed_server) == (1, None)
    assert not verdict.goes_on  # rank 2 has lost what it needs
