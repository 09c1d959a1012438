"""Reports to the launcher: one line each, only on its own pipe, never in the way."""

import json
import os

import pytest

from kerasdist import errors
from kerasdist.transport.liveness import launcher_pipe
from kerasdist.transport.liveness.failure_protocol import EndedTaskList, EndedTasks
from kerasdist.transport.liveness.launcher_pipe import Report, Reporter, decode

LOST = errors.WorkerLost(1, "host1:1", 7, "its connection was closed")
MISMATCH = errors.CollectiveMismatch("Ranks differ.")


@pytest.fixture
def pipe():
    pipe = launcher_pipe.LauncherPipe()
    yield pipe
    for descriptor in (pipe.reading, pipe.writing):
        os.close(descriptor)


def sent(pipe):
    try:
        return os.read(pipe.reading, 1 << 20).splitlines()
    except BlockingIOError:
        return []


def test_a_report_is_one_short_line(pipe):
    os.set_inheritable(pipe.writing, True)  # as a worker gets it
    Reporter("0" * 100, 10_000, pipe.environ).failed(LOST)
    assert not os.get_inheritable(pipe.writing)
    Reporter("a.1", 0, pipe.environ).failed(MISMATCH)
    first, second = sent(pipe)
    assert len(first) < 512  # the least PIPE_BUF there is
    assert decode(first) == Report(
        job="0" * 100, rank=10_000, error="WorkerLost", blames=1
    )
    assert decode(second) == Report(
        job="a.1", rank=0, error="CollectiveMismatch", blames=None
    )


def test_without_a_launcher_nothing_is_said(pipe, tmp_path):
    named = pipe.environ[launcher_pipe.REPORT_VARIABLE]
    with (tmp_path / "file").open("wb") as file:
        for value in (
            *("", "x", "-1:0", "9" * 30 + ":1", f"{pipe.writing}:1"),
            str(pipe.writing),
            f"{file.fileno()}:{os.fstat(file.fileno()).st_ino}",
        ):
            Reporter("a.1", 0, {launcher_pipe.REPORT_VARIABLE: value}).failed(LOST)
        Reporter("a.1", 0, {}).failed(LOST)
    assert sent(pipe) == []
    assert (tmp_path / "file").read_bytes() == b""
    Reporter("a.1", 0, {launcher_pipe.REPORT_VARIABLE: named}).failed(LOST)
    assert len(sent(pipe)) == 1


def test_a_descriptor_that_became_something_else_is_left_alone(pipe, tmp_path):
    reporter = Reporter("a.1", 0, pipe.environ)
    with (tmp_path / "file").open("wb") as file:
        os.dup2(file.fileno(), pipe.writing)
    reporter.failed(LOST)
    assert (tmp_path / "file").read_bytes() == b""


def test_a_full_pipe_and_one_that_nobody_reads_are_no_obstacle(pipe):
    reporter = Reporter("a.1", 0, pipe.environ)
    for _ in range(2000):  # more than fits
        reporter.failed(LOST)
    lines = sent(pipe)
    assert 100 < len(lines) < 2000
    assert None not in map(decode, lines)

    unread = launcher_pipe.LauncherPipe()
    os.close(unread.reading)
    Reporter("a.1", 0, unread.environ).failed(LOST)
    os.close(unread.writing)


REPORT = {"job": "a", "rank": 0, "error": "E", "blames": 1}
MEMBERS = {"job": "a", "epoch": 1, "ranks": [0], "size": 1, "step": 1, "pause": 0}


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"1", b"[" * 100_000, b"\xff\xfe", b'{"Members": 1}', b'{"No": {}}'),
        *(
            json.dumps(value).encode()
            for value in (
                {"Report": {name: REPORT[name] for name in ("job", "rank", "error")}},
                {"Report": REPORT | {"rank": "x"}},
                {"Report": REPORT | {"blames": float("inf")}},
                {"Members": {name: MEMBERS[name] for name in list(MEMBERS)[:-1]}},
                {"Members": MEMBERS | {"ranks": [], "size": 0}},
            )
        ),
    ],
)
def test_what_isnt_a_report_says_nothing(pipe, line):
    assert decode(json.dumps({"Report": REPORT}).encode())
    assert decode(json.dumps({"Members": MEMBERS}).encode())
    assert decode(line) is None
    os.write(pipe.writing, line[:1000] + b"\n")
    assert pipe.read() == []


def test_half_a_line_waits_for_its_end(pipe):
    report = Report(job="a.1", rank=0, error="WorkerLost", blames=3)
    line = launcher_pipe.encode(report)
    os.write(pipe.writing, line[:10])
    assert pipe.read() == []
    os.write(pipe.writing, line[10:])
    assert pipe.read() == [report]


def test_what_servers_say_is_one_short_line(pipe):
    server = launcher_pipe.ServerReporter(3, pipe.environ)
    server.report("begun", patience=7.5)
    server.report("lost", rank=12, reason="\N{SNOWMAN}" * 1000)
    server.report("failed", reason="CollectiveMismatch: Ranks differ.")
    server.report("gave_up")
    lines = sent(pipe)
    assert max(map(len, lines)) < 512
    begun, lost, failed, gave_up = map(decode, lines)
    assert begun == launcher_pipe.Notice(server=3, kind="begun", patience=7.5)
    assert (lost.kind, lost.rank) == ("lost", 12)
    assert lost.reason.strip("\N{SNOWMAN}") == "" != lost.reason
    assert failed.reason == "CollectiveMismatch: Ranks differ."
    assert gave_up == launcher_pipe.Notice(server=3, kind="gave_up")


def test_a_long_list_of_members_is_cut_after_the_chief(pipe):
    ranks = [10_000, *range(1000, 1099)]
    Reporter("0" * 100, 1, pipe.environ).members(10**6, ranks, step=10**12, pause=1 / 3)
    (line,) = sent(pipe)
    assert len(line) < 512
    members = decode(line)
    assert (members.size, members.complete) == (100, False)
    assert list(members.ranks) == ranks[: len(members.ranks)] != []


@pytest.fixture
def written():
    made = EndedTaskList(4)
    yield made
    made.close()


def test_a_worker_reads_what_the_launcher_has_marked(written):
    os.set_inheritable(written.fileno(), True)
    read = EndedTasks(written.environ)
    assert not os.get_inheritable(written.fileno())
    assert read.read() == frozenset()
    written.mark(0, ended=True)
    written.mark(3, ended=True)
    assert read.read() == {0, 3}
    # It is started again after all.
    written.mark(3, ended=False)
    assert read.read() == {0}


def test_without_a_launcher_no_task_has_ended(written):
    written.mark(0, ended=True)
    (name,) = written.environ
    for text in ("", "no number", "0:1", f"{written.fileno()}:1"):
        assert EndedTasks({name: text}).read() == frozenset()
