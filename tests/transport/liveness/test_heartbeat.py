import math
import os
import queue
import socket

import pytest

from groups import connections, nothing_stays_open
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.framing import Call, FrameType
from kerasdist.transport.liveness.announcements import disconnect
from kerasdist.transport.liveness.heartbeat import Heartbeat


class Ear:
    def __init__(self, heartbeat=20.0, last=None, hear=None, **options):
        self.frames = queue.SimpleQueue()
        self.ends = queue.SimpleQueue()

        def end(key, reason):
            self.ends.put((key, reason))
            if last is not None:
                self.watch.post(key, *last)

        timeouts = Timeouts(heartbeat=heartbeat)
        self.watch = Heartbeat("test", timeouts, hear or self.hear, end, **options)

    def hear(self, key, frame):
        kind, _, payload = frame
        if kind is not FrameType.HEARTBEAT:
            self.frames.put((key, kind, payload))


@pytest.fixture
def pair():
    with nothing_stays_open():
        first, second = connections()
        yield first, second
        first.close()
        second.close()


def test_two_watches_hear_each_other(pair):
    ears = Ear(2.0), Ear(2.0)
    for ear, connection in zip(ears, pair, strict=True):
        ear.watch.add("other", connection)
    ears[0].watch.post("other", FrameType.EVENT, b"a" * 500_000)
    ears[1].watch.post("other", FrameType.GOODBYE, b"b")
    assert ears[1].frames.get(timeout=60) == ("other", FrameType.EVENT, b"a" * 500_000)
    assert ears[0].frames.get(timeout=60) == ("other", FrameType.GOODBYE, b"b")
    # They stay for longer than the heartbeat's time: nobody is lost.
    with pytest.raises(queue.Empty):
        ears[0].ends.get(timeout=2.5)
    ears[0].watch.close()
    key, reason = ears[1].ends.get(timeout=60)
    assert (key, "connection ended" in reason) == ("other", True)
    ears[1].watch.close()
    ears[1].watch.close()
    late, other = connections()
    other.close()
    ears[1].watch.add("late", late)
    assert late.fileno() == -1


def test_a_worker_that_joins_late_or_again_gets_heartbeats_like_the_others(pair):
    """As with a server of an asynchronous job: the same rank in a new process, too."""
    ear = Ear(1.0, beat=lambda: (b"state", Call(4)))
    ear.watch.add(1, pair[0])
    assert pair[1].read(Deadline(60)) == (FrameType.HEARTBEAT, b"state")
    for key in (2, 1):
        ours, theirs = connections()
        ear.watch.add(key, ours)
        with theirs:
            assert theirs.read(Deadline(60)) == (FrameType.HEARTBEAT, b"state")
            theirs.write(FrameType.EVENT, b"joined", Deadline(60))
            assert ear.frames.get(timeout=60) == (key, FrameType.EVENT, b"joined")
            if key == 2:
                # Between two heartbeats of others, whose connections stay.
                pair[1].write(FrameType.EVENT, b"still here", Deadline(60))
                frame = (1, FrameType.EVENT, b"still here")
                assert ear.frames.get(timeout=60) == frame
            else:
                with pytest.raises(EOFError):
                    while True:
                        pair[1].read(Deadline(60))
        # The end of the connection that was replaced isn't one of the worker.
        assert ear.ends.get(timeout=60)[0] == key
    assert ear.ends.empty()
    ear.watch.close()


def test_a_dropped_connection_of_which_a_child_has_a_copy_is_not_looked_at(pair):
    """The thread would wake up again and again for bytes that it doesn't read."""
    looks = []
    ear = Ear(tick=lambda now: looks.append(now) or math.inf)
    ear.watch.add(1, pair[0])
    with socket.socket(fileno=os.dup(pair[0].fileno())):
        ear.watch.post(1, FrameType.EVENT, b"last")
        ear.watch.drop(1)
        while pair[1].read(Deadline(60)) != (FrameType.EVENT, b"last"):
            pass
        pair[1].sock.sendall(b"x")
        pair[1].sock.shutdown(socket.SHUT_WR)
        before = len(looks)
        with pytest.raises(queue.Empty):
            ear.ends.get(timeout=0.5)
        assert len(looks) - before < 10
    ear.watch.close()


def test_a_frame_that_its_reader_breaks_on_ends_its_connection_only(pair):
    """The thread died of it, heartbeats stopped, and all were taken for lost."""

    def broken(key, frame):
        if frame[0] is not FrameType.HEARTBEAT:
            raise UnicodeEncodeError("utf-8", frame[2].decode(), 0, 1, "surrogates")

    others = connections()
    ear = Ear(5.0, hear=broken)
    ear.watch.add(1, pair[0])
    ear.watch.add(2, others[0])
    pair[1].write(FrameType.EVENT, b"x", Deadline(60))
    key, reason = ear.ends.get(timeout=60)
    assert (key, "UnicodeEncodeError" in reason) == (1, True)
    ear.watch.post(2, FrameType.GOODBYE, b"still here")
    kinds = {others[1].read(Deadline(60))[0] for _ in range(2)}
    assert kinds == {FrameType.HEARTBEAT, FrameType.GOODBYE}
    ear.watch.close()
    others[1].close()


def test_what_can_not_be_watched_any_more_has_ended(pair):
    added = []
    ear = Ear(tick=lambda now: math.inf / (not added))
    ear.watch.add(1, pair[0])
    added.append(1)
    ear.watch.wake()
    key, reason = ear.ends.get(timeout=60)
    assert (key, reason) == (1, "watching it failed (ZeroDivisionError)")
    ear.watch.close()


def test_it_ends_connections_to_one_address_alone():
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
        socket.create_connection(one.getsockname()) as to_one,
        socket.create_connection(two.getsockname()) as to_two,
    ):
        assert disconnect(f"127.0.0.1:{one.getsockname()[1]}") == 1
        assert to_one.recv(1) == b""
        to_two.setblocking(False)
        with pytest.raises(BlockingIOError):
            to_two.recv(1)
    assert disconnect("no-such-host.invalid:1") == 0
