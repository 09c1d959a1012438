"""Workers that take turns in an elastic job, for tests of losses and newcomers.

    with start(3, ends=[[1, 6, signal.SIGKILL]]) as job:
        finished = job.wait()
    assert check(finished[0], 3)[-1] == [0, 2]

Each worker adds up its rank at the start + 1 over the present members; a task whose
turn it is ends. Every fifth turn the members admit those that wait.
"""

from __future__ import annotations

import json
from typing import Any

from workers import Finished, Workers

__all__ = ["SCRIPT", "check", "start"]

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
    startup=60, heartbeat=options.get("heartbeat", 5), collective=60
)

def serve():
    server = ElasticServer(cluster, ServerSettings(), least, timeouts=timeouts)
    try:
        print("RESULT", json.dumps(["ok", server.serve()]))
    except errors.KerasDistError as error:
        print("RESULT", json.dumps([type(error).__name__, str(error)]))

def work():
    me = cluster.rank
    transport, link = options.get("transport", "auto"), None
    if cluster.servers:
        link = ServerLink(cluster, ServerSettings(), least, transport=transport)
        transport = "auto"
    job = connect_elastic(
        cluster, transport=transport, timeouts=timeouts, min_workers=least, link=link
    )
    group = job.communicator
    again = group.joining
    turn = 0
    if again:
        if "dies" in options:
            kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(options["dies"], kill).start()
        group.join(60.0)
        turn = int(group.broadcast([np.array([0])])[0][0])
    found, admitted, error = [], [], None

    def wait(until):
        # Large, so that nearly all of the time it's in the collective.
        size = 500_000 if until == "change" else 1
        while True:
            flag = bool(group.changes)
            if until != "change":
                added = any("added" in each.text for each in group.changes)
                flag = added or bool(group.membership.waiting)
            if group.all_reduce([np.full(size, flag, np.int64)], "max")[0][0]:
                break

    def goes_on():
        full = not options.get("full") or group.size == cluster.size
        return turn < options.get("turns", 30) or (turn < 5000 and not full)

    try:
        while goes_on():
            turn += 1
            if [me, turn] in [end[:2] for end in options["ends"]] and not again:
                os.kill(os.getpid(), {end[0]: end[2] for end in options["ends"]}[me])
            if turn == options.get("waits"):
                print("WAITS", flush=True)
                wait(options.get("until"))
            total = group.all_reduce([np.full(1000, me + 1.0, np.float32)])[0]
            # Spread over the servers.
            size = 200_000 if cluster.servers else 1000
            large = np.full(size, me + 1.0, np.float32)
            spread = group.all_reduce([large, large], lend=True)
            every = [int(part[0]) for part in group.all_gather(np.array([me]))]
            first = int(group.broadcast([np.array([me])])[0][0])
            sums = sorted({float(v) for a in (total, *spread) for v in (a[0], a[-1])})
            found.append([turn, sums, every, first, list(group.ranks), group.rank])
            if turn % 5 == 0 and group.ask()[0] and group.admit():
                group.broadcast([np.array([turn])])
                admitted.append(turn)
            time.sleep(options.get("pause", 0.002))
    except errors.KerasDistError as failure:
        error = [type(failure).__name__, str(failure)]
    changes = [change.text for change in group.changes]
    last = list(group.ranks)
    print("RESULT", json.dumps([found, error, changes, admitted, last]))
    job.close(None if error is None else RuntimeError(error))

serve() if cluster.rank is None else work()
"""


def start(
    size: int,
    servers: int = 0,
    *,
    ends: Any = (),
    script: str = SCRIPT,
    handover: bool = True,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Workers:
    """Starts a job.

    Args:
        size: How many workers.
        servers: How many servers connect them.
        ends: Who sends itself a signal: its rank, the turn and the signal.
        script: Perhaps a changed one.
        handover: Whether the workers are given their listening sockets.
        more: Other arguments of `Workers`.
        options: What the script looks for.
    """
    return Workers(
        script,
        size,
        [json.dumps({"ends": ends, **options})],
        deadline=120.0,
        handover=handover,
        servers=servers,
        **(more or {}),
    )


def check(finished: Finished, size: int) -> list[list[int]]:
    """Each result is that of some members; returns these, each set once, in order."""
    found = finished.result[0]
    seen = [list(range(size))]
    for number, (turn, sums, every, first, ranks, rank) in enumerate(found):
        assert turn == found[0][0] + number
        # The members may have changed between two collectives of one turn.
        known = (seen[-1], ranks)
        assert ranks[rank] in every, turn
        assert set(sums) <= {sum(m + 1 for m in s) for s in known}, turn
        assert every in known
        assert first in (seen[-1][0], ranks[0])
        if ranks != seen[-1]:
            seen.append(ranks)
    return seen
