"""Frames: what is packed comes out again, and anything else is refused."""

from __future__ import annotations

import contextlib
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasdist import errors
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.framing import (
    DTYPES,
    HEADER_BYTES,
    KINDS,
    MAGIC,
    MAX_CONTROL,
    OPS,
    VERSION,
    Call,
    FrameType,
    pack_header,
    read_frame,
    to_json,
    unpack_header,
    write_frame,
)


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def numbers(bits):
    return st.integers(0, 2**bits - 1)


@given(
    st.sampled_from(FrameType),
    numbers(63),
    st.builds(
        Call,
        *(numbers(64), *map(st.sampled_from, (KINDS, OPS, DTYPES))),
        *map(numbers, (64, 32, 16)),
    ),
)
def test_every_field_comes_out_as_it_went_in(kind, length, call):
    header = pack_header(kind, length, call)
    assert len(header) == HEADER_BYTES == 40
    assert unpack_header(header) == (kind, length, call)


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


@settings(max_examples=500)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.booleans())
def test_random_bytes_are_refused_and_nothing_else_happens(noise, begins_right):
    if begins_right:
        noise = MAGIC + bytes([VERSION]) + noise[5:]
    with contextlib.suppress(errors.ProtocolError):
        unpack_header(noise)


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
    deadline = Deadline(60)
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
        read_frame(b, Deadline(60))


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
        read_frame(b, Deadline(60))


def test_a_deadline_is_never_negative_and_fits_into_poll():
    over, far = Deadline(0), Deadline(1e9)
    assert (over.expired, over.remaining(), over.milliseconds()) == (True, 0, 1)
    assert (far.expired, far.milliseconds()) == (False, 2**31 - 1)


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
    # Heartbeats are often enough for both.
    assert Timeouts(heartbeat=30, collective=600).heartbeat_interval == 6
    assert Timeouts(heartbeat=30, collective=2).heartbeat_interval == 0.5
