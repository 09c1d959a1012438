import contextlib
import socket
import threading
import time

from kerasdist.transport.rendezvous import waiting_notice
from kerasdist.transport.rendezvous.bind import report_unprotected
from kerasdist.transport.rendezvous.waiting_notice import why_unreachable
from pace import bound


@contextlib.contextmanager
def listening(backlog=8):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(backlog)
        yield server.getsockname()[1]


def test_no_answer_in_time():
    # A full backlog: the kernel drops what comes, as a firewall would.
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(listening(backlog=0))
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        assert why_unreachable(f"127.0.0.1:{port}", 0.5) == "no answer within 0.5 s"


def test_the_deadline_holds_for_the_look_up(monkeypatch):
    # No name server that hangs can be had here without changing the machine.
    hang = threading.Event()

    def look_up(*_, **__):
        hang.wait(bound(60.0))
        return []

    monkeypatch.setattr(waiting_notice.socket, "getaddrinfo", look_up)
    began = time.monotonic()
    assert why_unreachable("host:2222", 0.2) == (
        "looking up its host name took longer than 0.2 s"
    )
    assert time.monotonic() - began < 50.0
    hang.set()


def test_every_address_of_a_name_is_tried(monkeypatch):
    with listening() as port, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        refused = (socket.AF_INET, 0, 0, "", held.getsockname())
        answers = (socket.AF_INET, 0, 0, "", ("127.0.0.1", port))
        monkeypatch.setattr(
            waiting_notice.socket, "getaddrinfo", lambda *_, **__: [refused, answers]
        )
        assert why_unreachable("host:1", 5.0) is None


# Servers that no secret protects: by an explicit word only, and at one address.


def test_what_does_not_protect_them_is_said():
    text = report_unprotected("10.0.0.1:5", True, {"KERASDIST_TLS": "a,b,c"})
    assert text == (
        "TensorFlow's server at 10.0.0.1:5 accepts connections to this address alone. "
        "Neither the job's secret nor TLS protects it, and its data aren't encrypted, "
        "although KERASDIST_TLS is set: only trusted users may reach its port."
    )
    text = report_unprotected("10.0.0.1:5", False, {})
    assert " to all addresses of this machine. " in text
