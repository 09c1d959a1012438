"""Processes that were out of contact when the others continued without them."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kerasdist.cluster.address import split_address
from kerasdist.collectives.elastic.groups import introduce
from kerasdist.collectives.elastic.membership.lines import Contact, Lines
from kerasdist.transport.membership.epochs import Member
from kerasdist.transport.rendezvous.listener import Listener
from workers import Workers, free_ports

# The members add up ones, and admit those that wait, until the test wants the end.
SCRIPT = """
import os, sys, time
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.transport.timeouts import Timeouts

cluster = resolve(None)
if cluster.rank == 3:
    while not os.path.exists(f"{sys.argv[1]}/grow"):
        time.sleep(0.05)
job = connect_elastic(
    cluster, timeouts=Timeouts(startup=60, heartbeat=1), start_workers=3
)
group = job.communicator
joined = group.joining
if joined:
    group.join(60.0)
    group.broadcast([np.array([0])])
seen = None
while True:
    if group.ranks != seen:
        seen = group.ranks
        print("MEMBERS", list(seen), flush=True)
    if joined:
        joined = False  # the others have admitted it in this turn
    elif group.ask()[0] and group.admit():
        group.broadcast([np.array([0])])
    enough = os.path.exists(f"{sys.argv[1]}/enough")
    if group.all_reduce([np.array([enough])], "max")[0][0]:
        break
    time.sleep(0.01)
print("RESULT", list(group.ranks))
job.close()
"""
pytestmark = pytest.mark.timeout(120)


@pytest.mark.soak
@pytest.mark.parametrize("dies", [True, False])
def test_newcomers_continue_alone_if_the_absent_one_is_dead(
    tmp_path: Any, dies: bool
) -> None:
    """Else it may have continued, as far as the newcomer knows."""
    with Workers(SCRIPT, 4, [str(tmp_path)], handover=False, deadline=100.0) as job:
        job.wait_for_line(0, "MEMBERS [0, 1, 2]")
        job.kill(2, signal.SIGSTOP)
        job.wait_for_line(0, "MEMBERS [0, 1]")
        (tmp_path / "grow").touch()
        job.wait_for_line(0, "MEMBERS [0, 1, 3]")
        if dies:
            job.kill(2)
        # The first member has looked for it meanwhile.
        time.sleep(8.0)
        job.kill(1)
        job.kill(0)
        if dies:
            job.wait_for_line(3, "MEMBERS [3]")
            (tmp_path / "enough").touch()
            assert job.wait_one(3).result == [3]
        else:
            last = job.wait_one(3)
            assert last.returncode == 1
            assert "others may have continued without this worker" in last.output
            job.kill(2)


class _Gathering:
    """Plays the communicator of a group of two, one after the other."""

    def __init__(self) -> None:
        self.rank = 0
        self.given: list[Any] = []

    def all_gather(self, array: Any) -> list[Any]:
        self.given.append(array)
        return self.given


def test_a_newcomer_knows_that_another_process_has_an_absent_ones_address() -> None:
    """It has never been in contact with the absent one; the chief has."""
    addresses = {rank: f"127.0.0.1:{port}" for rank, port in enumerate(free_ports(3))}
    absent, newcomer, secret = Member(2), Member(1, 7), b"s" * 16
    with contextlib.ExitStack() as undo:

        def lines(member: Member, listener: Listener) -> Lines:
            made = Lines(member, addresses, secret, listener, "job")
            undo.callback(made.close)
            return made

        def listener(rank: int) -> Listener:
            made = Listener.acquire(addresses[rank], secret, 5.0)
            undo.callback(made.release)
            return made

        chief, mine = lines(Member(0), listener(0)), lines(newcomer, listener(1))
        theirs = listener(2)
        first = lines(absent, theirs)
        assert chief.contact(absent) is Contact.ALIVE
        first.close()
        # Its task is started again, and hasn't found the job yet.
        lines(absent, theirs)
        communicator = _Gathering()
        group: Any = SimpleNamespace(communicator=communicator)
        decision: Any = SimpleNamespace(epoch=SimpleNamespace(absent={absent}))
        introduce(group, decision, chief)
        communicator.rank = 1
        introduce(group, decision, mine)
        assert chief.contact(absent) is Contact.DEAD
        assert mine.contact(absent) is Contact.DEAD


def test_a_process_that_ends_is_dead_and_not_out_of_contact() -> None:
    """While the system frees its memory, it still listens, and then it doesn't."""
    addresses = {rank: f"127.0.0.1:{port}" for rank, port in enumerate(free_ports(2))}
    secret = b"s" * 16
    ending = socket.create_server(split_address(addresses[1]))

    def end() -> None:
        ending.accept()[0].close()
        connection = ending.accept()[0]
        ending.close()
        connection.close()

    with contextlib.ExitStack() as undo:
        listener = Listener.acquire(addresses[0], secret, 5.0)
        undo.callback(listener.release)
        lines = Lines(Member(0), addresses, secret, listener, "job")
        undo.callback(lines.close)
        thread = threading.Thread(target=end)
        thread.start()
        undo.callback(thread.join)
        assert lines.contact(Member(1)) is Contact.DEAD


# Each process has two jobs; the chief leaves the first one.
LEAVER = """
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.transport.timeouts import Timeouts

cluster = resolve(None)
first, second = (
    connect_elastic(cluster, timeouts=Timeouts(startup=30, heartbeat=5))
    for _ in range(2)
)
first.communicator.barrier()
if cluster.rank == 0:
    first.close()
else:
    first.communicator.barrier()
ranks = list(first.communicator.ranks)
second.communicator.barrier()
second.close()
first.close()
print("RESULT", ranks)
"""


def test_one_that_has_left_a_job_is_as_dead_though_it_is_in_another() -> None:
    with Workers(LEAVER, 2, deadline=60.0) as job:
        finished = job.succeed()
    # Alone, it is neither more than half, nor half with the chief.
    assert [each.result for each in finished] == [[0, 1], [1]]
