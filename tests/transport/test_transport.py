import os

import numpy as np
import pytest

from groups import in_threads, open_sockets, outcomes, socket_mesh, socket_ring
from kerasdist import errors
from kerasdist.transport.base import CallMismatch, Collective, PeerClosed
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import Call
from kerasdist.transport.memory import create_segment
from tls_pairs import tcp_pair, tls_pair

CALL = Call(1, "all_reduce", "sum", "uint8", 100, 0)


MAKERS = {
    "unix": socket_ring,
    "tcp": lambda size: socket_ring(size, tcp_pair),
    "tls": lambda size: socket_ring(size, tls_pair),
    "mesh": socket_mesh,
}


@pytest.fixture
def make(request):
    """A function from a kind and a size to transports, closed after the test."""
    before = open_sockets()
    made = []

    def maker(kind, size):
        made.extend(MAKERS[kind](size))
        return made[-size:]

    yield maker
    for transport in made:
        transport.close()
        transport.close()
    assert open_sockets() == before


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("size", [2, 5])
def test_a_ring_in_which_everybody_sends_much_at_once_does_not_stop(make, kind, size):
    """More than all buffers on the way hold."""
    group = make(kind, size)
    payloads = [np.random.default_rng(r).bytes(6_000_000) for r in range(size)]

    def work(rank):
        room = bytearray(6_000_000)
        group[rank].exchange(
            Collective(CALL, Deadline(10.0)),
            to=(rank + 1) % size,
            outgoing=payloads[rank],
            source=(rank - 1) % size,
            incoming=memoryview(room),
        )
        return room == payloads[rank - 1]

    assert in_threads(size, work) == [True] * size


@pytest.mark.parametrize("kind", MAKERS)
def test_what_was_sent_before_the_end_still_arrives(make, kind):
    first, second = make(kind, 2)
    room = bytearray(5)
    one = Collective(CALL, Deadline(60))
    first.exchange(one, to=1, outgoing=b"hello")
    first.exchange(Collective(CALL, Deadline(0)))  # nothing to do
    first.close()
    second.exchange(one, source=0, incoming=memoryview(room))
    assert room == b"hello"
    with pytest.raises(PeerClosed) as caught:
        second.exchange(
            Collective(CALL, Deadline(60)), source=0, incoming=memoryview(room)
        )
    assert caught.value.peer == second.peers[0]


def fresh_descriptor(rank):
    descriptor = create_segment(4096)
    os.pwrite(descriptor, bytes([rank]), 0)
    return descriptor


@pytest.mark.parametrize("fault", ["close", "mismatch", "garbage"])
def test_descriptors_are_closed_when_not_all_come(make, fault):
    group = make("mesh", 4)
    before = open_sockets()
    expected = {
        "close": PeerClosed,
        "mismatch": CallMismatch,
        "garbage": errors.ProtocolError,
    }[fault]

    def work(rank):
        transport = group[rank]
        if rank == 3:
            if fault == "close":
                transport.abort()
            elif fault == "garbage":
                for sock in transport.sockets():
                    sock.send(b"x" * 40)
            elif fault == "mismatch":
                for to in range(3):
                    other = Collective(Call(7, "barrier"), Deadline(60))
                    transport.exchange(other, to=to)
            return
        mine = fresh_descriptor(rank)
        try:
            transport.share_descriptor(Collective(CALL, Deadline(50.0)), mine)
        finally:
            os.close(mine)
            if rank == 0:
                # The others may wait for what never comes; they aren't looked at.
                for each in group:
                    each.abort()

    results = outcomes(4, work)
    assert type(results[0]) is expected
    del results
    for transport in group:
        transport.abort()
        # What was on its way goes with the connection that it was on.
        for sock in transport.sockets():
            try:
                while sock.recv(4096):
                    pass
            except OSError:
                continue
    assert open_sockets() == before
