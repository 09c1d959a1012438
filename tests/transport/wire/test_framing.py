"""Frames: what is packed comes out again, and anything else is refused."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from kerasdist import errors
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.timeouts import Timeouts
from kerasdist.transport.wire.framing import (
    DTYPES,
    HEADER_BYTES,
    KINDS,
    MAX_CONTROL,
    OPS,
    Call,
    FrameType,
    pack_header,
    unpack_header,
)
from kerasdist.transport.wire.messages import read_frame, to_json, write_frame


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_every_field_comes_out_as_it_went_in():
    call = Call(2**63, "broadcast", "max", "bfloat16", 2**40, 2**32 - 1, 65535)
    header = pack_header(FrameType.DATA, 2**50, call)
    assert len(header) == HEADER_BYTES == 40
    assert unpack_header(header) == (FrameType.DATA, 2**50, call)


def test_every_type_kind_op_and_dtype_has_a_number():
    for frame in FrameType:
        assert unpack_header(pack_header(frame, 0)) == (frame, 0, Call(0))
    for kind in KINDS:
        for op in OPS:
            for dtype in DTYPES:
                call = Call(1, kind, op, dtype)
                assert unpack_header(pack_header(FrameType.DATA, 0, call))[2] == call


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (
            lambda h: b"GET / HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n" + h[:0],
            r"^The received bytes aren't a kerasdist frame\. "
            r"Received: first bytes b'GET ",
        ),
        (
            lambda h: h[:4] + b"\x09" + h[5:],
            r"^The other side has another version .* Received: version=9, ",
        ),
        (
            lambda h: h[:5] + b"\xff" + h[6:],
            r"^A frame's header is damaged\. Received: type=255, kind=1, ",
        ),
        (lambda h: h[:16] + b"\x63" + h[17:], r"^A frame's .* kind=99,"),
        (lambda h: h[:17] + b"\x63" + h[18:], r"^A frame's .* op=99,"),
        (lambda h: h[:18] + b"\x63" + h[19:], r"^A frame's .* dtype=99\.$"),
    ],
)
def test_what_is_no_header_is_refused(damage, match):
    call = Call(1, "all_reduce", "sum", "float32", 4, 0)
    damaged = damage(pack_header(FrameType.DATA, 16, call))[:HEADER_BYTES]
    with pytest.raises(errors.ProtocolError, match=match):
        unpack_header(damaged)


def test_random_bytes_are_refused_and_nothing_else_happens():
    generator = np.random.default_rng(1)
    for number in range(3000):
        noise = generator.bytes(HEADER_BYTES)
        if number % 2:  # get past the magic
            noise = b"KDST\x01" + noise[5:]
        try:
            unpack_header(noise)
        except errors.ProtocolError:
            continue


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (Call(4), "#4"),
        (Call(4, "barrier"), "#4 barrier()"),
        (
            Call(4, "all_reduce", "sum", "float32", 9, 77),
            "#4 all_reduce(op='sum', dtype=float32, elements=9)",
        ),
        (
            Call(4, "broadcast", "none", "uint8", 9, 77, 3),
            "#4 broadcast(dtype=uint8, elements=9, root=3)",
        ),
    ],
)
def test_a_call_as_a_person_would_write_it(call, text):
    assert str(call) == text


def test_control_frames_arrive_in_order_and_whole(pair):
    a, b = pair
    deadline = Deadline(5)
    write_frame(a, FrameType.PROOF, b"123", deadline)
    write_frame(a, FrameType.GOODBYE, b"", deadline)
    assert read_frame(b, deadline) == (FrameType.PROOF, b"123")
    assert read_frame(b, deadline) == (FrameType.GOODBYE, b"")


def test_a_frame_longer_than_its_bound_is_refused_before_it_is_read(pair):
    a, b = pair
    a.sendall(pack_header(FrameType.HELLO, MAX_CONTROL + 1))
    with pytest.raises(
        errors.ProtocolError,
        match=r"^A HELLO frame is too long\. Received: 1048577 bytes, expected at most",
    ):
        read_frame(b, Deadline(5))


@pytest.mark.parametrize(
    ("payload", "match"),
    [
        (b"{", r"^A control frame isn't JSON: "),
        (b"\xff\xfe", r"^A control frame isn't JSON: "),
        (b"[" * 100_000, r"^A control frame isn't JSON: "),
        (b"[1]", r"^A control frame isn't a JSON object\. Received: list\.$"),
    ],
)
def test_a_payload_that_is_no_json_object_is_refused(payload, match):
    with pytest.raises(errors.ProtocolError, match=match):
        to_json(payload)


def test_a_closed_connection_and_a_silent_one_are_told_apart(pair):
    a, b = pair
    a.sendall(pack_header(FrameType.HELLO, 10)[:20])
    with pytest.raises(TimeoutError):
        read_frame(b, Deadline(0.05))
    a.close()
    with pytest.raises(EOFError, match=r"^the connection was closed$"):
        read_frame(b, Deadline(5))


def test_a_deadline_is_never_negative_and_fits_into_poll():
    over = Deadline(0)
    assert over.expired
    assert over.remaining() == 0
    assert over.milliseconds() == 1
    far = Deadline(1e9)
    assert not far.expired
    assert far.milliseconds() == 2**31 - 1


def test_timeouts_say_all_that_is_wrong_with_them():
    with pytest.raises(
        ValueError,
        match=r"^Timeouts must be finite numbers of seconds above 0, at most 1e9\. "
        r"Received: startup=0, collective=inf, heartbeat='3'\. Nothing may wait for",
    ):
        Timeouts(startup=0, collective=float("inf"), heartbeat="3")
    for wrong in (True, -1, float("nan"), None, 1e10):
        with pytest.raises(ValueError, match=rf"^Timeouts .* heartbeat={wrong!r}\. "):
            Timeouts(heartbeat=wrong)


def test_heartbeats_are_often_enough_for_both_timeouts():
    assert Timeouts(heartbeat=30, collective=600).heartbeat_interval == 6
    assert Timeouts(heartbeat=30, collective=2).heartbeat_interval == 0.5
