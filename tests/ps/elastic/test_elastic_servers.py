"""Real workers that servers connect continue when workers or servers are lost."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from workers import Finished, Workers

# Each worker adds up its rank + 1 over the present members, in a small array and in one
# that is spread over the servers; a task whose turn it is ends.
SCRIPT = """
import json, os, signal, sys, threading, time
import numpy as np
from kerasdist import errors
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.ps import ServerSettings
from kerasdist.ps.elastic.link import ServerLink
from kerasdist.ps.elastic.server import ElasticServer
from kerasdist.transport import Timeouts

options = json.loads(sys.argv[1])
cluster = resolve(None)
least = options.get("min_workers", 1)
timeouts = Timeouts(
    startup=options.get("startup", 30),
    heartbeat=options.get("heartbeat", 5),
    collective=60,
)

def serve():
    server = ElasticServer(cluster, ServerSettings(), least, timeouts=timeouts)
    print("LISTENING", flush=True)
    try:
        print("RESULT", json.dumps(["ok", server.serve()]))
    except errors.KerasDistError as error:
        print("RESULT", json.dumps([type(error).__name__, str(error)]))

def work():
    me = cluster.rank
    if me == options.get("never"):
        os.kill(os.getpid(), signal.SIGKILL)
    link = ServerLink(
        cluster, ServerSettings(), least, transport=options.get("transport", "auto")
    )
    job = connect_elastic(cluster, timeouts=timeouts, min_workers=least, link=link)
    group = job.communicator
    again = group.joining
    turn = 0
    if again:
        group.join(60.0)
        turn = int(group.broadcast([np.array([0])])[0][0])
    found, servers = [], []
    error = None
    try:
        while turn < options.get("turns", 30):
            turn += 1
            for victim, when, signum in options["ends"]:
                if [victim, when] == [me, turn] and not again:
                    print("GOING", flush=True)
                    os.kill(os.getpid(), signum)
            if turn == options.get("waits"):
                print("WAITS", flush=True)
                while options.get("until") == "change":
                    # Large, so that nearly all of the time it's in the collective.
                    flags = np.full(500_000, bool(group.changes), np.int64)
                    if group.all_reduce([flags], "max")[0][0]:
                        break
                while options.get("until") != "change" and not again:
                    joined = any("added" in each.text for each in group.changes)
                    if joined or group.membership.waiting:
                        break
                    time.sleep(0.01)
            total = group.all_reduce([np.full(1000, me + 1.0, np.float32)])[0]
            large = np.full(200_000, me + 1.0, np.float32)
            spread = group.all_reduce([large, large], lend=True)
            every = [int(part[0]) for part in group.all_gather(np.array([me]))]
            first = int(group.broadcast([np.array([me])])[0][0])
            sums = sorted({float(v) for a in (total, *spread) for v in (a[0], a[-1])})
            found.append([turn, sums, every, first, list(group.ranks), group.rank])
            if turn % 5 == 0 and group.ask()[0] and group.admit():
                group.broadcast([np.array([turn])])
    except errors.KerasDistError as failure:
        error = [type(failure).__name__, str(failure)]
    changes = [change.text for change in group.changes]
    print("RESULT", json.dumps([found, error, changes]))
    job.close(None if error is None else RuntimeError(error))

serve() if cluster.rank is None else work()
"""


def start(size: int, servers: int, *, handover: bool = True, **options: Any) -> Workers:
    args = [json.dumps({"ends": [], **options})]
    return Workers(
        SCRIPT, size, args, deadline=90.0, handover=handover, servers=servers
    )


def check(result: Finished, size: int) -> list[list[int]]:
    """Each result is that of some members; returns these, each set once, in order."""
    found, error, _ = result.result
    assert error is None
    seen = [list(range(size))]
    for turn, sums, every, first, ranks, rank in found:
        # The members may have changed between two collectives of one turn.
        known = (seen[-1], ranks)
        assert ranks[rank] in every, turn
        assert set(sums) <= {sum(m + 1 for m in s) for s in known}, turn
        assert every in known
        assert first in (seen[-1][0], ranks[0])
        if ranks != seen[-1]:
            seen.append(ranks)
    return seen


@pytest.mark.parametrize(
    ("size", "victims", "servers", "transport"),
    [
        (3, [0], 2, "auto"),
        pytest.param(3, [1], 2, "tcp", marks=pytest.mark.soak),
        pytest.param(2, [0], 1, "auto", marks=pytest.mark.soak),
        pytest.param(4, [3, 1, 0], 2, "tcp"),
    ],
)
def test_the_others_continue(
    size: int, victims: list[int], servers: int, transport: str
) -> None:
    ends = [[v, 6 + 7 * i, signal.SIGKILL] for i, v in enumerate(victims)]
    with start(size, servers, ends=ends, transport=transport) as job:
        finished = job.wait()
    left = [rank for rank in range(size) if rank not in victims]
    for rank in left:
        assert finished[rank].returncode == 0, finished[rank].output
        assert check(finished[rank], size)[-1] == left
        assert len(finished[rank].result[0]) == 30
        # The same numbers on all that are left.
        assert [f[:5] for f in finished[rank].result[0]] == [
            f[:5] for f in finished[left[0]].result[0]
        ]
    for server in finished[size:]:
        status, stats = server.result
        assert (status, stats["epochs"]) == ("ok", len(victims) + 1), server.output


def test_too_few_are_left() -> None:
    with start(3, 1, ends=[[1, 6, signal.SIGKILL]], min_workers=3) as job:
        finished = [job.wait_one(rank) for rank in range(3)]
    for rank in (0, 2):
        _, (name, text), _ = finished[rank].result
        assert name == "WorkerLost"
        assert "Rank 1 " in text
        assert "min_workers" in text


def test_a_lost_worker_joins_again() -> None:
    options = {"ends": [[0, 7, signal.SIGKILL]], "turns": 60, "waits": 24}
    with start(3, 2, handover=False, **options) as job:
        assert job.wait_one(0).returncode == -signal.SIGKILL
        job.start_again(0)
        finished = job.succeed()
    assert check(finished[0], 3)[-1] == [1, 2, 0]
    for rank in (1, 2):
        seen = check(finished[rank], 3)
        assert seen == [[0, 1, 2], [1, 2], [1, 2, 0]]
    for server in finished[3:]:
        assert server.result[0] == "ok"


@pytest.mark.parametrize(
    ("signum", "victim"),
    [
        (signal.SIGKILL, 3),
        pytest.param(signal.SIGKILL, 2, marks=pytest.mark.soak),
        pytest.param(signal.SIGSTOP, 2, marks=pytest.mark.soak),
    ],
)
def test_the_other_servers_go_on_without_a_lost_one(signum: int, victim: int) -> None:
    with start(2, 3, waits=10, until="change", heartbeat=1.0) as job:
        for rank in (0, 1):
            job.wait_for_line(rank, "WAITS")
        job.kill(victim, signum)
        for rank in (0, 1):
            finished = job.wait_one(rank)
            assert check(finished, 2) == [[0, 1]]
            assert len(finished.result[0]) == 30
            (change,) = finished.result[2]
            name = f"server {victim - 2} ({job.addresses[victim]}) was lost at step"
            assert change.startswith(name)
            assert "2 workers continue" in change
        for server in {2, 3, 4} - {victim}:
            status, stats = job.wait_one(server).result
            assert (status, stats["epochs"]) == ("ok", 2)


def test_without_a_server_the_job_ends() -> None:
    with start(2, 1, turns=10_000, waits=10, until="change") as job:
        for rank in (0, 1):
            job.wait_for_line(rank, "WAITS")
        job.kill(2, signal.SIGKILL)
        for rank in (0, 1):
            _, (name, text), _ = job.wait_one(rank, 20).result
            assert name == "ServerLost"
            assert f"Server 0 ({job.addresses[2]}) was lost" in text
            assert "they hold all weights" in text
