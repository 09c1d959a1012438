import contextlib
import os
import resource
import signal
import socket
import threading

import pytest

from groups import SECRET, listener_at, nothing_stays_open, open_sockets
from kerasdist import errors
from kerasdist.transport import handshake, log
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import FrameType, write_frame
from kerasdist.transport.rendezvous import listener, waiting_notice
from kerasdist.transport.rendezvous.dial import dial_address
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.rendezvous.waiting_notice import why_unreachable
from waiting import wait_until
from workers import free_ports

# A refused stranger is a warning in the log, not in the test.
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def listening():
    with nothing_stays_open(), listener_at() as made:
        yield made


def dial(listening):
    host, _, port = listening.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def knock(listening, sock=None, **hello):
    """A connection, by default a new one, that has said and proved who it is."""
    sock = sock or dial(listening)
    hello = {"session": "s", "purpose": "p", "rank": 1} | hello
    handshake.authenticate_as_client(
        sock, SECRET, hello, Deadline(60), listening.address
    )
    return sock


def take(listening, session="s", purpose="p", rank=1, seconds=60.0):
    stop = threading.Event()
    return listening.pending.take(session, purpose, rank, Deadline(seconds), stop)


def check_works(listening):
    with knock(listening) as one, take(listening) as other:
        assert talk(one, other)


def handshakes():
    """The listener's threads that haven't decided on their connections yet."""
    return [t for t in threading.enumerate() if t.name == "kerasdist-handshake"]


def talk(one, other):
    """Whether two sockets are the two ends of one connection."""
    one.sendall(b"ping")
    return other.sock.recv(4) == b"ping"


def test_a_connection_is_handed_to_who_asks_for_it(listening):
    unix = socket.socket(socket.AF_UNIX)
    unix.connect(listening.unix_name)
    with (
        knock(listening, rank=1) as one,
        knock(listening, unix, rank=2) as two,
        take(listening, rank=2) as second,
        take(listening, rank=1) as first,
    ):
        assert talk(one, first)
        assert talk(two, second)
    assert take(listening, seconds=0.05) is None
    stop = threading.Event()
    stop.set()
    assert listening.pending.take("s", "p", 1, Deadline(30), stop) is None


def test_the_newer_connection_of_a_rank_counts(listening):
    with knock(listening) as old:
        wait_until(lambda: not handshakes(), "the first")
        with knock(listening) as new:
            wait_until(lambda: not handshakes(), "the second")
            with take(listening) as end:
                assert talk(new, end)
            assert old.recv(1) == b""


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


def test_a_descriptor_that_isnt_the_launchers_is_left_alone(monkeypatch, tmp_path):
    with (
        open(tmp_path / "f", "w") as file,
        socket.create_server(("127.0.0.1", 0)) as other_port,
        socket.socket(socket.AF_UNIX) as not_listening,
        nothing_stays_open(),
    ):
        for fd in (987, "x", *(e.fileno() for e in (file, other_port, not_listening))):
            monkeypatch.setenv("KERASDIST_LISTEN_FD", str(fd))
            with listener_at() as made:
                check_works(made)


def refused(listening, count=1):
    wait_until(lambda: len(listening.refusals()) >= count, "refusals")
    return listening.refusals()


@pytest.mark.parametrize(
    "hello",
    [
        *({"session": None}, {"purpose": 3}),
        # Infinity is a number in JSON, and no integer: a thread ended with a traceback.
        *({"rank": value} for value in (float("inf"), 1.5, True, None, "1", [])),
    ],
)
def test_an_incomplete_hello_is_noted(listening, hello):
    knock(listening, **hello).close()
    (text,) = refused(listening)
    assert "ProtocolError: A hello is incomplete." in text


def test_half_open_and_slow_connections_hold_nobody_up(monkeypatch):
    """More than may be in their handshake at once: the oldest make room."""
    monkeypatch.setattr(listener, "MOST_HANDSHAKES", 8)
    with contextlib.ExitStack() as stack:
        with listener_at() as made:
            strangers = [stack.enter_context(dial(made)) for _ in range(40)]
            for number, stranger in enumerate(strangers):
                with contextlib.suppress(ConnectionError):
                    if number % 2:
                        stranger.sendall(b"KDS")
                    else:
                        write_frame(
                            stranger, FrameType.CHALLENGE, b"n" * 32, Deadline(60)
                        )
            check_works(made)
            wait_until(lambda: len(handshakes()) <= 8, "the end of the oldest")
            # Closing doesn't wait for the others.
            assert handshakes()
        with contextlib.suppress(ConnectionError):
            while strangers[-1].recv(100):
                pass


def test_a_process_without_free_descriptors_accepts_later():
    """`accept` fails then; the thread must live on, and the worker get through.

    And `select` can't wait for descriptors above 1023; the thread died of it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"a process may have only {hard} descriptors here")
    filler = []

    def fill(until=1 << 20):
        with contextlib.suppress(OSError):
            while not filler or filler[-1] < until:
                filler.append(os.dup(0))

    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        stack.callback(lambda: [os.close(fd) for fd in filler])
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
        fill(until=1100)
        made = stack.enter_context(listener_at())
        check_works(made)
        late = stack.enter_context(socket.socket())
        late.settimeout(60)
        used = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
        fill()
        host, _, port = made.address.rpartition(":")
        late.connect((host, int(port)))
        assert take(made, rank=2, seconds=0.3) is None
        while filler:
            os.close(filler.pop())
        knock(made, late, rank=2)
        take(made, rank=2).close()


def test_connections_that_nobody_asks_for_are_given_back(monkeypatch):
    """A mistaken retry loop: it filled the room of those who came later."""
    monkeypatch.setattr(listener, "LOOK_SECONDS", 0.05)
    with listener_at() as made:
        before = open_sockets()
        for rank in range(50):
            knock(made, purpose="nobody's", rank=rank).close()
        with knock(made), take(made):
            wait_until(lambda: open_sockets() <= before + 3, "sockets that are closed")


def test_who_waits_longer_than_a_start_may_take_is_sent_away(monkeypatch):
    monkeypatch.setattr(listener, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 1.0)
    with listener_at(patience=0.1) as made, knock(made) as sock:
        sock.settimeout(60)
        assert sock.recv(1) == b""


def test_when_too_many_wait_the_next_one_is_told_so(listening, monkeypatch):
    monkeypatch.setattr(listener, "MOST_WAITING", 2)
    with contextlib.ExitStack() as stack:
        for rank in range(3):
            stack.enter_context(knock(listening, rank=rank))
        (text,) = refused(listening)
        assert "2 connections are waiting already" in text


def test_many_strangers_fill_no_log(caplog):
    """One client wrote 4 MB of log in half a minute."""
    with listener_at() as made:
        for _ in range(50):
            with dial(made) as stranger:
                stranger.sendall(b"x" * 100)
                with contextlib.suppress(ConnectionResetError):
                    stranger.recv(1)
        wait_until(lambda: not handshakes(), "the last one's refusal")
    log.flush(60)
    lines = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert len(lines) == 10
    assert lines[-1].endswith("(more such lines are only counted for 60 s)")
    assert "40 more such lines were omitted" in caplog.records[-1].getMessage()


@pytest.fixture
def names(monkeypatch):
    """What names lead to, as if a name server said so."""
    known = {}
    original = socket.getaddrinfo

    def look_up(host, *args, **kwargs):
        if host not in known:
            return original(host, *args, **kwargs)
        return [each for ip in known[host] for each in original(ip, *args, **kwargs)]

    monkeypatch.setattr(waiting_notice.socket, "getaddrinfo", look_up)
    return known


@pytest.mark.parametrize(
    ("ips", "reached"),
    [
        (["::1", "127.0.0.1"], ["::1", "127.0.0.1"]),
        (["2001:db8::7", "127.0.0.1"], ["127.0.0.1"]),
        # None of this machine's: its port counts, for both families. As that of a
        # Kubernetes service, or an address that is translated.
        (["2001:db8::7"], ["::1", "127.0.0.1", "127.0.0.2"]),
        (None, ["::1", "127.0.0.1", "127.0.0.2"]),
    ],
)
def test_a_host_is_reached_at_all_addresses_of_its_name(names, ips, reached):
    """A name with an IPv6 address only made it listen on IPv4, where nobody came."""
    host = "worker-0" if ips else "x" * 300
    if ips:
        names[host] = ips
    port = free_ports(1)[0]
    with listener_at(f"{host}:{port}") as made:
        for ip in ("::1", "127.0.0.1", "127.0.0.2"):
            if ip in reached:
                sock = socket.create_connection((ip, port), timeout=60)
                with knock(made, sock), take(made):
                    pass
            else:
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((ip, port), timeout=60)


def test_a_name_is_dialed_at_all_its_addresses(names):
    names["worker-0"] = ["::1"]
    port = free_ports(1)[0]
    with listener_at(f"worker-0:{port}") as made:
        names["worker-0"] = ["127.0.0.1", "::1"]
        hello = {"session": "s", "purpose": "p", "rank": 1}
        with dial_address(f"worker-0:{port}", SECRET, hello, Deadline(60)):
            take(made).close()


@contextlib.contextmanager
def another_user(work):
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


def come_to(made, family):
    sock = socket.socket(family)
    if family == socket.AF_UNIX:
        sock.connect(made.unix_name)
    else:
        sock.connect(("127.0.0.1", int(made.address.rpartition(":")[2])))
    return sock


@needs_root
@pytest.mark.parametrize("secret", [b"", SECRET])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_without_a_secret_other_users_are_refused(family, secret):
    """They reach loopback addresses, too, and see names of Unix sockets in /proc."""

    def come():
        sock = come_to(made, family)
        sock.sendall(b"x" * 100)
        signal.pause()

    with listener_at(secret=secret) as made, another_user(come):
        (text,) = refused(made)
    assert (OTHER in text) is not bool(secret)
    assert ("The received bytes aren't a kerasdist frame" in text) is bool(secret)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_without_a_secret_a_look_who_listens_is_not_noted(family, monkeypatch):
    """The kernel says of a socket that was closed that it is root's."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with listener_at(secret=b"") as made:
        for _ in range(20):
            come_to(made, family).close()
        wait_until(lambda: not handshakes(), "the looks to be over")
        assert made.refusals() == []
        with come_to(made, family):
            (text,) = refused(made)
        assert "this one is of user 12345" in text


@needs_root
def test_without_a_secret_another_users_listener_is_refused():
    """It has taken the chief's port first."""
    port = free_ports(1)[0]
    address = f"127.0.0.1:{port}"

    def listen():
        with socket.create_server(("127.0.0.1", port)) as server:
            while True:
                sock, _ = server.accept()
                with contextlib.suppress(EOFError):
                    handshake.receive(sock, b"", Deadline(60), "x", address)

    with another_user(listen):
        wait_until(lambda: why_unreachable(address, 5.0) is None, "the other one")
        with pytest.raises(errors.AuthenticationError, match=OTHER) as caught:
            dial_address(address, b"", {}, Deadline(60))
    assert str(caught.value).startswith(
        f"The process at {address} can't be taken for one of this job: the other end"
    )
