"""The contract of transports, in memory and over sockets."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from groups import in_threads, open_sockets, outcomes, socket_mesh, socket_ring
from kerasdist import errors
from kerasdist.transport.base import Aborted, CallMismatch, PeerClosed, PeerSilent
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import Call, FrameType, pack_header
from kerasdist.transport.memory import create_segment, memory_group
from pace import bound
from tls_pairs import tcp_pair, tls_pair

CALL = Call(1, "all_reduce", "sum", "uint8", 100, 0)


MAKERS = {
    "memory": memory_group,
    "unix": socket_ring,
    "tcp": lambda size: socket_ring(size, tcp_pair),
    "tls": lambda size: socket_ring(size, tls_pair),
    "mesh": socket_mesh,
}
SOCKETS = [name for name in MAKERS if name != "memory"]


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


def around(transport, payload, room, deadline=10.0, call=CALL):
    transport.exchange(
        call,
        Deadline(deadline),
        to=(transport.rank + 1) % transport.size,
        outgoing=payload,
        source=(transport.rank - 1) % transport.size,
        incoming=None if room is None else memoryview(room),
    )


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("size", [2, 5])
def test_a_ring_in_which_everybody_sends_much_at_once_does_not_stop(make, kind, size):
    """More than all buffers on the way hold."""
    group = make(kind, size)
    payloads = [np.random.default_rng(r).bytes(6_000_000) for r in range(size)]

    def work(rank):
        room = bytearray(6_000_000)
        around(group[rank], payloads[rank], room)
        return room == payloads[rank - 1]

    assert in_threads(size, work) == [True] * size


@pytest.mark.parametrize("kind", MAKERS)
def test_many_exchanges_of_all_sizes_arrive_in_order(make, kind):
    group = make(kind, 3)
    sizes = [0, 1, 39, 40, 41, 4096, 65_537, 300_000, 0, 0, 7]

    def work(rank):
        for number, size in enumerate(sizes * 5):
            call = Call(number + 1, "barrier")
            room = bytearray(size)
            around(group[rank], bytes([rank + number]) * size, room, call=call)
            assert room == bytes([(rank - 1) % 3 + number]) * size
            around(group[rank], b"", None, call=call)

    in_threads(3, work)


@pytest.mark.parametrize("kind", MAKERS)
def test_what_was_sent_before_the_end_still_arrives(make, kind):
    first, second = make(kind, 2)
    room = bytearray(5)
    first.exchange(CALL, Deadline(60), to=1, outgoing=b"hello")
    first.exchange(CALL, Deadline(0))  # nothing to do
    first.close()
    second.exchange(CALL, Deadline(60), source=0, incoming=memoryview(room))
    assert room == b"hello"
    with pytest.raises(PeerClosed) as caught:
        second.exchange(CALL, Deadline(60), source=0, incoming=memoryview(room))
    assert caught.value.peer == second.peers[0]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_peer_that_closes_ends_the_wait_for_it(make, kind):
    first, second = make(kind, 2)

    def work(rank):
        if rank == 1:
            second.exchange(CALL, Deadline(50), source=0, incoming=memoryview(b""))
        first.close()

    assert type(outcomes(2, work, 40.0)[1]) is PeerClosed


@pytest.mark.parametrize("kind", SOCKETS)
def test_a_peer_that_dies_in_the_midst_of_a_large_frame(make, kind):
    first, second = make(kind, 2)
    sent = threading.Event()

    def work(rank):
        if rank == 0:
            with pytest.raises(PeerSilent):  # the other one doesn't take it all
                first.exchange(CALL, Deadline(0.2), to=1, outgoing=bytes(9_000_000))
            first.close()
            sent.set()
        else:
            sent.wait(bound(60))
            room = memoryview(bytearray(9_000_000))
            second.exchange(CALL, Deadline(60), source=0, incoming=room)

    assert type(outcomes(2, work)[1]) is PeerClosed


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("sends", [False, True])
def test_a_peer_that_sends_or_takes_nothing_is_named_at_the_deadline(make, kind, sends):
    what = {"source": 1}
    if sends and kind != "memory":  # which takes all at once
        what = {"to": 1, "outgoing": bytes(20 << 20)}
    first, _ = make(kind, 2)
    started = time.monotonic()
    with pytest.raises(PeerSilent, match=r"^silent for 0\.2 s$") as caught:
        first.exchange(CALL, Deadline(0.2), **what)
    assert 0.2 <= time.monotonic() - started < 50
    assert caught.value.peer == first.peers[1]


@pytest.mark.parametrize("kind", MAKERS)
def test_another_call_is_a_mismatch_that_has_both(make, kind):
    first, second = make(kind, 2)
    other = Call(1, "broadcast", "none", "uint8", 100, 0, 1)
    first.exchange(other, Deadline(60), to=1, outgoing=b"abc")
    with pytest.raises(CallMismatch, match=r" is in #1 broadcast\(.*, this ") as caught:
        second.exchange(CALL, Deadline(60), source=0, incoming=memoryview(bytearray(3)))
    assert (caught.value.mine, caught.value.theirs) == (CALL, other)
    assert caught.value.peer == second.peers[0]
    # Another length of the same call is none, but a fault of the library.
    first, second = make(kind, 2)
    first.exchange(CALL, Deadline(60), to=1, outgoing=b"abc")
    with pytest.raises(
        errors.ProtocolError,
        match=r"^A data frame of rank 0 .* wrong length\. Received: 3 bytes, exp",
    ):
        second.exchange(CALL, Deadline(60), source=0, incoming=memoryview(bytearray(4)))


@pytest.mark.parametrize(
    ("garbage", "match"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n" * 2, r"^The received bytes aren't"),
        (pack_header(FrameType.GOODBYE, 0, CALL), r"^rank 0 .* sent a GOODBYE f"),
    ],
)
@pytest.mark.parametrize("kind", SOCKETS)
def test_garbage_is_a_protocol_error(make, kind, garbage, match):
    first, second = make(kind, 2)
    for sock in first.sockets():
        sock.send(garbage)
    with pytest.raises(errors.ProtocolError, match=match):
        second.exchange(CALL, Deadline(60), source=0, incoming=memoryview(bytearray(4)))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("how", ["abort", "close"])
def test_abort_from_another_thread_ends_a_wait_and_all_later_ones(make, kind, how):
    first, _ = make(kind, 2)
    began = threading.Event()

    def work(number):
        if number == 0:
            began.set()
            first.exchange(CALL, Deadline(30), source=1)
        began.wait(bound(60))
        first.abort()

    started = time.monotonic()
    assert type(outcomes(2, work)[0]) is Aborted
    assert time.monotonic() - started < 25
    getattr(first, how)()
    with pytest.raises(Aborted):
        first.exchange(CALL, Deadline(30), to=1, outgoing=b"x")


# Descriptors.


def fresh_descriptor(rank):
    descriptor = create_segment(4096)
    os.pwrite(descriptor, bytes([rank]), 0)
    return descriptor


@pytest.mark.parametrize("size", [2, 3, 5])
def test_descriptors_reach_every_other_rank(make, size):
    group = make("mesh", size)

    def work(rank):
        for _ in range(20):
            mine = fresh_descriptor(rank)
            received = group[rank].share_descriptor(CALL, Deadline(60), mine)
            content = {r: os.pread(fd, 1, 0)[0] for r, fd in received.items()}
            for fd in (mine, *received.values()):
                assert not os.get_inheritable(fd)
                os.close(fd)
            assert content == {r: r for r in range(size) if r != rank}

    in_threads(size, work)


@pytest.mark.parametrize("fault", ["close", "abort", "silent", "mismatch", "garbage"])
def test_descriptors_are_closed_when_not_all_come(make, fault):
    group = make("mesh", 4)
    before = open_sockets()
    expected = {
        "close": PeerClosed,
        "abort": Aborted,
        "silent": PeerSilent,
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
                    transport.exchange(Call(7, "barrier"), Deadline(60), to=to)
            return
        if rank == 0 and fault == "abort":
            threading.Timer(0.1, transport.abort).start()
        mine = fresh_descriptor(rank)
        try:
            seconds = 0.3 if rank == 0 and fault == "silent" else 50.0
            transport.share_descriptor(CALL, Deadline(seconds), mine)
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
