import contextlib
import logging
import queue
import socket
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from certificates import Authority
from groups import connections, in_threads, listener_at, nothing_stays_open
from kerasdist import errors
from kerasdist.parameter_server.membership import Event, Goodbye
from kerasdist.transport import framing, handshake, log
from kerasdist.transport.base import Peer
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.framing import HEADER_BYTES, FrameType, pack_header
from kerasdist.transport.liveness.failure_detector import FailureDetector
from kerasdist.transport.liveness.failure_protocol import decode
from kerasdist.transport.liveness.heartbeat import Heartbeat
from kerasdist.transport.rendezvous.dial import dial_address
from waiting import wait_until
from workers import free_ports

SECRET = b"the secret of the tests"
# What JSON can say and a careless reader stumbles over.
ODD = [
    *("null", "true", "-1", "0.5", "1e999", "-1e999", "NaN", "Infinity", "1" * 30),
    *('"\\ud800"', '""', '"x"', "[]", "[[1]]", "{}", '{"rank": 1}', "[" * 2000),
]
NAMES = ["rank", "reason", "failed", "cause", "error", "args", "kind", "clock"]
NAMES += ["address", "session", "purpose", "hello", "arrays", "shared", "suspected"]

# JSON of the right shape with odd values, or bytes of no shape at all.
odd = st.sampled_from(ODD)
payloads = st.one_of(
    st.dictionaries(st.sampled_from(NAMES), odd, max_size=4).map(
        lambda items: ", ".join(f'"{name}": {text}' for name, text in items.items())
    ),
    st.tuples(odd, odd, odd, odd).map(
        lambda args: (
            f'"error": "WorkerLost", "args": [{", ".join(args)}], "suspected": false'
        )
    ),
).map(lambda text: f"{{{text}}}".encode()) | st.binary(max_size=60)
lengths = st.sampled_from([0, 1, 61, 1 << 20, 1 << 21, 1 << 63])


@st.composite
def frames(draw, kinds=tuple(FrameType), payload=payloads):
    payload = draw(payload)
    length = draw(st.just(len(payload)) | st.just(len(payload)) | lengths)
    header = bytearray(pack_header(draw(st.sampled_from(kinds)), length))
    if draw(st.integers(0, 2)) == 1:
        header[draw(st.integers(0, HEADER_BYTES - 1))] = draw(st.integers(0, 255))
    elif draw(st.integers(0, 20)) == 1:
        header[:5] = framing.MAGIC + bytes([framing.VERSION - 1])
    return bytes(header) + payload


@st.composite
def handshakes(draw):
    """What somebody without the secret, or with a wrong idea of it, may send."""
    nonce, proof = (draw(st.binary(min_size=32, max_size=32)) for _ in range(2))
    hello = draw(payloads)
    parts = [
        pack_header(FrameType.CHALLENGE, 32) + nonce,
        pack_header(FrameType.HELLO, len(hello)) + hello,
        pack_header(FrameType.PROOF, 32) + proof,
    ]
    if draw(st.integers(0, 3)):
        parts[draw(st.integers(0, 2))] = draw(frames())
    # In TLS's own words, as far as a stranger knows them.
    start = draw(st.sampled_from([b"", b"", b"", b"\x16", b"\x16\x03\x01"]))
    sent = start + b"".join(parts[: draw(st.integers(0, 3))])
    return sent[: draw(st.sampled_from([10, 50, 10_000, 10_000]))]


def stranger(sent, client):
    """A handshake with a side; returns how it ended."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        try:
            if client:
                handshake.authenticate_as_client(
                    theirs, SECRET, {}, Deadline(60), "a:1"
                )
            else:
                handshake.receive(theirs, SECRET, Deadline(60), "x", "a:1")
        except (errors.KerasDistError, EOFError, OSError) as error:
            return type(error).__name__
    pytest.fail("a stranger got through")


def payload_of_a_member(sent):
    error, _ = decode(sent)
    assert isinstance(error, errors.CollectiveError)
    assert str(error) is not None
    ends = [type(error).__name__]
    for kind in (Goodbye, Event):
        try:
            framing.read_record(framing.to_json(sent), kind, "It")
            ends.append("read")
        except errors.ProtocolError:
            ends.append("refused")
    return tuple(ends)


def control_frame(sent, place):
    """A signed frame to a supervisor or a watch, which must live on or end."""
    one, other = connections()
    seen = queue.SimpleQueue()
    if place is None:
        ends = Heartbeat("x", Timeouts(), lambda *_: None, lambda *why: seen.put(why))
        ends.add(1, other)
    else:
        peers = [Peer(rank, f"host{rank}:1") for rank in range(3)]
        ends = FailureDetector(place, peers, {1 - place: other}, Timeouts(), seen.put)
    with one:
        one.sock.sendall(sent + one.auth.sign(sent))
        one.sock.shutdown(socket.SHUT_WR)
        # The one thread is alive if it sees the end, and then closes its side.
        wait_until(lambda: other.sock.fileno() < 0, "its end")
        ends.close()
    return place


CONTROL = (FrameType.HEARTBEAT, FrameType.FAILURE, FrameType.GOODBYE, FrameType.EVENT)
WORK = [
    (stranger, [handshakes(), st.booleans()], 300),
    (payload_of_a_member, [payloads], 300),
    (control_frame, [frames(CONTROL), st.sampled_from([None, 0, 1])], 60),
]


@pytest.mark.parametrize(
    "times", [1, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize(("work", "arguments", "count"), WORK)
def test_odd_frames_end_in_errors_of_ours(work, arguments, count, times, caplog):
    ends = set()

    @settings(
        max_examples=count * times,
        derandomize=times == 1,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.tuples(*arguments))
    def one(values):
        ends.add(work(*values))

    with nothing_stays_open():
        one()
    assert len(ends) > 1
    log.flush(60)
    assert not [r for r in caplog.records if r.exc_info], caplog.text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_listener_lives_through_strangers_of_all_kinds(
    caplog, encrypted, tmp_path, monkeypatch
):
    """Over real connections, several at once."""
    if encrypted:
        monkeypatch.setenv("KERASDIST_TLS", Authority(folder=tmp_path).issue())
    caplog.set_level(logging.CRITICAL, "kerasdist")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    host, _, port = address.rpartition(":")

    def come(sent):
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection((host, int(port)), timeout=60) as sock,
        ):
            sock.sendall(sent)

    @settings(max_examples=30)
    @given(st.tuples(*[handshakes()] * 4))
    def four(sent):
        in_threads(4, lambda i: come(sent[i]))

    with listener_at(address, SECRET) as listening:
        four()
        hello = {"session": "s", "purpose": "p", "rank": 1}
        with dial_address(address, SECRET, hello, Deadline(60)):
            stop = threading.Event()
            taken = listening.pending.take("s", "p", 1, Deadline(60), stop)
            assert taken is not None
            taken.close()
    log.flush(60)
    assert not [r for r in caplog.records if r.exc_info], caplog.text
