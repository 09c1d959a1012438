"""Supervisors: one word on what failed, on all ranks, whatever comes in."""

from __future__ import annotations

import json
import re
import struct
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closing import Closing
from groups import connections, in_threads, outcomes
from kerasdist import errors
from kerasdist.errors import ProtocolError
from kerasdist.transport.base import Peer
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.framing import Call, FrameType, pack_header
from kerasdist.transport.liveness.failure_detector import (
    CollectiveProgress,
    FailureDetector,
)
from kerasdist.transport.liveness.failure_protocol import decode, encode
from pace import bound
from waiting import wait_until

SUPERVISOR = "kerasdist.transport.liveness.failure_detector"


class Crew(Closing):
    """Supervisors of `size` ranks in one process; `react` is the chief's handler."""

    def __init__(self, size, heartbeat=60.0, collective=4.0, silent=(), react=None):
        peers = [Peer(rank, f"host{rank}:1") for rank in range(size)]
        pairs = {rank: connections() for rank in range(1, size)}
        self.size = size
        self.seen = [[] for _ in range(size)]
        # A chief is silent in a job of two.
        self.raw = {rank: pairs[rank or 1][1 if rank else 0] for rank in silent}
        timeouts = Timeouts(heartbeat=heartbeat, collective=collective)
        self.ranks = {}
        for rank in range(size):
            if rank not in silent:
                lines = {0: pairs[rank][1]} if rank else {}
                if rank == 0:
                    lines = {r: pair[0] for r, pair in pairs.items()}
                handle = self.seen[rank].append if rank or not react else react
                self.ranks[rank] = FailureDetector(rank, peers, lines, timeouts, handle)

    def close(self):
        for supervisor in self.ranks.values():
            supervisor.close()
        for connection in self.raw.values():
            connection.close()

    def failures(self):
        """What every rank holds to be the failure, when all have one."""
        wait_until(
            lambda: all(s.failure is not None for s in self.ranks.values()),
            "a failure on all ranks",
        )
        return [str(supervisor.failure) for supervisor in self.ranks.values()]


class Surprise:
    """A call of a supervisor at which its thread does something else, once."""

    def __init__(self, supervisor, work):
        self.supervisor, self.work = supervisor, work

    @property
    def sequence(self):
        self.supervisor.call = Call(0)
        return self.work() or 0


def test_all_ranks_hold_the_first_report_for_the_failure():
    with Crew(4) as crew:
        error = errors.CollectiveMismatch("rank 2 says so")
        assert crew.ranks[2].report(error) is not None
        assert crew.failures() == ["rank 2 says so"] * 4
        for supervisor in crew.ranks.values():
            late = errors.CollectiveTimeout("too late")
            assert str(supervisor.report(late)) == "rank 2 says so"
        assert [len(seen) for seen in crew.seen] == [1] * 4


def test_when_all_report_at_once_all_hold_the_same():
    for _ in range(10):
        with Crew(4) as crew:
            texts = outcomes(
                4,
                lambda rank, crew=crew: str(
                    crew.ranks[rank].report(errors.CollectiveError(f"of rank {rank}"))
                ),
            )
            assert len(set(texts)) == 1
            assert set(crew.failures()) == set(texts)


def test_the_others_have_been_told_before_a_handler_may_end_the_chief():
    """A chief whose script calls `os._exit` at once is not to blame."""
    told = []

    def react(error):
        raw.sock.setblocking(False)
        told.append(raw.sock.recv(1 << 16))

    with Crew(3, silent=(2,), react=react) as crew:
        raw = crew.raw[2]
        crew.ranks[1].report(errors.CollectiveError("the cause"))
        crew.failures()
        wait_until(lambda: told, "the chief's handler")
    assert b"the cause" in told[0]


def test_a_chief_that_wakes_up_hears_that_it_was_the_one():
    """Else it would see its neighbours' connections end, and name one of them."""
    with Crew(2, heartbeat=0.5, silent=(0,)) as crew:
        (text,) = crew.failures()
        assert text.startswith(
            "Rank 0 (host0:1) was lost at step 0: nothing was received"
        )
        sent = b""
        while b'"WorkerLost", "args": [0, "host0:1"' not in sent:
            sent += crew.raw[0].sock.recv(1 << 16)


def test_a_suspicion_gives_way_to_the_cause():
    """Rank 1's connections close because it saw rank 3's fault."""
    with Crew(4) as crew:
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(
                crew.ranks[2].explain(Peer(1, "host1:1"), "its connection was closed")
            )
        )
        thread.start()
        crew.ranks[1].report(errors.WorkerLost(3, "host3:1", 5, "the cause"))
        thread.join(bound(60))
        assert (answers[0].rank, answers[0].reason) == (3, "the cause")
        assert len(set(crew.failures())) == 1


@pytest.mark.parametrize(
    ("left", "decision", "asker", "suspect", "rank", "reason"),
    [
        # Nothing better comes.
        (None, 0.3, 2, 1, 1, "its connection was closed"),
        # The suspect has said goodbye.
        (1, 80.0, 2, 1, 1, "it closed its strategy while others still needed it"),
        # Rank 2 has given up because of the chief; rank 3 sees only rank 2.
        (0, 80.0, 3, 2, 0, "it closed its strategy while others still needed it"),
    ],
)
def test_who_is_named_by_one_whose_neighbour_has_gone(
    monkeypatch, left, decision, asker, suspect, rank, reason
):
    monkeypatch.setattr(f"{SUPERVISOR}.DECISION_SECONDS", decision)
    with Crew(4, heartbeat=80.0) as crew:
        if left is not None:
            crew.ranks[left].close()
        peer = Peer(suspect, f"host{suspect}:1")
        started = time.monotonic()
        lost = crew.ranks[asker].explain(peer, "its connection was closed")
        assert time.monotonic() - started < 60
        assert (lost.rank, lost.host, lost.reason) == (rank, f"host{rank}:1", reason)
        if left is None:
            assert len(set(crew.failures())) == 1


def test_goodbyes_of_all_are_no_failure():
    with Crew(4) as crew:
        for rank in (2, 0, 3, 1):
            crew.ranks[rank].close()
            crew.ranks[rank].close()
        assert [s.failure for s in crew.ranks.values()] == [None] * 4


def test_who_ends_with_an_error_is_named_by_all_at_once():
    with Crew(4) as crew:
        crew.ranks[2].close(ValueError("x" * 5000))
        del crew.ranks[2]
        (text,) = set(crew.failures())
    assert text.startswith(
        "Rank 2 (host2:1) was lost at step 0: its script ended with V"
    )
    assert len(text) < 2000


def test_the_end_that_a_failure_causes_is_not_taken_for_the_cause():
    """The chief ends as soon as it knows; the others must hear the cause first."""
    for _ in range(20):
        known = threading.Event()
        with Crew(4, react=lambda error, known=known: known.set()) as crew:
            chief = crew.ranks[0]

            def end(chief=chief, known=known):
                known.wait(bound(60))
                chief.close(chief.failure)

            thread = threading.Thread(target=end)
            thread.start()
            crew.ranks[1].report(errors.CollectiveMismatch("the cause"))
            thread.join(bound(60))
            assert set(crew.failures()) == {"the cause"}


def test_silence_is_noticed_in_time_by_all():
    """A connection that stays open, and on which nothing comes; or a frozen chief."""
    in_threads(2, lambda i: check_silence_of((0, 2)[i]))


def check_silence_of(victim):
    started, thaw = time.monotonic(), threading.Event()
    with Crew(4, heartbeat=2.0, silent=[victim] if victim else []) as crew:
        if victim == 0:
            # The chief's thread is frozen.
            frozen = crew.ranks.pop(0)
            frozen.call = Surprise(frozen, lambda: thaw.wait(bound(60)) and 0)
        texts = crew.failures()
        assert time.monotonic() - started > 1.4  # a heartbeat every 0.4 s
        for text in texts:
            assert text.startswith(f"Rank {victim} (host{victim}:1) was lost at step 0")
            silence = re.search(r"nothing was received from it for (\S+) s", text)[1]
            assert float(silence) >= 2
        if victim == 0:
            thaw.set()
            frozen.close()


def test_one_who_was_frozen_itself_blames_nobody():
    """A whole machine that was suspended: all are silent for that time."""
    with Crew(2, heartbeat=0.8, silent=[1]) as crew:
        woke_up = []

        def freeze():
            threading.Event().wait(1.2)
            woke_up.append(time.monotonic())

        crew.ranks[0].call = Surprise(crew.ranks[0], freeze)
        (text,) = crew.failures()
        # It isn't blind for that: the silence counts from when it woke up.
        assert time.monotonic() - woke_up[0] >= 0.8
        assert "nothing was received from it for " in text


def test_who_is_absent_is_known_to_all_ranks():
    with Crew(4, collective=2.0) as crew:
        for rank, supervisor in crew.ranks.items():
            supervisor.call = Call(7 if rank == 2 else 8, "barrier")
        for rank in (0, 1, 3):
            ask = crew.ranks[rank].absent
            wait_until(lambda ask=ask: [p.rank for p in ask(Call(8))] == [2], "rank 2")
            wait_until(lambda ask=ask: ask(Call(7)) == [], "all")


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n",
        *(
            pack_header(FrameType.GOODBYE, len(text)) + text
            for text in (b"\xff{[x", b"{}", b'{"rank": 2}', b"[" * 50_000)
        ),
        pack_header(FrameType.DATA, 0),
        pack_header(FrameType.HEARTBEAT, 1 << 40),
    ],
)
def test_garbage_ends_the_job_and_names_who_sent_it(garbage):
    with Crew(3, silent=[1]) as crew:
        crew.raw[1].sock.sendall(signed(crew.raw[1], garbage))
        for text in crew.failures():
            assert text.startswith(
                "Rank 1 (host1:1) was lost at step 0: its connection"
            )


def signed(connection, frame):
    return frame + connection.auth.sign(frame)


def frame_of(kind, payload=b""):
    return pack_header(kind, len(payload)) + payload


@pytest.mark.parametrize(
    "attack", ["injected", "changed", "repeated", "left out", "sent back", "another's"]
)
def test_frames_that_somebody_on_the_path_makes_are_no_ones_words(attack):
    """Whoever stands between two workers can't say that a third one has failed.

    It can end the connection, as anybody on the path can.
    """
    lie = frame_of(FrameType.FAILURE, encode(errors.CollectiveMismatch("a lie")))
    beat = frame_of(FrameType.HEARTBEAT)
    with Crew(3, silent=[1, 2]) as crew:
        true = crew.raw[1]
        if attack == "injected":
            data = lie + bytes(16)
        elif attack == "changed":
            data = signed(true, lie).replace(b"a lie", b"A LIE")
        elif attack == "repeated":
            data = signed(true, beat) * 2
        elif attack == "left out":
            signed(true, beat)
            data = signed(true, lie)
        elif attack == "sent back":
            # What the chief itself has sent, in its own direction.
            data = true.sock.recv(1 << 16)
        else:
            data = signed(crew.raw[2], lie)
        true.sock.sendall(data)
        (text,) = set(crew.failures())
    assert text.startswith(
        "Rank 1 (host1:1) was lost at step 0: its connection ended (A"
    )
    assert "changed, repeated, left out or injected on the network" in text


def test_a_damaged_heartbeat_of_the_chief_ends_a_worker():
    with Crew(2, silent=[0]) as crew:
        crew.raw[0].write(FrameType.HEARTBEAT, b"x", Deadline(60))
        (text,) = crew.failures()
    assert text.startswith("Rank 0 (host0:1) was lost at step 0: ")
    assert "A heartbeat has the wrong length. Received: " in text


def test_frames_may_come_in_pieces():
    with Crew(2, silent=[1]) as crew:
        frame = encode(errors.CollectiveMismatch("in pieces"))
        frame = pack_header(FrameType.FAILURE, len(frame)) + frame
        frame = signed(crew.raw[1], frame)
        for i in range(len(frame)):
            crew.raw[1].sock.sendall(frame[i : i + 1])
        assert crew.failures() == ["in pieces"]


def test_a_supervisor_that_breaks_ends_its_rank():
    with Crew(2, heartbeat=0.6) as crew:
        crew.ranks[1].call = Surprise(crew.ranks[1], lambda: 1 / 0)
        text = crew.failures()[1]
    reason = "ZeroDivisionError: division by zero"
    assert text == f"Supervising the workers failed: {reason}"


# Failures as they travel.


@pytest.mark.parametrize(
    "error",
    [
        errors.WorkerLost(3, "host3:1", 17, "it was killed"),
        errors.CollectiveMismatch("a"),
        errors.CollectiveTimeout("b ü"),
        errors.SharedMemoryFull("c"),
        errors.TransportClosed("d"),
        errors.CollectiveError("e"),
    ],
)
@pytest.mark.parametrize("suspected", [True, False])
def test_failures_arrive_as_they_were(error, suspected):
    other, suspicion = decode(encode(error, suspected=suspected))
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)
    assert suspicion is suspected


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"x\xff", b"[]", b"[" * 100_000),
        *(
            json.dumps({"error": error, "args": args}).encode()
            for error, args in [
                *(("WorkerLost", [1]), ("WorkerLost", ["x", 1, 2, 3])),
                *(("StartupError", ["x"]), ("annotations", ["x"]), (["x"], ["x"])),
                ("CollectiveError", []),
            ]
        ),
    ],
)
def test_anything_else_is_a_plain_failure(payload):
    error, suspected = decode(payload)
    assert type(error) is errors.CollectiveError
    assert suspected is False
    assert len(str(error)) <= 4000


# The collectives of all ranks, as the chief sends them to a rank that waits.


def runs(payload):
    return list(struct.iter_unpack("!IIQ", payload))


def test_ranks_in_the_same_collective_are_one_run():
    size = 1000
    places = CollectiveProgress(size)
    for rank in range(size):
        places.note(rank, 6 if rank == 700 else 7)
    sent = places.note(5, 7)
    assert runs(sent) == [(0, 700, 7), (700, 1, 6), (701, 299, 7)]
    worker = CollectiveProgress(size)
    worker.receive(sent)
    assert worker.behind(7) == [700]
    assert worker.behind(6) == []


def test_each_change_is_sent_once():
    places = CollectiveProgress(4)
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
    worker = CollectiveProgress(3)
    assert worker.behind(5) == []
    worker.receive(b"")
    assert worker.behind(5) == [0, 1, 2]
    # The chief itself knows them by their own heartbeats.
    chief = CollectiveProgress(3)
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
    chief, workers = (
        CollectiveProgress(size),
        [CollectiveProgress(size) for _ in range(size)],
    )
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
    places = CollectiveProgress(3)
    with pytest.raises(ProtocolError, match=rf"^A heartbeat {match}"):
        places.receive(payload)
    assert places.behind(5) in ([], [0, 1, 2])
