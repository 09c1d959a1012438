from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from kerasdist.transport.rendezvous import probe
from kerasdist.transport.rendezvous.probe import why_unreachable


@contextlib.contextmanager
def listening(host="127.0.0.1", backlog=8):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind((host, 0))
        server.listen(backlog)
        yield server, server.getsockname()[1]


@pytest.mark.parametrize(
    ("host", "names"), [("127.0.0.1", ["127.0.0.1", "localhost"]), ("::1", ["[::1]"])]
)
def test_somebody_listens(host, names):
    with listening(host) as (server, port):
        for name in names:
            assert why_unreachable(f"{name}:{port}", 50.0) is None
        # What it opened, it closed: the listener sees the end at once.
        server.settimeout(50.0)
        for _ in names:
            with contextlib.closing(server.accept()[0]) as connection:
                connection.settimeout(50.0)
                assert connection.recv(1) == b""


def test_nobody_listens():
    with socket.socket() as held:  # bound, so nobody else gets it, but not listening
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        assert why_unreachable(address, 5.0) == (
            "connection refused: nothing listens there"
        )


def test_a_name_that_doesnt_resolve():
    reason = why_unreachable("no-such-host.invalid:2222", 20.0)
    assert reason.startswith(("its host name doesn't resolve", "looking up its host"))


def test_no_answer_in_time():
    # A full backlog: the kernel drops what comes, as a firewall would.
    with contextlib.ExitStack() as stack:
        _, port = stack.enter_context(listening(backlog=0))
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        assert why_unreachable(f"127.0.0.1:{port}", 0.5) == "no answer within 0.5 s"


def test_the_deadline_holds_for_the_look_up(monkeypatch):
    # No name server that hangs can be had here without changing the machine.
    hang = threading.Event()

    def look_up(*_, **__):
        hang.wait(60.0)
        return []

    monkeypatch.setattr(probe.socket, "getaddrinfo", look_up)
    began = time.monotonic()
    assert why_unreachable("host:2222", 0.2) == (
        "looking up its host name took longer than 0.2 s"
    )
    assert time.monotonic() - began < 50.0
    hang.set()


def test_every_address_of_a_name_is_tried(monkeypatch):
    with listening() as (_, port), socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        refused = (socket.AF_INET, 0, 0, "", held.getsockname())
        answers = (socket.AF_INET, 0, 0, "", ("127.0.0.1", port))
        monkeypatch.setattr(
            probe.socket, "getaddrinfo", lambda *_, **__: [refused, answers]
        )
        assert why_unreachable("host:1", 5.0) is None


def test_an_address_that_is_none():
    assert why_unreachable("host", 5.0).startswith("its address has no port")
    assert why_unreachable("host:0", 5.0).startswith("its address has a port outside")
