"""Workers that take turns in an elastic job, for tests of losses and newcomers.

    with start(3, ends=[[1, 6, signal.SIGKILL]]) as job:
        finished = job.wait()
    assert check(finished[0], 3)[-1] == [0, 2]

Each worker adds up its rank at the start + 1 over the present members; a task whose
turn it is sends itself a signal. Every fifth turn the members admit those that wait,
and those leave that were sent SIGTERM.
"""

import json
from typing import Any

from workers import Finished, Workers

SCRIPT = """
import functools, json, os, signal, sys, threading, time
import numpy as np
from kerasdist import errors
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.collectives.elastic.termination import end_process
from kerasdist.parameter_server import ServerSettings
from kerasdist.parameter_server.elastic_link import ServerLink
from kerasdist.parameter_server.elastic_server import ElasticServer
from kerasdist.transport.deadline import Timeouts

options = json.loads(sys.argv[1])
cluster = resolve(None)
me = cluster.rank
least = options.get("min_workers", 1)
# BEFORE
timeouts = Timeouts(
    startup=options.get("startup", 60),
    heartbeat=options.get("heartbeat", 5),
    collective=60,
)

def serve():
    server = ElasticServer(cluster, ServerSettings(), least, timeouts=timeouts)
    try:
        print("RESULT", json.dumps(["ok", server.serve()]))
    except errors.KerasDistError as error:
        print("RESULT", json.dumps([type(error).__name__, str(error)]))

def connect():
    transport, link = options.get("transport", "auto"), None
    if cluster.servers:
        link = ServerLink(cluster, ServerSettings(), least, transport=transport)
        transport = "auto"
    return connect_elastic(
        cluster,
        transport=transport,
        timeouts=timeouts,
        settings={"arguments": options.get("arguments", {}).get(str(me))},
        min_workers=least,
        start_workers=options.get("start_workers"),
        grace=options.get("grace", 30.0),
        link=link,
    )

def wait(group, until):
    # Large, so that nearly all of the time it's in the collective.
    size = 500_000 if until == "change" else 1
    while True:
        flag = bool(group.changes)
        if until != "change":
            added = any("added" in each.text for each in group.changes)
            flag = added or bool(group.membership.waiting)
        if group.all_reduce([np.full(size, flag, np.int64)], "max")[0][0]:
            break

def work():
    begin = time.monotonic()
    try:
        job = connect()
    except errors.KerasDistError as error:
        missing = list(getattr(error, "missing", ()))
        print("RESULT", json.dumps([type(error).__name__, str(error), missing]))
        return
    group, leaving = job.communicator, job.leaving
    joined = group.joining
    said = {"took": time.monotonic() - begin, "joined": joined, "error": None}
    print("CONNECTED", flush=True)
    turn = 0
    if joined:
        if "dies" in options:
            kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(options["dies"], kill).start()
        group.join(60.0)
        turn = int(group.broadcast([np.array([0])])[0][0])
    said.update(found=[], admitted=[], agreed=[])
    seen, left = None, False

    def goes_on():
        if "enough" in options:
            enough = os.path.exists(options["enough"])
            return not group.all_reduce([np.array([enough])], "max")[0][0]
        full = not options.get("full") or group.size == cluster.size
        return turn < options.get("turns", 30) or (turn < 20_000 and not full)

    try:
        while not left and goes_on():
            turn += 1
            if group.ranks != seen:
                seen = group.ranks
                print("MEMBERS", sorted(seen), flush=True)
            for victim, when, signum in options["ends"]:
                if [victim, when] == [me, turn] and not joined:
                    os.kill(os.getpid(), signum)
                    while signum == signal.SIGTERM and not leaving.wanted:
                        time.sleep(0.001)
                    if signum == signal.SIGTERM:
                        time.sleep(options.get("busy", 0))  # in code of its own
            if turn == options.get("waits"):
                print("WAITS", flush=True)
                wait(group, options.get("until"))
            total = group.all_reduce([np.full(1000, me + 1.0, np.float32)])[0]
            # Spread over the servers.
            size = 200_000 if cluster.servers else 1000
            large = np.full(size, me + 1.0, np.float32)
            spread = group.all_reduce([large, large], lend=True)
            every = [int(part[0]) for part in group.all_gather(np.array([me]))]
            first = int(group.broadcast([np.array([me])])[0][0])
            sums = sorted({float(v) for a in (total, *spread) for v in (a[0], a[-1])})
            ranks = list(group.ranks)
            said["found"].append([turn, sums, every, first, ranks, group.rank])
            if turn % 5 == 0:
                joins, leaves = group.ask()
                if joins and group.admit():
                    group.broadcast([np.array([turn])])
                    said["admitted"].append(turn)
                if leaves:
                    leaving.agree()
                    said["agreed"].append(leaving.ends_job)
                    if [me, turn] == options.get("killed"):
                        os.kill(os.getpid(), signal.SIGKILL)
                    left = leaving.change()
            time.sleep(0.002)
    except errors.KerasDistError as failure:
        said["error"] = [type(failure).__name__, str(failure)]
    said["changes"] = [[change.text, change.seconds] for change in group.changes]
    said["last"] = list(group.ranks)
    print("RESULT", json.dumps(said), flush=True)
    job.close(RuntimeError(said["error"]) if said["error"] else None)
    if left:
        end_process()
    # Looking for one that doesn't answer takes some time.
    ending = time.monotonic() + 60
    names = lambda: [each.name for each in threading.enumerate()]
    while found := [n for n in names() if "kerasdist" in n and "look-up" not in n]:
        assert time.monotonic() < ending, found
        time.sleep(0.01)

serve() if me is None else work()
"""


def start(
    size: int,
    servers: int = 0,
    *,
    ends: Any = (),
    before: str = "",
    handover: bool = True,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Workers:
    return Workers(
        SCRIPT.replace("# BEFORE\n", before),
        size,
        [json.dumps({"ends": ends, **options})],
        deadline=120.0,
        handover=handover,
        servers=servers,
        **(more or {}),
    )


def check(finished: Finished, first: int | list[int]) -> list[list[int]]:
    """Each result is that of some members; returns these, each set once, in order."""
    found = finished.result["found"]
    seen = [list(range(first)) if isinstance(first, int) else first]
    for number, (turn, sums, every, root, ranks, rank) in enumerate(found):
        assert turn == found[0][0] + number
        # The members may have changed between two collectives of one turn.
        known = (seen[-1], ranks)
        assert ranks[rank] in every, turn
        assert set(sums) <= {sum(m + 1 for m in s) for s in known}, turn
        assert every in known
        assert root in (seen[-1][0], ranks[0])
        if ranks != seen[-1]:
            seen.append(ranks)
    return seen
