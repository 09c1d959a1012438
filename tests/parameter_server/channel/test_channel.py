import contextlib
import json
import struct
import threading

import ml_dtypes
import numpy as np
import pytest

from groups import connections, in_threads, nothing_stays_open
from kerasdist import errors
from kerasdist.parameter_server.channel import (
    Channel,
    ChannelEnded,
    ChannelSilent,
    Message,
)
from kerasdist.transport.base import Aborted
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import Call, FrameType, pack_header
from kerasdist.transport.handshake import TAG_BYTES
from pace import bound
from tls_pairs import tcp_pair

BOUND = 1 << 30
CALL = Call(7, "all_reduce", "sum", "float32", 12, 99)


def tcp_channels():
    return tuple(map(Channel, connections(tcp_pair())))


def shared_pair():
    return tuple(map(Channel, connections()))


PAIRS = {"tcp": tcp_channels, "shared_memory": shared_pair}


@pytest.fixture(params=PAIRS)
def pair(request):
    with nothing_stays_open():
        ends = PAIRS[request.param]()
        yield ends
        for end in ends:
            end.close()
            end.close()


def request_of(arrays, **meta):
    return Message(FrameType.REQUEST, CALL, meta, arrays)


def arrays_of(seed, scale):
    generator = np.random.default_rng(seed)
    names = ["float32", "float64", "int8", "int64", "bool", "float16", "complex64"]
    found = [np.array(3.5), np.zeros((0, 4), "int32")]
    found += [
        (generator.normal(size=int(generator.integers(1, scale))) * 9).astype(name)
        for name in names
    ]
    found.append(np.ones((3, 5), ml_dtypes.bfloat16))
    found.append(generator.normal(size=(7, scale)).T)  # not contiguous
    return found


@pytest.mark.parametrize("scale", [3, 500, 40_000])
def test_what_is_sent_is_received(pair, scale):
    first, second = pair
    expected = arrays_of(1, scale)

    def ask(_):
        first.send(request_of(expected, do="i" * scale, n=3), Deadline(20))
        return first.receive(Deadline(20), BOUND)

    def answer(_):
        message = second.receive(Deadline(20), BOUND)
        assert (message.frame, message.call) == (FrameType.REQUEST, CALL)
        assert dict(message.meta) == {"do": "i" * scale, "n": 3}
        for mine, array in zip(message.arrays, expected, strict=True):
            assert (mine.dtype, mine.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(mine, array)
        second.send(Message(FrameType.REPLY, CALL, {}, message.arrays), Deadline(20))

    reply = in_threads(2, lambda i: (ask, answer)[i](i))[0]
    for mine, array in zip(reply.arrays, expected, strict=True):
        np.testing.assert_array_equal(mine, array)
    size = sum(array.nbytes for array in expected)
    assert size <= first.traffic.bytes_sent <= size + 3000 + scale
    assert second.traffic.bytes_received == first.traffic.bytes_sent
    assert first.traffic.bytes_received == second.traffic.bytes_sent


def test_large_bodies_on_one_host_are_not_in_the_stream():
    first, second = shared_pair()
    array = np.ones(1_000_000)
    # Nobody receives: 8 MB don't fit into a socket.
    first.send(request_of([array]), Deadline(5))
    assert (second.receive(Deadline(5), BOUND).arrays[0] == 1).all()
    for end in (first, second):
        end.close()


def test_silence_ends_at_the_deadline(pair):
    with pytest.raises(ChannelSilent, match=r"silent for 0\.05 s"):
        pair[0].receive(Deadline(0.05), BOUND)


def test_who_receives_hears_that_the_other_side_has_closed(pair):
    pair[1].close()
    with pytest.raises(ChannelEnded):
        pair[0].receive(Deadline(5), BOUND)


@pytest.mark.parametrize("ending", ["abort", "close"])
def test_a_wait_ends_when_the_channel_is_aborted_or_closed(pair, ending):
    first, _ = pair
    waits = threading.Event()

    def wait():
        waits.set()
        with pytest.raises(Aborted):
            first.receive(Deadline(20), BOUND)

    def end():
        waits.wait(bound(10))
        first.abort()
        if ending == "close":
            first.close()

    in_threads(2, lambda i: (wait, end)[i]())
    with pytest.raises(Aborted):
        first.receive(Deadline(5), BOUND)


def test_a_message_that_is_too_long_is_refused(pair):
    pair[0].send(request_of([np.zeros(1000)]), Deadline(5))
    with pytest.raises(errors.ProtocolError, match="is too long"):
        pair[1].receive(Deadline(5), 7999)


def raw(meta, body=b"", *, length=None, frame=FrameType.REQUEST):
    text = meta if isinstance(meta, bytes) else json.dumps(meta).encode()
    payload = struct.pack("!I", len(text)) + text
    if length is None:
        length = len(payload) + TAG_BYTES + len(body)
    return pack_header(frame, length) + payload, body


@pytest.mark.parametrize(
    "data",
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nAccept: */*\r\n\r\n", b""),
        *map(raw, (b"{", [], {"arrays": 3})),
        *(raw({"arrays": [["float32", [n]]]}) for n in (2, -2)),
        raw({"arrays": [["object", [2]]]}, bytes(16)),
        raw({"arrays": [["float32", ["x"]]]}, bytes(8)),
        *(raw({"arrays": [["float32", [n]]]}, bytes(8)) for n in (1 << 38, 1, 3)),
        *(raw({}, length=n) for n in (3, 1 << 50)),
        *((pack_header(FrameType.DESCRIPTOR, n) + bytes(n), b"") for n in (8, 9)),
    ],
)
def test_nonsense_is_refused(data):
    first, second = connections(tcp_pair())
    with first, contextlib.closing(Channel(second)) as channel:
        head, body = data
        first.sock.sendall(head + first.auth.sign(head) + body)
        with pytest.raises(errors.ProtocolError, match=r"^(?!A frame isn't the)"):
            channel.receive(Deadline(5), 1 << 20)


def test_a_request_that_was_changed_on_its_way_is_refused():
    """Somebody on the path turns step 7 into step 9: the text isn't encrypted."""
    first, second = connections(tcp_pair())
    with first, contextlib.closing(Channel(second)) as channel:
        head, body = raw({"step": 7, "arrays": [["float32", [2]]]}, bytes(8))
        sealed = head + first.auth.sign(head) + body
        first.sock.sendall(sealed.replace(b'"step": 7', b'"step": 9'))
        with pytest.raises(errors.ProtocolError, match=r"^A frame isn't the other "):
            channel.receive(Deadline(5), 1 << 20)


def test_without_room_for_shared_memory_it_uses_the_socket(monkeypatch, caplog):
    def full(size):
        raise errors.SharedMemoryFull("there is no room")

    monkeypatch.setattr("kerasdist.parameter_server.channel.create_segment", full)
    first, second = shared_pair()
    array = np.arange(200_000.0)

    def ask(_):
        placed = first.place([("float64", (200_000,))])
        placed[0][:] = array
        first.send(request_of(placed), Deadline(10))

    def answer(_):
        return second.receive(Deadline(10), BOUND).arrays[0].copy()

    received = in_threads(2, lambda i: (ask, answer)[i](i))[1]
    np.testing.assert_array_equal(received, array)
    assert "continues without shared memory" in caplog.text
    for end in (first, second):
        end.close()
