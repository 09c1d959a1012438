import json
import signal

import pytest

from pace import bound
from servers import ServerProcesses
from workers import FULL_STDERR

# The workers go on until somebody is lost, and 20 steps more.
UNTIL_LOST = """
def work(client, table):
    say("GOING")
    while not any(e.kind == "lost" for e in client.events):
        pulled = steps(table, 1)
    pulled = steps(table, 20)
    client.communicator.barrier()
    return [[e.kind, e.rank, e.address, e.clock, e.reason] for e in client.events] + [
        list(client.communicator.ranks), table.clock]
"""
QUICK = {"heartbeat": bound(1.5)}


@pytest.mark.soak
def test_a_worker_that_was_frozen_hears_that_it_was_dropped():
    # Also with a server whose output nobody reads.
    script = FULL_STDERR + 'if cluster.task_type == "ps": fill_stderr()\n' + UNTIL_LOST
    with ServerProcesses(script, 2, max_staleness=2, timeouts=QUICK) as job:
        job.going()
        job.kill(1, signal.SIGSTOP)
        status, (event, *_, ranks, clock) = job.wait_one(0).result
        kind, rank, address, lost_at, _ = event
        assert (status, kind, rank, address) == ("ok", "lost", 1, job.addresses[1])
        assert clock >= lost_at + 18
        assert ranks == [0]
        # It doesn't end: its last words are still to be read.
        said = job.wait_for_line(2, "RESULT").removeprefix("RESULT ")
        status, stats = json.loads(said)
        states = [worker["state"] for worker in stats["workers"]]
        assert (status, states) == ("ok", ["finished", "lost"])
        job.kill(1, signal.SIGCONT)
        kind, message, fields = job.wait_one(1).result
        # The server may have ended before it could say why.
        assert kind in ("WorkerLost", "ServerLost")
        if kind == "WorkerLost":
            assert fields["rank"] == 1
            assert "nothing was received from it" in message
            assert "The other workers go on without it." in message


@pytest.mark.soak
def test_whose_place_a_frozen_worker_has_waits_until_that_is_lost():
    work = """
    def work(client, table):
        if client.joined:
            say("JOINED")
            return
        say("GOING")
        while not [e for e in client.events if e.kind == "joined"]:
            steps(table, 1)
        steps(table, 10)
        return [[e.kind, e.rank] for e in client.events]
    """
    with ServerProcesses(work, 2, timeouts=QUICK) as job:
        job.going()
        job.kill(1, signal.SIGSTOP)
        frozen = job.processes[1]
        job.start_again(1)
        status, events = job.wait_one(0).result
        assert (status, events[:2]) == ("ok", [["lost", 1], ["joined", 1]])
        assert "JOINED" in job.output(1)
    frozen.wait(bound(10))


def test_messages_that_are_too_large_or_without_sense_end_only_their_senders():
    work = """
    if cluster.task_type == "ps":
        import resource
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        room = pages * resource.getpagesize() + (128 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (room, room))

    def work(client, table):
        steps(table, 5)
        if client.rank == 1:
            # As a table would be that has grown out of all proportion.
            huge = np.zeros(64 << 20, "float32")
            client.communicator.all_reduce([huge])
        if client.rank == 2:
            table.number = 10**30
        while len(client.events) < 2:
            steps(table, 1)
        steps(table, 20)
        return [[e.rank, e.kind, e.reason] for e in client.events]
    """
    with ServerProcesses(work, 3, transport="tcp") as job:
        status, events = job.wait_one(0).result
        (large, kind, _), (odd, same, reason) = sorted(events)
        assert (status, large, kind, odd, same) == ("ok", 1, "lost", 2, "lost")
        assert "A request is damaged" in reason
        assert job.wait_one(1).result[0] != "ok"
        kind, message, _ = job.wait_one(2).result
        assert kind == "CollectiveError"
        assert "A request is damaged. Received: table=1000" in message
        server = job.wait_one(3)
        assert server.result[0] == "ok"
        assert "server 0 has no memory for its message (" in server.output
