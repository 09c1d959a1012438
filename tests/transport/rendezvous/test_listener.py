"""The listener: workers get through, strangers get nowhere and hold nobody up."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import threading
import time

import pytest

from groups import open_sockets
from kerasdist import errors
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.log import background_log
from kerasdist.transport.rendezvous import listener, mailboxes, probe
from kerasdist.transport.rendezvous.dial import dial_tcp
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.wire import handshake
from kerasdist.transport.wire.framing import FrameType
from kerasdist.transport.wire.messages import read_frame, write_frame
from kerasdist.transport.wire.same_user import why_not_same_user
from waiting import wait_until
from workers import free_ports

pytestmark = [
    pytest.mark.timeout(60),
    # A refused stranger is a warning in the log, not in the test.
    pytest.mark.filterwarnings("error"),
]

SECRET = b"a secret of the tests"


@contextlib.contextmanager
def listener_at(address=None, secret=SECRET, **options):
    """A listener, by default on a free port, released after the block."""
    address = address or f"127.0.0.1:{free_ports(1)[0]}"
    made = Listener.acquire(address, secret, **options)
    try:
        yield made
    finally:
        made.release()


@pytest.fixture
def listening():
    """A listener on a free port, closed after the test; nothing is left of it."""
    before = open_sockets()
    with listener_at() as made:
        yield made
    assert open_sockets() == before

    def left():
        return [t for t in threading.enumerate() if t.name.startswith("kerasdist")]

    # The thread that writes lines has written the last one before it ends.
    wait_until(lambda: not left(), "the end of all threads")


def dial(listening):
    host, _, port = listening.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def authenticate_as_client(listening, sock, session="s", purpose="p", rank=1, **more):
    hello = {"session": session, "purpose": purpose, "rank": rank, **more}
    handshake.authenticate_as_client(
        sock, SECRET, hello, Deadline(10), listening.address
    )
    return sock


def take(listening, session="s", purpose="p", rank=1, seconds=10.0):
    stop = threading.Event()
    return listening.mailboxes.take(session, purpose, rank, Deadline(seconds), stop)


def handshakes():
    """The listener's threads that haven't decided on their connections yet."""
    return [t for t in threading.enumerate() if t.name == "kerasdist-handshake"]


def talk(one, other):
    """Whether two sockets are the two ends of one connection."""
    one.sendall(b"ping")
    return other.sock.recv(4) == b"ping"


def test_a_connection_is_handed_to_who_asks_for_it(listening):
    with (
        authenticate_as_client(listening, dial(listening), rank=1) as one,
        authenticate_as_client(listening, dial(listening), rank=2) as two,
        take(listening, rank=2) as second,
        take(listening, rank=1) as first,
    ):
        assert talk(one, first)
        assert talk(two, second)
    assert take(listening, seconds=0.05) is None


def test_the_unix_socket_is_served_too(listening):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(listening.unix_name)
        authenticate_as_client(listening, sock)
        with take(listening) as end:
            assert talk(sock, end)


def test_the_newer_connection_of_a_rank_counts(listening):
    with authenticate_as_client(listening, dial(listening)) as old:
        wait_until(lambda: not handshakes(), "the first")
        with authenticate_as_client(listening, dial(listening)) as new:
            wait_until(lambda: not handshakes(), "the second")
            with take(listening) as end:
                assert talk(new, end)
            assert old.recv(1) == b""


def test_take_ends_when_it_is_told_to_stop(listening):
    stop = threading.Event()
    stop.set()
    assert listening.mailboxes.take("s", "p", 1, Deadline(30), stop) is None


def test_sessions_share_one_listener_and_the_last_one_closes_it(listening):
    same = Listener.acquire(listening.address, SECRET)
    assert same is listening
    same.release()
    with authenticate_as_client(listening, dial(listening)), take(listening):
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
            rf"`ss -ltnp 'sport = :{port}'` shows it\) or choose ano",
        ):
            Listener.acquire(f"127.0.0.1:{port}", SECRET)
        assert open_sockets() == before


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid", "x" * 300])
def test_a_name_that_is_not_this_machines_stands_for_its_port(host):
    """As that of a Kubernetes service, or an address that is translated."""
    port = free_ports(1)[0]
    with (
        listener_at(f"{host}:{port}") as made,
        socket.create_connection(("127.0.0.1", port), timeout=10) as sock,
    ):
        authenticate_as_client(made, sock)
        take(made).close()


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
        with authenticate_as_client(made, dial(made)), take(made):
            pass
        made.release()
        assert open_sockets() == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_keeps_neither_the_port_nor_a_connection():
    address = f"127.0.0.1:{free_ports(1)[0]}"
    listening = Listener.acquire(address, SECRET)
    mine = authenticate_as_client(listening, dial(listening))
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
            with authenticate_as_client(made, dial(made)), take(made):
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
    ],
)
def test_strangers_are_sent_away_and_noted(listening, sent, reason):
    with dial(listening) as stranger:
        stranger.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    (text,) = refused(listening)
    assert re.match(rf"127\.0\.0\.1:\d+: .*{reason}", text)
    with authenticate_as_client(listening, dial(listening)), take(listening):
        pass


def test_a_side_with_tls_is_sent_a_refusal(listening):
    """It depends on no secret: the other side says that TLS isn't used here."""
    with dial(listening) as other:
        other.sendall(b"\x16\x03\x01" + bytes(60))
        assert read_frame(other, Deadline(10)) == (FrameType.REFUSAL, b"")
    assert re.match(
        r"127\.0\.0\.1:\d+: AuthenticationError: The process at \S+ uses TLS, and this",
        refused(listening)[0],
    )


def test_a_wrong_secret_is_noted(listening):
    with dial(listening) as sock, pytest.raises(errors.AuthenticationError):
        handshake.authenticate_as_client(
            sock, b"wrong", {}, Deadline(10), listening.address
        )
    (text,) = refused(listening)
    assert "AuthenticationError: The worker at 127.0.0.1:" in text


@pytest.mark.parametrize("hello", [{"session": "s"}, {"rank": "one"}, {}])
def test_an_incomplete_hello_is_noted(listening, hello):
    with dial(listening) as sock:
        handshake.authenticate_as_client(
            sock, SECRET, hello, Deadline(10), listening.address
        )
        (text,) = refused(listening)
    assert "ProtocolError: A hello is incomplete." in text


def test_a_look_whether_somebody_listens_is_not_noted(listening):
    for _ in range(5):
        dial(listening).close()
    with authenticate_as_client(listening, dial(listening)), take(listening):
        pass
    assert listening.refusals() == []


def test_an_endless_stream_is_cut_off(listening):
    with dial(listening) as stranger, pytest.raises(ConnectionError):
        while True:
            stranger.sendall(bytes(1 << 16))
    with authenticate_as_client(listening, dial(listening)), take(listening):
        pass


def test_half_open_and_slow_connections_hold_nobody_up(listening, monkeypatch):
    """More than may be in their handshake at once: the oldest make room."""
    monkeypatch.setattr(listener, "MOST_HANDSHAKES", 8)
    with contextlib.ExitStack() as stack:
        for number in range(40):
            stranger = stack.enter_context(dial(listening))
            if number % 2:
                stranger.sendall(b"KDS")
            else:
                write_frame(stranger, FrameType.CHALLENGE, b"n" * 32, Deadline(5))
        with (
            authenticate_as_client(listening, dial(listening)) as sock,
            take(listening, seconds=8) as end,
        ):
            assert talk(sock, end)
        wait_until(lambda: len(handshakes()) <= 8, "the end of the oldest")


def test_closing_does_not_wait_for_half_open_connections():
    made = Listener.acquire(f"127.0.0.1:{free_ports(1)[0]}", SECRET)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(dial(made)) for _ in range(5)]
        wait_until(lambda: len(handshakes()) >= 5, "the listener's threads")
        made.release()
        for stranger in strangers:
            assert stranger.recv(1) == b""


def test_a_process_without_free_descriptors_accepts_later(listening):
    """`accept` fails then; the thread must live on, and the worker get through."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(dial(listening))
        authenticate_as_client(listening, sock, rank=1)
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
        authenticate_as_client(listening, late, rank=2)
        take(listening, rank=2).close()


def test_a_high_descriptor_does_not_end_the_listener(listening):
    """`select` can't wait for descriptors above 1023; the thread died of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"a process may have only {hard} descriptors here")
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        filler = []
        stack.callback(lambda: [os.close(fd) for fd in filler])
        while not filler or filler[-1] < 1100:
            filler.append(os.dup(0))
        made = stack.enter_context(listener_at())
        late = stack.enter_context(socket.socket())
        late.settimeout(10)
        with contextlib.suppress(OSError):
            while True:
                filler.append(os.dup(0))
        host, _, port = made.address.rpartition(":")
        late.connect((host, int(port)))
        assert take(made, seconds=0.3) is None
        while filler:
            os.close(filler.pop())
        authenticate_as_client(made, late)
        take(made).close()


# Those who hold the secret, and are mistaken.


@pytest.mark.parametrize("rank", [float("inf"), 1.5, True, None, "1", 1 << 70, []])
def test_a_rank_that_is_none_is_refused(listening, rank):
    """Infinity is a number in JSON, and no integer: a thread ended with a traceback."""
    with dial(listening) as sock:
        authenticate_as_client(listening, sock, rank=rank)
        if rank == 1 << 70:
            take(listening, rank=rank).close()
        else:
            (text,) = refused(listening)
            assert "ProtocolError: A hello is incomplete." in text


def test_connections_that_nobody_asks_for_are_given_back(listening):
    """A mistaken retry loop: it filled the room of those who came later."""
    before = open_sockets()
    for rank in range(50):
        authenticate_as_client(
            listening, dial(listening), purpose="nobody's", rank=rank
        ).close()
    with authenticate_as_client(listening, dial(listening)), take(listening):
        wait_until(lambda: open_sockets() <= before + 3, "sockets that are closed", 10)


def test_who_waits_longer_than_a_start_may_take_is_sent_away(monkeypatch):
    monkeypatch.setattr(listener, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 2.0)
    with (
        listener_at(patience=0.1) as made,
        authenticate_as_client(made, dial(made)) as sock,
    ):
        sock.settimeout(30)
        assert sock.recv(1) == b""


def test_when_too_many_wait_the_next_one_is_told_so(listening, monkeypatch):
    monkeypatch.setattr(mailboxes, "MOST_WAITING", 2)
    with contextlib.ExitStack() as stack:
        for rank in range(3):
            stack.enter_context(
                authenticate_as_client(listening, dial(listening), rank=rank)
            )
        (text,) = refused(listening)
        assert "2 connections are waiting already" in text


def test_many_strangers_fill_no_log(caplog):
    """One client wrote 4 MB of log in half a minute."""
    made = Listener.acquire(f"127.0.0.1:{free_ports(1)[0]}", SECRET)
    for _ in range(200):
        with dial(made) as stranger:
            stranger.sendall(b"x" * 100)
            with contextlib.suppress(ConnectionResetError):
                stranger.recv(1)
    wait_until(lambda: not handshakes(), "the last one's refusal")
    made.release()
    background_log.flush(10)
    lines = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert len(lines) == 10
    assert lines[-1].endswith("(more such lines are only counted for 60 s)")
    assert caplog.records[-1].getMessage() == (
        "kerasdist: 190 more such lines were omitted"
    )


# Names and addresses.


@pytest.fixture
def names(monkeypatch):
    """What names lead to, as if a name server said so."""
    known = {}
    original = socket.getaddrinfo

    def look_up(host, *args, **kwargs):
        if host not in known:
            return original(host, *args, **kwargs)
        return [each for ip in known[host] for each in original(ip, *args, **kwargs)]

    monkeypatch.setattr(probe.socket, "getaddrinfo", look_up)
    return known


@pytest.mark.parametrize(
    ("ips", "reached"),
    [
        (["::1"], ["::1"]),
        (["::1", "127.0.0.1"], ["::1", "127.0.0.1"]),
        (["2001:db8::7", "127.0.0.1"], ["127.0.0.1"]),
        # None of this machine's: its port counts, for both families.
        (["2001:db8::7"], ["::1", "127.0.0.1"]),
        (["203.0.113.7"], ["::1", "127.0.0.1"]),
    ],
)
def test_a_host_is_reached_at_all_addresses_of_its_name(names, ips, reached):
    """A name with an IPv6 address only made it listen on IPv4, where nobody came."""
    names["worker-0"] = ips
    port = free_ports(1)[0]
    with listener_at(f"worker-0:{port}") as made:
        for ip in ("::1", "127.0.0.1", "127.0.0.2"):
            if ip in reached:
                with socket.create_connection((ip, port), timeout=10) as sock:
                    authenticate_as_client(made, sock)
                    take(made).close()
            elif ip == "127.0.0.2" and len(reached) == 2 and ips[0] != "::1":
                socket.create_connection((ip, port), timeout=10).close()
            else:
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((ip, port), timeout=10)


def test_a_name_is_dialed_at_all_its_addresses(names):
    names["worker-0"] = ["::1"]
    port = free_ports(1)[0]
    with listener_at(f"worker-0:{port}") as made:
        names["worker-0"] = ["127.0.0.1", "::1"]
        hello = {"session": "s", "purpose": "p", "rank": 1}
        with dial_tcp(f"worker-0:{port}", SECRET, hello, Deadline(10)):
            take(made).close()


def test_a_name_server_that_hangs_holds_nobody_up(names, monkeypatch):
    hang = threading.Event()
    monkeypatch.setattr(
        probe.socket, "getaddrinfo", lambda *_, **__: hang.wait(30) and []
    )
    started = time.monotonic()
    with pytest.raises(
        OSError, match=r"^looking up its host name took longer than 0\."
    ):
        dial_tcp("worker-0:1", SECRET, {}, Deadline(0.2))
    assert time.monotonic() - started < 20
    hang.set()


# Without a secret.


@contextlib.contextmanager
def another_user(work):
    """A process of another user that does something, and is ended then."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            work()
            signal.pause()
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
OTHER = "the other end is a process of user 65534, this one is of user 0"


@needs_root
@pytest.mark.parametrize("secret", [b"", SECRET])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_without_a_secret_other_users_are_refused(family, secret):
    """They reach loopback addresses, too, and see names of Unix sockets in /proc."""
    port = free_ports(1)[0]
    unix = family == socket.AF_UNIX

    def come():
        sock = socket.socket(family)
        sock.connect(made.unix_name if unix else ("127.0.0.1", port))
        sock.sendall(b"x" * 100)
        signal.pause()

    with listener_at(f"127.0.0.1:{port}", secret) as made, another_user(come):
        (text,) = refused(made)
    assert (OTHER in text) is not bool(secret)
    assert ("The received bytes aren't a kerasdist frame" in text) is bool(secret)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_without_a_secret_a_look_whether_somebody_listens_is_not_noted(
    family, monkeypatch
):
    """The kernel says of a socket that was closed that it is root's."""
    port = free_ports(1)[0]
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    unix = family == socket.AF_UNIX

    def come():
        sock = socket.socket(family)
        sock.connect(made.unix_name if unix else ("127.0.0.1", port))
        return sock

    with listener_at(f"127.0.0.1:{port}", b"") as made:
        for _ in range(20):
            come().close()
        wait_until(lambda: not handshakes(), "the looks to be over")
        assert made.refusals() == []
        with come():
            (text,) = refused(made)
        assert "this one is of user 12345" in text


def test_without_a_secret_a_listener_that_dies_is_dialed_again(monkeypatch):
    """It's no other user's, but nobody's: an end that is tried again."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def die():
            sock, _ = server.accept()
            handshake.receive(sock, b"", Deadline(10), "x", address)
            sock.close()

        thread = threading.Thread(target=die)
        thread.start()
        with pytest.raises(EOFError):
            dial_tcp(address, b"", {}, Deadline(10))
        thread.join(10)


@needs_root
def test_without_a_secret_another_users_listener_is_refused():
    """It has taken the chief's port first."""
    port = free_ports(1)[0]
    address = f"127.0.0.1:{port}"
    ready, told = os.pipe()

    def listen():
        with socket.create_server(("127.0.0.1", port)) as server:
            os.write(told, b"x")
            sock, _ = server.accept()
            handshake.receive(sock, b"", Deadline(10), "x", address)
            signal.pause()

    try:
        with another_user(listen):
            os.read(ready, 1)
            with pytest.raises(errors.AuthenticationError, match=OTHER) as caught:
                dial_tcp(address, b"", {}, Deadline(10))
    finally:
        os.close(ready)
        os.close(told)
    assert str(caught.value).startswith(
        f"The process at {address} can't be taken for one of this job: the other end"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_own_user_is_known_over_tcp_and_unix(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as one,
        server.accept()[0] as other,
    ):
        assert why_not_same_user(one) is None
        assert why_not_same_user(other) is None
    one, other = socket.socketpair()
    with one, other:
        assert why_not_same_user(one) is None
