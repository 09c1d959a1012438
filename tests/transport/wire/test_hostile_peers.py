"""Whatever comes in, from strangers or from those who hold the secret, nobody crashes.

Frames are made by chance from a seed, so that a failure can be seen again. The long
form is a soak test.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import random
import socket
import threading

import pytest

from certificates import Authority
from groups import connections, nothing_stays_open
from kerasdist import errors
from kerasdist.ps.channel.channel import ChannelEnded, ChannelSilent
from kerasdist.ps.channel.socket_channel import SocketChannel
from kerasdist.ps.membership import Event
from kerasdist.ps.server.handler import Goodbye
from kerasdist.transport import Timeouts
from kerasdist.transport.base import Peer
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.liveness.failure_detector import SessionSupervisor
from kerasdist.transport.liveness.failure_protocol import decode
from kerasdist.transport.liveness.heartbeat import Heartbeat
from kerasdist.transport.log import background_log
from kerasdist.transport.rendezvous.dial import dial_tcp
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.wire import handshake
from kerasdist.transport.wire.framing import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    FrameType,
    pack_header,
)
from kerasdist.transport.wire.messages import to_json
from workers import free_ports

pytestmark = pytest.mark.timeout(120)

SECRET = b"the secret of the tests"
# What JSON can say and a careless reader stumbles over.
ODD = [
    *("null", "true", "-1", "0.5", "1e999", "-1e999", "NaN", "Infinity", "1" * 30),
    *('"\\ud800"', '""', '"x"', "[]", "[[1]]", "{}", '{"rank": 1}', "[" * 2000),
]
NAMES = ["rank", "reason", "failed", "cause", "error", "args", "kind", "clock"]
NAMES += ["address", "session", "purpose", "hello", "arrays", "shared", "suspected"]


def odd_payload(chance):
    """JSON of the right shape with odd values, or bytes of no shape at all."""
    if chance.random() < 0.3:
        return chance.randbytes(chance.randrange(60))
    names = chance.sample(NAMES, chance.randrange(5))
    pairs = [f'"{name}": {chance.choice(ODD)}' for name in names]
    if chance.random() < 0.3:
        args = ", ".join(chance.choice(ODD) for _ in range(4))
        pairs = [f'"error": "WorkerLost", "args": [{args}], "suspected": false']
    return ("{" + ", ".join(pairs) + "}").encode()


def odd_frame(chance, kinds=tuple(FrameType)):
    """A frame, most often with something wrong about it."""
    payload = odd_payload(chance)
    kind = chance.choice(kinds)
    length = len(payload)
    if chance.random() < 0.1:
        length = chance.choice([0, 1, length + 1, 1 << 20, 1 << 21, 1 << 63])
    header = bytearray(pack_header(kind, length))
    if chance.random() < 0.3:
        header[chance.randrange(HEADER_BYTES)] = chance.randrange(256)
    if chance.random() < 0.05:
        header[:5] = MAGIC + bytes([VERSION - 1])
    return bytes(header) + payload


def odd_handshake(chance):
    """What somebody without the secret, or with a wrong idea of it, may send."""
    frames = [
        pack_header(FrameType.CHALLENGE, 32) + chance.randbytes(32),
        pack_header(FrameType.HELLO, 0),
        pack_header(FrameType.PROOF, 32) + chance.randbytes(32),
    ]
    hello = odd_payload(chance)
    frames[1] = pack_header(FrameType.HELLO, len(hello)) + hello
    if chance.random() < 0.7:
        frames[chance.randrange(3)] = odd_frame(chance)
    if chance.random() < 0.3:
        frames = frames[: chance.randrange(4)]
    return b"".join(frames)[: chance.choice([10, 50, 10_000])]


def strangers(count, seed):
    """Handshakes with both sides; returns how many of them ended in which way."""
    chance = random.Random(seed)
    ends = {}
    for number in range(count):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(odd_handshake(chance))
            ours.shutdown(socket.SHUT_WR)
            try:
                if number % 2:
                    handshake.authenticate_as_client(
                        theirs, SECRET, {}, Deadline(5), "a:1"
                    )
                else:
                    handshake.receive(theirs, SECRET, Deadline(5), "x", "a:1")
                kind = "through"
            except (errors.KerasDistError, EOFError, OSError) as error:
                kind = type(error).__name__
            ends[kind] = ends.get(kind, 0) + 1
    return ends


def messages(count, seed):
    """Requests on a data connection, of one who holds the secret; as `strangers`."""
    chance = random.Random(seed)
    ends = {}
    for _ in range(count):
        one, other = connections()
        frame = odd_frame(chance, (FrameType.REQUEST, FrameType.DESCRIPTOR))
        if chance.random() < 0.7:
            text = odd_payload(chance)
            size = chance.choice([0, 0, 8, 1 << 40])
            body = len(text).to_bytes(4, "big") + size.to_bytes(8, "big") + text
            frame = pack_header(FrameType.REQUEST, len(body) + 16) + body
        channel = SocketChannel(other)
        with one:
            one.sock.sendall(frame + one.auth.sign(frame))
            one.sock.shutdown(socket.SHUT_WR)
            try:
                channel.receive(Deadline(5), 1 << 20)
                kind = "through"
            except (errors.KerasDistError, ChannelEnded, ChannelSilent) as error:
                kind = type(error).__name__
            ends[kind] = ends.get(kind, 0) + 1
        channel.close()
    return ends


def payloads(count, seed):
    """What frames hold, one by one, of those who hold the secret."""
    chance = random.Random(seed)
    for _ in range(count):
        payload = odd_payload(chance)
        error, _ = decode(payload)
        assert isinstance(error, errors.CollectiveError)
        str(error)
        for read in (
            Goodbye.from_payload,
            lambda data: Event.from_json(to_json(data)),
        ):
            with contextlib.suppress(errors.ProtocolError):
                read(payload)


def control_frames(count, seed):
    """Signed frames to supervisors and watches, each of which must live on or end."""
    chance = random.Random(seed)
    kinds = (FrameType.HEARTBEAT, FrameType.FAILURE, FrameType.GOODBYE, FrameType.EVENT)
    for number in range(count):
        one, other = connections()
        frame = odd_frame(chance, kinds)
        seen = queue.SimpleQueue()
        if number % 2:
            peers = [Peer(rank, f"host{rank}:1") for rank in range(3)]
            place = number // 2 % 2
            ends = SessionSupervisor(
                place, peers, {1 - place: other}, Timeouts(), seen.put
            )
        else:

            def hear(key, frame):
                kind, _, payload = frame
                if kind is FrameType.GOODBYE:
                    Goodbye.from_payload(payload)
                elif kind is FrameType.EVENT:
                    Event.from_json(to_json(payload))
                elif kind is FrameType.FAILURE:
                    decode(payload)

            ends = Heartbeat(
                "x", Timeouts(), hear, lambda *why, seen=seen: seen.put(why)
            )
            ends.add(1, other)
        with one:
            one.sock.sendall(frame + one.auth.sign(frame))
            one.sock.shutdown(socket.SHUT_WR)
            # The connection ends behind the frame: that's noticed in any case, by the
            # one thread that might have died.
            seen.get(timeout=20)
            ends.close()


@pytest.mark.parametrize("work", [strangers, messages, payloads, control_frames])
def test_odd_frames_end_in_errors_of_ours(work, caplog):
    with nothing_stays_open():
        ends = work(
            {strangers: 2000, messages: 1500, control_frames: 200}.get(work, 5000), 1
        )
    if ends is not None:
        assert "through" not in ends or work is messages
        assert len(ends) > 1
    background_log.flush(10)
    assert not [r for r in caplog.records if r.exc_info], caplog.text


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_many_odd_frames_end_in_errors_of_ours(seed):
    for work, count in [
        *((strangers, 20_000), (messages, 20_000)),
        *((payloads, 200_000), (control_frames, 2000)),
    ]:
        work(count, f"long {seed}")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_listener_lives_through_strangers_of_all_kinds(
    caplog, encrypted, tmp_path, monkeypatch
):
    """Over real connections, several at once; those with TLS have no valid frames."""
    if encrypted:
        tls = Authority(folder=tmp_path).issue()
        monkeypatch.setenv("KERASDIST_TLS", tls)
    caplog.set_level(logging.CRITICAL, "kerasdist")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    host, _, port = address.rpartition(":")
    listening = Listener.acquire(address, SECRET)

    def come(seed):
        chance = random.Random(seed)
        for _ in range(60):
            with (
                contextlib.suppress(ConnectionError),
                socket.create_connection((host, int(port)), timeout=10) as sock,
            ):
                sock.sendall(odd_handshake(chance))

    threads = [threading.Thread(target=come, args=(seed,)) for seed in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        hello = {"session": "s", "purpose": "p", "rank": 1}
        with dial_tcp(address, SECRET, hello, Deadline(10)):
            stop = threading.Event()
            taken = listening.mailboxes.take("s", "p", 1, Deadline(10), stop)
            assert taken is not None
            taken.close()
    finally:
        listening.release()


def test_a_lone_surrogate_in_a_goodbye_is_no_end_of_a_watch():
    """JSON can say it and UTF-8 can't: all workers lost their server by it."""
    payload = json.dumps({"reason": "\ud800", "cause": "\ud800"}).encode()
    assert isinstance(Goodbye.from_payload(payload).cause, errors.CollectiveError)
