"""Processes that were out of contact when the others continued without them."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kerasdist.cluster.address import split_address
from kerasdist.collectives.elastic.epochs import Gone, Loss, Member
from kerasdist.collectives.elastic.groups import introduce
from kerasdist.collectives.elastic.peer_messenger import Contact, PeerMessenger
from kerasdist.transport.rendezvous.listener import Listener
from waiting import wait_until
from workers import Workers, free_ports

pytestmark = pytest.mark.timeout(120)


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

        def lines(member: Member, listener: Listener) -> PeerMessenger:
            made = PeerMessenger(member, addresses, secret, listener, "job")
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
        lines = PeerMessenger(Member(0), addresses, secret, listener, "job")
        undo.callback(lines.close)
        thread = threading.Thread(target=end)
        thread.start()
        undo.callback(thread.join)
        assert lines.contact(Member(1)) is Contact.DEAD


def test_messages_about_ranks_that_there_are_not_are_ignored_in_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of one that has the secret: a task of another cluster, or of another version."""
    ports = free_ports(3)
    addresses = {rank: f"127.0.0.1:{port}" for rank, port in enumerate(ports)}
    mine = {rank: addresses[rank] for rank in range(2)}
    secret = b"s" * 16
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with contextlib.ExitStack() as undo:

        def lines(rank: int, known: dict[int, str]) -> PeerMessenger:
            listener = Listener.acquire(addresses[rank], secret, 5.0)
            undo.callback(listener.release)
            made = PeerMessenger(Member(rank), known, secret, listener, "job")
            undo.callback(made.close)
            return made

        here = lines(0, mine)
        here.receive = lambda sender, message: received.put((sender, message))
        other, stranger = lines(1, addresses), lines(2, addresses)
        stranger.send(Member(0), Gone())
        wait_until(lambda: "from rank 2 was ignored. Its hello" in caplog.text, "it")
        other.send(Member(0), Loss(3, frozenset({Member(2)}), False))
        wait_until(lambda: "names ranks [2], and the job has 2" in caplog.text, "it")
        assert "from rank 1 was ignored" in caplog.text

        def is_heard() -> bool:
            # The line of the ignored message ends a moment after it was told of, with
            # what has been sent on it meanwhile.
            other.send(Member(0), Gone())
            return not received.empty()

        wait_until(is_heard, "a message on a new line")
        assert received.get() == (Member(1), Gone())
        assert received.empty()


# Each process has two jobs; the chief leaves the first one.
LEAVER = """
import numpy as np
from kerasdist.cluster import resolve
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.transport.deadline import Timeouts

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
