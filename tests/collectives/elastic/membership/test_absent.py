import contextlib
import queue
import socket
import threading
from concurrent.futures import wait
from types import SimpleNamespace

from groups import addresses_of
from kerasdist.cluster.address import split_address
from kerasdist.collectives.elastic.epochs import Gone, Loss, Member
from kerasdist.collectives.elastic.groups import introduce
from kerasdist.collectives.elastic.peer_messenger import Contact, PeerMessenger
from kerasdist.transport.rendezvous.listener import Listener
from waiting import wait_until
from workers import Workers

SECRET = b"s" * 16


class Lines:
    def __init__(self, size, undo):
        self.addresses = dict(enumerate(addresses_of(size)))
        self._undo = undo

    def listener(self, rank):
        made = Listener.acquire(self.addresses[rank], SECRET, 5.0)
        self._undo.callback(made.release)
        return made

    def of(self, member, listener=None, addresses=None):
        listener = listener or self.listener(member.id)
        addresses = addresses or self.addresses
        made = PeerMessenger(member, addresses, SECRET, listener, "job")
        self._undo.callback(made.close)
        return made


def test_a_newcomer_knows_that_another_process_has_an_absent_ones_address():
    """It has never been in contact with the absent one; the chief has."""
    absent, newcomer = Member(2), Member(1, 7)
    with contextlib.ExitStack() as undo:
        lines = Lines(3, undo)
        chief, mine = lines.of(Member(0)), lines.of(newcomer)
        theirs = lines.listener(2)
        first = lines.of(absent, theirs)
        assert chief.contact(absent) is Contact.ALIVE
        first.close()
        # Its task is started again, and hasn't found the job yet.
        lines.of(absent, theirs)
        given = []
        # The communicator of a group of two, one after the other.
        group = SimpleNamespace(communicator=SimpleNamespace(rank=0))
        group.communicator.all_gather = lambda array: given.append(array) or given
        decision = SimpleNamespace(epoch=SimpleNamespace(absent={absent}))
        introduce(group, decision, chief)
        group.communicator.rank = 1
        introduce(group, decision, mine)
        assert chief.contact(absent) is mine.contact(absent) is Contact.DEAD


def test_a_message_while_lines_are_closed_leaves_no_thread(monkeypatch):
    """It comes when the last messages are awaited."""
    with contextlib.ExitStack() as undo:
        mine = Lines(2, undo).of(Member(0))
        mine.send(Member(1), Gone())

        def waited(lines, timeout=None):
            mine.send(Member(1), Gone())
            return wait(lines, timeout)

        monkeypatch.setattr("kerasdist.collectives.elastic.peer_messenger.wait", waited)
        mine.close()
        assert not [t for t in threading.enumerate() if "line to" in t.name]


def test_a_process_that_ends_is_dead_and_not_out_of_contact():
    """While the system frees its memory, it still listens, and then it doesn't."""
    with contextlib.ExitStack() as undo:
        lines = Lines(2, undo)
        ending = socket.create_server(split_address(lines.addresses[1]))

        def end():
            ending.accept()[0].close()
            connection = ending.accept()[0]
            ending.close()
            connection.close()

        mine = lines.of(Member(0))
        thread = threading.Thread(target=end)
        thread.start()
        undo.callback(thread.join)
        assert mine.contact(Member(1)) is Contact.DEAD


def test_messages_about_ranks_that_there_are_not_are_ignored_in_words(caplog):
    """Of one that has the secret: a task of another cluster, or of another version."""
    received = queue.SimpleQueue()
    with contextlib.ExitStack() as undo:
        lines = Lines(3, undo)
        two = {rank: lines.addresses[rank] for rank in range(2)}
        here = lines.of(Member(0), addresses=two)
        here.receive = lambda sender, message: received.put((sender, message))
        other, stranger = lines.of(Member(1)), lines.of(Member(2))
        stranger.send(Member(0), Gone())
        wait_until(lambda: "from rank 2 was ignored. Its hello" in caplog.text, "it")
        other.send(Member(0), Loss(3, frozenset({Member(2)}), False))
        wait_until(lambda: "names ranks [2], and the job has 2" in caplog.text, "it")
        assert "from rank 1 was ignored" in caplog.text

        def is_heard():
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


def test_one_that_has_left_a_job_is_as_dead_though_it_is_in_another():
    # Alone, it is neither more than half, nor half with the chief.
    assert Workers(LEAVER, 2, deadline=60.0).results() == [[0, 1], [1]]
