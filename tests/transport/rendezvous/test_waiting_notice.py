import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import textwrap

import pytest

from kerasdist.transport import log
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.rendezvous import waiting_notice
from kerasdist.transport.rendezvous.waiting_notice import Absent, Sight, WaitingNotice
from pace import bound
from waiting import wait_until
from workers import Workers, python_env

# Its lines come soon, and are collected. The last task begins when all others have
# said that they wait for it: a slow one may have said before that it waits for rank 0.
SCRIPT = """
import json, logging, os, pathlib, sys, threading, time
from kerasdist.transport import log
from kerasdist.transport.rendezvous import waiting_notice

waiting_notice.FIRST_SECONDS = waiting_notice.AGAIN_SECONDS = 0.3
tasks = json.loads(os.environ["TF_CONFIG"])
count = sum(map(len, tasks["cluster"].values()))
task = tasks["task"]
me = f"{task['type']} {task['index']}"
rank = len(tasks["cluster"]["worker"]) - 1
last = task == {"type": "worker", "index": rank}
folder = pathlib.Path(__file__).parent
said = []

class Collect(logging.Handler):
    def emit(self, record):
        text = record.getMessage()
        if "wait" in text:
            said.append(text)
            if f"waiting for rank {rank} (" in text or "for other workers" in text:
                (folder / f"said {me}").touch()

logger = logging.getLogger("kerasdist")
logger.addHandler(Collect())
logger.setLevel("INFO")

def result():
    log.flush(60)
    print("RESULT", json.dumps(said))

while last and len(list(folder.glob("said *"))) < count - 1:
    time.sleep(0.01)
"""
RING = """
from kerasdist.cluster import resolve
from kerasdist.collectives.connect import connect
connect(resolve()).close()
result()
"""
ELASTIC = """
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
connect_elastic(resolve()).close()
result()
"""
SERVERS = """
from kerasdist.cluster import resolve
from kerasdist.parameter_server import ServerSettings, connect_servers
from kerasdist.parameter_server.server.server import run_server
if task["type"] == "ps":
    run_server(resolve(), ServerSettings(mode="async"))
else:
    connect_servers(resolve(), ServerSettings(mode="async")).close()
result()
"""


def said_by(script, size, servers=0):
    more = {"servers": servers, "handover": False, "deadline": 90}
    with Workers(SCRIPT + script, size, **more) as job:
        return job.addresses, [each.result for each in job.succeed()]


SECONDS = r"for \d+ s, and continues for at most \d+ s \(`startup_timeout`\)\. "
REFUSED = "connection refused: nothing listens there"


@pytest.mark.parametrize(
    ("script", "servers", "who", "here"),
    [
        (RING, 0, "rank 0", "ranks 0-1"),
        (ELASTIC, 0, "rank 0", "ranks 0-1"),
        (SERVERS, 1, "server 0", "rank 0"),
    ],
    ids=["ring", "elastic", "servers"],
)
def test_a_rank_that_comes_later(script, servers, who, here):
    size = 3 - servers
    late = size - 1
    addresses, said = said_by(script, size, servers)
    waiting, other = said[-1 if servers else 0], said[1 - servers]
    name = re.escape(f"rank {late} ({addresses[late]})")
    line = f"kerasdist: {who} has been waiting for {name} {SECONDS}Here: {here}. "
    reason = re.escape(f"Missing: rank {late}: {REFUSED}.")
    assert any(re.match(line + reason, each) for each in waiting), waiting
    assert re.fullmatch(
        rf"kerasdist: {who} has all it waited for, after \d+ s\.", waiting[-1]
    )
    # It is connected itself.
    line = (
        f"kerasdist: this task has been waiting for other workers {SECONDS}Here: {who}"
        rf"\. Missing: other workers: {who} waits for them, see its output\."
    )
    assert any(re.match(line, each) for each in other), other
    assert not [each for each in said[late] if f"{who} has been" in each]


def lines_of(said, sight, *, environ=None, failed=False):
    notice = WaitingNotice(
        "rank 0",
        lambda: sight,
        Deadline(60.0),
        goal="rank 0 (a:1)",
        environ=environ or {},
    )
    with contextlib.suppress(ValueError), notice:
        wait_until(said, "the first line")
        if failed:
            raise ValueError
    log.flush(60)
    return said()


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(waiting_notice, "FIRST_SECONDS", 0.05)


@pytest.mark.parametrize(
    ("environ", "host", "why"),
    [
        ({}, "127.0.0.1:1", REFUSED),
        (
            *({"KERASDIST_LISTEN_FD": "3"}, "127.0.0.1:1"),
            "connection refused: its process has ended, or wasn't started",
        ),
        ({}, "nowhere.invalid:1", "its host name doesn't resolve"),
    ],
)
def test_why(soon, said, environ, host, why):
    sight = Sight([Absent("rank 2", host)], refused="b:1: AuthenticationError: Wrong.")
    first, *_, last = lines_of(said, sight, environ=environ, failed=True)
    assert f" Missing: rank 2: {why}" in first
    assert " Last refused: b:1: AuthenticationError: Wrong. " in first
    assert last.startswith("kerasdist: rank 0 waits no longer, after ")


def test_equal_reasons_are_said_once_and_many_tasks_are_counted(soon, said):
    missing = [Absent(f"rank {i}", f"a:{i}", "gone") for i in range(2, 9)]
    line = lines_of(said, Sight(missing))[0]
    assert "for rank 2 (a:2), rank 3 (a:3), rank 4 (a:4), rank 5 (a:5) and 3 m" in line
    assert "Missing: rank 2, rank 3, rank 4, rank 5 and 3 more: gone." in line


def test_nothing_is_said_of_a_short_wait(said):
    with WaitingNotice("rank 0", lambda: Sight([Absent("a", "")]), Deadline(60)):
        pass
    log.flush(60)
    assert said() == []


def test_on_a_terminal_the_line_is_rewritten():
    script = """
        import threading
        from kerasdist.transport.deadline import Deadline
        from kerasdist.transport import log
        from kerasdist.transport.rendezvous import waiting_notice as w
        w.FIRST_SECONDS = 0.05
        looks = threading.Semaphore(0)
        def look():
            looks.release()
            return w.Sight([w.Absent("rank 1", "a:1", "it is late " * 20)])
        w.REWRITE_SECONDS = 0.05
        w.AGAIN_SECONDS = 0.1
        with w.WaitingNotice("rank 0", look, Deadline(60)):
            for _ in range(3):
                looks.acquire(timeout=60)
        log.flush(60)
        log.log_in_background(30, "another line")
    """
    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.DEVNULL,
        stderr=side,
        env=python_env({"TERM": "xterm", "KERASDIST_LOG_FORMAT": "text"}),
    )
    os.close(side)
    data = b""
    try:
        while select.select([main], [], [], 60)[0]:
            try:
                data += os.read(main, 65536)
            except OSError:
                break
    finally:
        os.close(main)
    assert process.wait(bound(60)) == 0
    # Each but the first erases the one before, which took several rows.
    *progress, last, empty = re.split(r"\r\x1b\[\dA\x1b\[J|\r\n", data.decode())
    assert len(progress) >= 3
    assert all("rank 0 has been waiting for rank 1" in each for each in progress[:-1])
    assert progress[-1].startswith("kerasdist: rank 0 has all it waited for, ")
    assert (last, empty) == ("another line", "")
    assert data.count(b"\n") == 2
