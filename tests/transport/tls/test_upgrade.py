import contextlib
import datetime
import socket
import socketserver
import ssl
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import groups
from certificates import Authority
from groups import addresses_of, cluster_on, open_sockets, outcomes
from kerasdist import errors
from kerasdist.cluster.address import split_address
from kerasdist.collectives import connect
from kerasdist.transport import tls
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.handshake import authenticate_as_client
from kerasdist.transport.rendezvous.dial import dial_address, retry
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.tls import Credentials, accept_tls, connect_tls
from waiting import wait_until

SECRET = b"the secret of the tests"
HELLO = {"session": "s", "purpose": "p", "rank": 1}
DAY = datetime.timedelta(days=1)


@pytest.fixture
def authority(tmp_path):
    return Authority(folder=tmp_path)


@pytest.fixture
def use(monkeypatch):
    """Sets KERASDIST_TLS; None removes it."""

    def change(text):
        if text is None:
            monkeypatch.delenv("KERASDIST_TLS", raising=False)
        else:
            monkeypatch.setenv("KERASDIST_TLS", text)

    return change


@contextlib.contextmanager
def listening():
    address = addresses_of(1)[0]
    with groups.nothing_stays_open(), groups.listener_at(address, SECRET) as listener:
        yield listener


def dial(address, seconds=20.0):
    """As all tasks do: until it works, or can't any more."""
    stop = threading.Event()
    deadline = Deadline(seconds)
    return retry(
        lambda: dial_address(address, SECRET, HELLO, deadline),
        deadline,
        1,
        address,
        stop,
    )


class Between(socketserver.ThreadingTCPServer):
    """Forwards connections to another address, and keeps all bytes.

    With credentials it ends TLS on both sides.
    """

    def __init__(self, target, credentials=None):
        self.seen = bytearray()
        super().__init__(("127.0.0.2", target[1]), None)
        self._target, self._credentials = target, credentials
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def finish_request(self, near, _):
        far = socket.create_connection(self._target)
        if self._credentials:
            near = tls.wrap(near, self._credentials, server=True)
            far = tls.wrap(far, self._credentials, server=False)
            accept_tls(near, Deadline(20), "near")
            connect_tls(far, Deadline(20), "far")
        with near, far:
            ends = [(near, far), (far, near)]
            outcomes(2, lambda i: self._forward(*ends[i]))

    def _forward(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self):
        self.shutdown()
        self._thread.join()
        self.server_close()  # waits for all connections' threads


@pytest.mark.parametrize("shared", [False, True])
def test_nobody_stands_between_two_tasks_with_a_certificate_alone(
    authority, use, shared
):
    """He passes on all bytes, also with the tasks' own certificate and key."""
    own = authority.issue("task")
    stranger = own if shared else authority.issue("stranger")
    use(own)
    with listening() as listener:
        host, port = split_address(listener.address)
        between = Between((host, port), Credentials.read({"KERASDIST_TLS": stranger}))
        ours = Credentials.read({"KERASDIST_TLS": own})
        with (
            contextlib.closing(between),
            socket.create_connection(between.server_address) as plain,
            tls.wrap(plain, ours, server=False) as sock,
        ):
            connect_tls(sock, Deadline(20), listener.address)
            with pytest.raises(errors.AuthenticationError, match="job secret"):
                authenticate_as_client(
                    *(sock, SECRET, HELLO, Deadline(20), listener.address),
                    binding=tls.binding_of(sock),
                )


def ours(ca):
    return ca.issue()


def expired(ca):
    return ca.issue("two", valid=-DAY)


def of_another_ca(ca):
    return Authority(folder=ca.folder, name="other").issue(ca=ca.path)


def without(ca):
    return None


REFUSED = "has refused this task's certificate: it"
TLS_HERE = "doesn't use TLS, and this one does. Set KERASDIST_TLS on all"
TLS_THERE = "uses TLS, and this one doesn't. Received: KERASDIST_TLS isn't set here"


@pytest.mark.parametrize(
    ("theirs", "mine", "said", "logged"),
    [
        (of_another_ca, ours, "isn't signed by the job's CA", f"{REFUSED} isn't sign"),
        (ours, of_another_ca, f"{REFUSED} isn't sign", "isn't signed by the job's CA"),
        (ours, expired, f"{REFUSED} has expired", "has expired"),
        (ours, without, TLS_THERE, TLS_HERE),
        (without, ours, TLS_HERE, TLS_THERE),
    ],
)
def test_what_does_not_fit_is_refused_and_both_know_why(
    authority, use, theirs, mine, said, logged
):
    use(theirs(authority))
    with listening() as listener:
        use(mine(authority))
        began = time.monotonic()
        with pytest.raises(errors.AuthenticationError) as caught:
            dial(listener.address, seconds=50.0)
        # The reason is final: no second attempt, far below the time to start.
        assert time.monotonic() - began < 20
        assert f" process at {listener.address} " in str(caught.value)
        assert said in str(caught.value)
        wait_until(listener.refusals, "the listener's reason")
        (reason,) = listener.refusals()
        assert reason.startswith("127.0.0.1:")
        assert "AuthenticationError: The " in reason
        assert logged in reason


def test_who_has_no_certificate_is_refused(authority, use):
    use(authority.issue())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority.path)
    with (
        listening() as listener,
        socket.create_connection(split_address(listener.address)) as sock,
        pytest.raises(ssl.SSLError, match=r"ALERT"),
        context.wrap_socket(sock) as wrapped,
    ):
        wrapped.recv(1)
    (reason,) = listener.refusals()
    assert " has no certificate. All tasks' certificates in KERASDIST" in reason


def test_a_renewed_certificate_is_used_by_the_next_connection(authority, use):
    use(authority.issue("one", valid=DAY / 1000))
    with listening() as listener:
        authority.issue("one", valid=-DAY)
        with pytest.raises(errors.AuthenticationError, match=r"has expired"):
            dial(listener.address)
        authority.issue("one")
        with dial(listener.address) as mine:
            assert mine.sock.version() == "TLSv1.3"


def test_other_certificates_in_the_same_process_are_an_error(authority, use):
    use(authority.issue("one"))
    with listening() as listener:
        use(None)
        with pytest.raises(errors.ClusterError, match=r"^KERASDIST_TLS has changed wh"):
            Listener.acquire(listener.address, SECRET)


@pytest.mark.parametrize("encrypted", [False, True])
def test_who_records_the_connection_sees_nothing(
    authority, use, monkeypatch, encrypted
):
    use(authority.issue() if encrypted else None)
    secret = "a secret that nobody may see"
    monkeypatch.setenv("KERASDIST_SECRET", secret)
    pattern = np.frombuffer(b"a pattern that is seen at once; " * 1000, np.float32)
    before = open_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        # Rank 0 listens where its launcher does, and is known by another address.
        monkeypatch.setenv("KERASDIST_LISTEN_FD", str(server.fileno()))
        port = server.getsockname()[1]
        recorder = Between(("127.0.0.1", port))
        addresses = [f"127.0.0.2:{port}", addresses_of(1)[0]]
        times = Timeouts(startup=60, collective=60, heartbeat=60)

        def work(rank):
            job = connect(
                cluster_on(addresses, rank),
                transport="tcp",
                timeouts=times,
                host="ab"[rank],
            )
            try:
                job.communicator.broadcast([pattern if rank else pattern * 0], 1)
                (found,) = job.communicator.all_reduce([pattern * rank])
                return found.tobytes() == pattern.tobytes()
            finally:
                job.close()

        try:
            assert outcomes(2, work) == [True, True]
        finally:
            recorder.close()
    seen = bytes(recorder.seen)
    assert len(seen) > pattern.nbytes
    assert secret.encode() not in seen
    # Frames, their JSON, and data: plain without TLS.
    for plain in (b"KDST", b'"address"', b"that is seen at once"):
        assert (plain in seen) is not encrypted, plain
    assert open_sockets() == before


def test_three_readable_files_are_needed(tmp_path):
    for text in ("a,b", "a,,c", "a,b,c,d"):
        assert tls.tls_fault({"KERASDIST_TLS": text}).startswith(
            "KERASDIST_TLS can't be used: it doesn't have three paths. Received: "
            f"{text!r}."
        )
    text = tls.tls_fault({"KERASDIST_TLS": f"{tmp_path}/a,{tmp_path},{tmp_path}/c"})
    assert f"certificate '{tmp_path}/a' can't be read (No such file" in text
    assert f"key '{tmp_path}' can't be read (Is a directory)" in text


def of_another_key(authority):
    one, two = authority.issue("one").split(","), authority.issue("two").split(",")
    return f"{one[0]},{two[1]},{one[2]}"


def with_garbage(place):
    def make(authority):
        paths = authority.issue().split(",")
        Path(paths[place]).write_bytes(b"-----BEGIN\x00 nothing")
        return ",".join(paths)

    return make


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (of_another_key, "key '.*two.key' doesn't belong to the certificate '.*one"),
        (expired, "the certificate '.*' has expired"),
        (lambda ca: ca.issue(begins=DAY / 2), "isn't valid yet"),
        (lambda ca: ca.issue(password=b"x"), "the key '.*' is encrypted with a passw"),
        (lambda ca: ca.server_only(), "isn't for this purpose: its extended key us"),
        (of_another_ca, "isn't signed by the job's CA"),
        (with_garbage(0), "the certificate '.*' isn't a certificate in PEM format"),
        (with_garbage(1), "the key '.*' isn't a private key in PEM format"),
        (with_garbage(2), "the CA '.*' isn't a certificate in PEM format"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_acquired(
    authority, monkeypatch, make, expected
):
    text = make(authority)
    monkeypatch.setenv("KERASDIST_TLS", text)
    with (
        groups.nothing_stays_open(),
        pytest.raises(errors.ClusterError, match=expected) as caught,
    ):
        groups.join(addresses_of(2), 0)
    assert str(caught.value).startswith("KERASDIST_TLS can't be used: the ")
    assert f"Received: {text!r}. Expected " in str(caught.value)
