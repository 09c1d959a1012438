"""A TLS socket behaves as a plain one, for one thread and for several."""

from __future__ import annotations

import os
import queue
import select
import socket
import ssl
import threading

import pytest

from groups import connections, in_threads
from kerasdist.transport import Timeouts
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import FrameType, pack_header
from kerasdist.transport.liveness.heartbeat import Heartbeat
from kerasdist.transport.tls import holds_bytes
from pace import bound
from tls_pairs import tcp_pair, tls_pair
from waiting import wait_until


@pytest.fixture
def pair():
    ends = tls_pair()
    yield ends
    for end in ends:
        end.close()


def test_what_is_not_there_blocks_as_on_a_plain_socket(pair):
    one, _ = pair
    one.setblocking(False)
    for call in (
        lambda: one.recv(1),
        lambda: one.recv(1, socket.MSG_PEEK),
        lambda: one.recv_into(bytearray(1)),
        lambda: one.recvmsg_into([bytearray(), bytearray(1)]),
    ):
        with pytest.raises(BlockingIOError):
            call()
    one.settimeout(0.01)
    with pytest.raises(TimeoutError):
        one.recv(1)
    assert one.gettimeout() == 0.01


def test_a_look_takes_nothing(pair):
    one, other = pair
    one.sendall(b"abcdef")
    assert other.recv(1, socket.MSG_PEEK) == b"a"
    assert other.recv(1, socket.MSG_PEEK) == b"a"
    room = bytearray(2)
    assert other.recv_into(room) == 1
    assert other.recv(2) == b"bc"
    # Nothing that `poll` could see is left, but three bytes.
    poll = select.poll()
    poll.register(other, select.POLLIN)
    assert not poll.poll(0)
    assert holds_bytes(other)
    assert other.recv(10) == b"def"
    assert not holds_bytes(other)
    one.close()
    assert other.recv(1, socket.MSG_PEEK) == b""


def test_two_threads_read_while_two_write(pair):
    """Before Python 3.13 nothing but our lock keeps them apart."""
    data = os.urandom(1 << 23)

    def work(index):
        end = pair[index // 2]
        if index % 2:
            end.sendall(data)
            return None
        received = bytearray(len(data))
        view = memoryview(received)
        while view:
            view = view[end.recv_into(view) :]
        return received == data

    assert in_threads(4, work) == [True, None, True, None]


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


def test_changed_bytes_are_an_error():
    """Somebody on the path puts a record between the others."""
    one, other = tcp_pair()
    with socket.socket(fileno=os.dup(one.fileno())) as path:
        one, other = tls_pair((one, other))
        with one, other:
            one.sendall(b"right")
            assert other.recv(10) == b"right"
            path.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
            with pytest.raises(ssl.SSLError, match=r"BAD_RECORD_MAC"):
                other.recv(10)


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
