import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closing import Closing
from groups import connections
from kerasdist import errors
from kerasdist.transport.base import Peer
from kerasdist.transport.deadline import Timeouts
from kerasdist.transport.framing import Call, FrameType, pack_header
from kerasdist.transport.liveness.failure_detector import (
    CollectiveProgress,
    FailureDetector,
)
from kerasdist.transport.liveness.failure_protocol import encode
from waiting import wait_until


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


@pytest.mark.parametrize("size", [3, 70])  # so many are read together
def test_the_others_have_been_told_before_a_handler_may_end_the_chief(size):
    """A chief whose script calls `os._exit` at once is not to blame."""
    told = []

    def react(error):
        raw.sock.setblocking(False)
        told.append(raw.sock.recv(1 << 16))

    with Crew(size, silent=(2,), react=react) as crew:
        raw = crew.raw[2]
        crew.ranks[1].report(errors.CollectiveError("the cause"))
        crew.failures()
        wait_until(lambda: told, "the chief's handler")
    assert b"the cause" in told[0]


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
    monkeypatch.setattr(f"{FailureDetector.__module__}.DECISION_SECONDS", decision)
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


def signed(connection, frame):
    return frame + connection.auth.sign(frame)


def frame_of(kind, payload=b""):
    return pack_header(kind, len(payload)) + payload


@pytest.mark.parametrize(
    "attack", ["injected", "changed", "repeated", "left out", "sent back", "another's"]
)
def test_frames_that_somebody_on_the_path_makes_are_no_ones_words(attack):
    """They can end the connection, as anybody on the path can."""
    lie = frame_of(FrameType.FAILURE, encode(errors.CollectiveMismatch("a lie")))
    beat = frame_of(FrameType.HEARTBEAT)
    with Crew(3, silent=[1, 2]) as crew:
        true = crew.raw[1]
        data = {
            "injected": lambda: lie + bytes(16),
            "changed": lambda: signed(true, lie).replace(b"a lie", b"A LIE"),
            "repeated": lambda: signed(true, beat) * 2,
            "left out": lambda: signed(true, beat) and signed(true, lie),
            # What the chief itself has sent, in its own direction.
            "sent back": lambda: true.sock.recv(1 << 16),
            "another's": lambda: signed(crew.raw[2], lie),
        }[attack]()
        true.sock.sendall(data)
        (text,) = set(crew.failures())
    assert text.startswith("Rank 1 (host1:1) was lost at step 0: its connection ended")
    assert "changed, repeated, left out or injected on the network" in text


def test_a_supervisor_that_breaks_ends_its_rank():
    with Crew(2, heartbeat=0.6) as crew:
        crew.ranks[1].call = Surprise(crew.ranks[1], lambda: 1 / 0)
        text = crew.failures()[1]
    reason = "ZeroDivisionError: division by zero"
    assert text == f"Supervising the workers failed: {reason}"


# The collectives of all ranks, as the chief sends them to a rank that waits.


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
