"""The listener: workers get through, strangers get nowhere and hold nobody up."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import threading

import pytest

from groups import open_sockets
from kerasdist import errors
from kerasdist.transport import handshake, listener
from kerasdist.transport.control import write_frame
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import FrameType
from kerasdist.transport.listener import Listener
from waiting import wait_until
from workers import free_ports

pytestmark = [
    pytest.mark.timeout(60),
    # A refused stranger is a warning in the log, not in the test.
    pytest.mark.filterwarnings("error"),
]

SECRET = b"s"


@pytest.fixture
def listening():
    """A listener on a free port, closed after the test; nothing is left of it."""
    before = open_sockets()
    made = Listener.acquire(f"127.0.0.1:{free_ports(1)[0]}", SECRET)
    yield made
    made.release()
    assert open_sockets() == before
    left = [t.name for t in threading.enumerate() if t.name.startswith("kerasdist")]
    assert left == []


def dial(listening):
    host, _, port = listening.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def knock(sock, session="s", purpose="p", rank=1, **more):
    hello = {"session": session, "purpose": purpose, "rank": rank, **more}
    handshake.knock(sock, SECRET, hello, Deadline(10), "x:1")
    return sock


def take(listening, session="s", purpose="p", rank=1, seconds=10.0):
    stop = threading.Event()
    return listening.take(session, purpose, rank, Deadline(seconds), stop)


def talk(one, other):
    """Whether two sockets are the two ends of one connection."""
    one.sendall(b"ping")
    return other.recv(4) == b"ping"


def test_a_connection_is_handed_to_who_asks_for_it(listening):
    with (
        knock(dial(listening), rank=1) as one,
        knock(dial(listening), rank=2) as two,
        take(listening, rank=2) as second,
        take(listening, rank=1) as first,
    ):
        assert talk(one, first)
        assert talk(two, second)
    assert take(listening, seconds=0.05) is None


def test_the_unix_socket_is_served_too(listening):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(listening.unix_name)
        knock(sock)
        with take(listening) as end:
            assert talk(sock, end)


def test_the_newer_connection_of_a_rank_counts(listening):
    with knock(dial(listening)) as old:
        wait_until(lambda: listening._waiting, "the first")
        with knock(dial(listening)) as new:
            wait_until(lambda: len(*listening._waiting.values()) == 2, "the second")
            with take(listening) as end:
                assert talk(new, end)
            assert old.recv(1) == b""


def test_take_ends_when_it_is_told_to_stop(listening):
    stop = threading.Event()
    stop.set()
    assert listening.take("s", "p", 1, Deadline(30), stop) is None


def test_sessions_share_one_listener_and_the_last_one_closes_it(listening):
    same = Listener.acquire(listening.address, SECRET)
    assert same is listening
    same.release()
    with knock(dial(listening)), take(listening):
        pass


def test_another_secret_in_the_same_process_is_an_error(listening):
    with pytest.raises(errors.ClusterError, match=r"^The job secret has changed while"):
        Listener.acquire(listening.address, b"another")


def test_a_port_in_use_is_an_error_with_address_and_remedy():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        before = open_sockets()
        with pytest.raises(
            errors.AddressInUseError,
            match=rf"^This worker can't listen at its address 127\.0\.0\.1:{port}: "
            rf"Address already in use\. Received: '127\.0\.0\.1:{port}' as .*"
            rf"`ss -ltnp 'sport = :{port}'` shows who it is\) or choose ano",
        ):
            Listener.acquire(f"127.0.0.1:{port}", SECRET)
        assert open_sockets() == before


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid", "x" * 300])
def test_a_name_that_is_not_this_machines_stands_for_its_port(host):
    """As that of a Kubernetes service, or an address that is translated."""
    port = free_ports(1)[0]
    made = Listener.acquire(f"{host}:{port}", SECRET)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            knock(sock)
            take(made).close()
    finally:
        made.release()


@pytest.mark.parametrize("what", ["closed", "file", "other port", "not listening", "x"])
def test_a_descriptor_that_is_not_the_launchers_socket_is_left_alone(
    what, monkeypatch, tmp_path
):
    port = free_ports(1)[0]
    with contextlib.ExitStack() as stack:
        if what == "file":
            fd = stack.enter_context(open(tmp_path / "f", "w")).fileno()
        elif what == "other port":
            fd = stack.enter_context(socket.create_server(("127.0.0.1", 0))).fileno()
        elif what == "not listening":
            fd = stack.enter_context(socket.socket(socket.AF_UNIX)).fileno()
        else:
            fd = 987 if what == "closed" else "x"
        before = open_sockets()
        monkeypatch.setenv("KERASDIST_LISTEN_FD", str(fd))
        made = Listener.acquire(f"127.0.0.1:{port}", SECRET)
        with knock(dial(made)), take(made):
            pass
        made.release()
        assert open_sockets() == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_keeps_neither_the_port_nor_a_connection():
    address = f"127.0.0.1:{free_ports(1)[0]}"
    listening = Listener.acquire(address, SECRET)
    mine = knock(dial(listening))
    theirs = take(listening)
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        theirs.close()
        assert mine.recv(1) == b""
        mine.close()
        for _ in range(2):
            listening.release()
            listening = Listener.acquire(address, SECRET)
    finally:
        listening.release()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_the_launchers_socket_is_used_again_and_again(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("KERASDIST_LISTEN_FD", str(server.fileno()))
        for _ in range(3):
            made = Listener.acquire(f"127.0.0.1:{server.getsockname()[1]}", SECRET)
            with knock(dial(made)), take(made):
                pass
            made.release()


# Strangers.


def refused(listening, count=1):
    wait_until(lambda: len(listening.refusals()) >= count, "refusals")
    return listening.refusals()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n", r"b'GET '"),
        (bytes(100), r"first bytes b'\\x00"),
        (b"\x16\x03\x01" + bytes(60), r"ProtocolError: What arrived isn't a kerasdist"),
    ],
)
def test_strangers_are_sent_away_and_noted(listening, sent, reason):
    with dial(listening) as stranger:
        stranger.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    (text,) = refused(listening)
    assert re.match(rf"127\.0\.0\.1:\d+: .*{reason}", text)
    with knock(dial(listening)), take(listening):
        pass


def test_a_wrong_secret_is_noted(listening):
    with dial(listening) as sock, pytest.raises(errors.AuthenticationError):
        handshake.knock(sock, b"wrong", {}, Deadline(10), "x:1")
    (text,) = refused(listening)
    assert "AuthenticationError: The worker at 127.0.0.1:" in text


@pytest.mark.parametrize("hello", [{"session": "s"}, {"rank": "one"}, {}])
def test_an_incomplete_hello_is_noted(listening, hello):
    with dial(listening) as sock:
        handshake.knock(sock, SECRET, hello, Deadline(10), "x:1")
        (text,) = refused(listening)
    assert "ProtocolError: A hello is incomplete." in text


def test_a_look_whether_somebody_listens_is_not_noted(listening):
    for _ in range(5):
        dial(listening).close()
    with knock(dial(listening)), take(listening):
        pass
    assert listening.refusals() == []


def test_an_endless_stream_is_cut_off(listening):
    with dial(listening) as stranger, pytest.raises(ConnectionError):
        while True:
            stranger.sendall(bytes(1 << 16))
    with knock(dial(listening)), take(listening):
        pass


def test_half_open_and_slow_connections_hold_nobody_up(listening, monkeypatch):
    """More than may be in their handshake at once: the oldest make room."""
    monkeypatch.setattr(listener, "_MOST_HANDSHAKES", 8)
    with contextlib.ExitStack() as stack:
        for number in range(40):
            stranger = stack.enter_context(dial(listening))
            if number % 2:
                stranger.sendall(b"KDS")
            else:
                write_frame(stranger, FrameType.CHALLENGE, b"n" * 32, Deadline(5))
        with knock(dial(listening)) as sock, take(listening, seconds=8) as end:
            assert talk(sock, end)
        with listening._changed:
            assert len(listening._shaking) <= 8


def test_closing_does_not_wait_for_half_open_connections():
    made = Listener.acquire(f"127.0.0.1:{free_ports(1)[0]}", SECRET)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(dial(made)) for _ in range(5)]
        wait_until(lambda: len(made._threads) >= 5, "the listener's threads")
        made.release()
        for stranger in strangers:
            assert stranger.recv(1) == b""


def test_a_process_without_free_descriptors_accepts_later(listening):
    """`accept` fails then; the thread must live on, and the worker get through."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(dial(listening))
        knock(sock, rank=1)
        take(listening, rank=1).close()
        late = stack.enter_context(socket.socket())
        late.settimeout(10)
        try:
            used = max(int(name) for name in os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
            filler = []
            with contextlib.suppress(OSError):
                while True:
                    filler.append(os.dup(0))
            host, _, port = listening.address.rpartition(":")
            late.connect((host, int(port)))
            assert take(listening, rank=2, seconds=0.3) is None
        finally:
            for fd in filler:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        knock(late, rank=2)
        take(listening, rank=2).close()
