import os
import queue
import socket
import threading

import pytest

from groups import connections
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.framing import FrameType, pack_header
from kerasdist.transport.liveness.heartbeat import Heartbeat
from pace import bound
from tls_pairs import tls_pair
from waiting import wait_until


@pytest.fixture
def pair():
    ends = tls_pair()
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("end", ["shutdown", "close"])
def test_another_thread_ends_a_wait_and_no_plain_byte_is_returned(pair, end):
    one, other = pair
    got = []

    def read():
        try:
            while data := one.recv(1 << 14):
                got.append(data)
        except OSError:
            pass

    thread = threading.Thread(target=read)
    thread.start()
    other.sendall(bytes(1 << 20))
    wait_until(lambda: sum(map(len, got)) == 1 << 20, "all bytes")
    one.shutdown(socket.SHUT_RDWR)
    if end == "close":
        one.close()
    thread.join(bound(60))
    assert not thread.is_alive()
    assert set(b"".join(got)) == {0}
    with pytest.raises(OSError, match=r"."):
        one.sendall(b"x")


def test_a_frame_behind_another_in_one_record_is_seen_at_once(pair):
    """The kernel has no byte left that would wake the thread of heartbeats."""
    one, other = connections(pair)
    frames = [pack_header(FrameType.NOTICE, 1) + text for text in (b"1", b"2")]
    one.sock.sendall(b"".join(frame + one.auth.sign(frame) for frame in frames))
    assert other.read(Deadline(60)) == (FrameType.NOTICE, b"1")
    seen = queue.SimpleQueue()
    heartbeat = Heartbeat(
        "x", Timeouts(heartbeat=3600), lambda *what: seen.put(what), lambda *why: None
    )
    try:
        heartbeat.add(1, other)
        key, (kind, _, payload) = seen.get(timeout=60)
        assert (key, kind, payload) == (1, FrameType.NOTICE, b"2")
    finally:
        heartbeat.close()


def test_a_forked_child_has_no_copy(pair):
    one, other = pair
    # Held as if another thread were writing at the time of the fork.
    reading = threading.Thread(target=one.recv, args=(1,))
    reading.start()
    child = os.fork()
    if not child:
        os._exit(0 if one.fileno() == other.fileno() == -1 else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    other.sendall(b"x")
    reading.join(bound(60))
