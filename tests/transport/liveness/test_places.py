"""The collectives of all ranks, as the chief sends them to a rank that waits."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasdist.errors import ProtocolError
from kerasdist.transport.liveness.places import Places


def runs(payload):
    return list(struct.iter_unpack("!IIQ", payload))


def test_ranks_in_the_same_collective_are_one_run():
    size = 1000
    places = Places(size)
    for rank in range(size):
        places.note(rank, 6 if rank == 700 else 7)
    sent = places.note(5, 7)
    assert runs(sent) == [(0, 700, 7), (700, 1, 6), (701, 299, 7)]
    worker = Places(size)
    worker.receive(sent)
    assert worker.behind(7) == [700]
    assert worker.behind(6) == []


def test_each_change_is_sent_once():
    places = Places(4)
    for rank in range(4):
        places.note(rank, 3)
    assert runs(places.note(1, 3)) == [(0, 4, 3)]
    assert places.note(1, 3) == b""
    places.note(2, 4)
    assert runs(places.note(1, 3)) == [(2, 1, 4)]
    # Another rank hasn't got any of it.
    assert runs(places.note(0, 3)) == [(0, 2, 3), (2, 1, 4), (3, 1, 3)]
    # Of two changes between two heartbeats the last one is sent.
    places.note(2, 5)
    places.note(2, 6)
    assert runs(places.note(1, 3)) == [(2, 1, 6)]


def test_before_the_first_heartbeat_of_the_chief_no_place_is_known():
    worker = Places(3)
    assert worker.behind(5) == []
    worker.receive(b"")
    assert worker.behind(5) == [0, 1, 2]
    # The chief itself knows them by their own heartbeats.
    chief = Places(3)
    chief.note(2, 0)
    assert chief.behind(5) == [2]


@settings(max_examples=50)
@given(
    st.integers(2, 9),
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 6)), min_size=100, max_size=300
    ),
)
def test_a_rank_that_waits_knows_all_that_the_chief_knows(size, beats):
    """As if each heartbeat had all numbers."""
    chief, workers = Places(size), [Places(size) for _ in range(size)]
    known = [0] * size
    for rank, place in beats:
        rank %= size
        # It waits more often than it moves on.
        place = place if 0 < place < 5 else known[rank]
        # The first heartbeat is noted, too, whatever it says.
        waits = place == known[rank] and place > 0
        moved = place != known[rank]
        known[rank] = place
        sent = chief.note(rank, place)
        workers[rank].receive(sent)
        if waits:
            for number in range(6):
                behind = [other for other in range(size) if known[other] < number]
                assert workers[rank].behind(number) == behind
        elif moved:
            assert sent == b""


@pytest.mark.parametrize(
    ("payload", "match"),
    [
        (b"x", "has the wrong length. Received: 1 bytes, expected a mult"),
        (bytes(24), "has the wrong length. Received: 24 bytes"),
        (
            struct.pack("!IIQ", 2, 2, 1),
            "is damaged. Received: 2 ranks from 2 on, expected ranks bel",
        ),
        (b"\xff" * 16, "is damaged. Received: 4294967295 ranks from 42949"),
    ],
)
def test_damaged_places_are_refused(payload, match):
    places = Places(3)
    with pytest.raises(ProtocolError, match=rf"^A heartbeat {match}"):
        places.receive(payload)
    assert places.behind(5) in ([], [0, 1, 2])
