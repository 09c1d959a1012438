from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasdist import errors
from kerasdist.errors import ProtocolError
from kerasdist.transport import framing
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.framing import (
    Call,
    Count,
    FrameType,
    pack_header,
    read_record,
    to_object,
)


def numbers(bits):
    return st.integers(0, 2**bits - 1)


KINDS = map(st.sampled_from, (framing.KINDS, framing.OPS, framing.DTYPES))
CALLS = st.builds(Call, numbers(64), *KINDS, *map(numbers, (64, 32, 16))).filter(
    lambda call: (call.kind, call.op) != ("all_reduce", "none")
)


@given(st.sampled_from(FrameType), numbers(63), CALLS)
def test_every_field_comes_out_as_it_went_in(kind, length, call):
    header = pack_header(kind, length, call)
    assert len(header) == framing.HEADER_BYTES == 40
    assert framing.unpack_header(header) == (kind, length, call)


@pytest.mark.parametrize(
    ("place", "value", "match"),
    [
        (0, b"GET ", r"^The received bytes aren't .* Received: first bytes b'GET "),
        (4, b"\x09", r"^The other side has another version .* Received: version=9, "),
        (5, b"\xff", r"^A frame's header is damaged\. Received: type=255, kind=1, "),
        (16, b"\x63", r"^A frame's .* kind=99,"),
        (17, b"\x63", r"^A frame's .* op=99,"),
        (17, b"\x00", r"^A frame's .* kind=1, op=0,"),
        (18, b"\x63", r"^A frame's .* dtype=99\.$"),
    ],
)
def test_what_is_no_header_is_refused(place, value, match):
    call = Call(1, "all_reduce", "sum", "float32", 4, 0)
    damaged = bytearray(pack_header(FrameType.DATA, 16, call))
    damaged[place : place + len(value)] = value
    with pytest.raises(errors.ProtocolError, match=match):
        framing.unpack_header(bytes(damaged))


def test_a_frame_longer_than_its_bound_is_refused_before_it_is_read():
    a, b = socket.socketpair()
    with a, b:
        a.sendall(pack_header(FrameType.HELLO, framing.MAX_CONTROL + 1))
        with pytest.raises(
            errors.ProtocolError,
            match=r"^A HELLO frame is too long\. Received: 1048577 bytes, expected a",
        ):
            framing.read_frame(b, Deadline(60))


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


class Named(TypedDict):
    size: Count
    rest: Any


@dataclass(frozen=True)
class Inner:
    rank: Count
    state: Literal["live", "lost"] = "live"


@dataclass(frozen=True, kw_only=True)
class Outer:
    last: int = -1
    seconds: float
    flag: bool
    inner: tuple[Inner, ...]
    clocks: Mapping[int, tuple[str, int]]
    maybe: Inner | None = None


OUTER = Outer(seconds=1.5, flag=True, inner=(Inner(3),), clocks={7: ("a", 1)})


@pytest.mark.parametrize("form", [to_object, framing.to_plain])
def test_records_survive(form):
    value = json.loads(json.dumps(form(OUTER)))
    assert read_record(value, Outer, "It") == OUTER


def test_an_object_may_leave_out_what_has_a_default_and_have_more():
    value = to_object(OUTER) | {"session": "x"}
    del value["last"], value["maybe"]
    assert read_record(value, Outer, "It") == OUTER


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"last": -2}, "last=-2"),
        ({"last": True}, "last=True"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"flag": 1}, "flag=1"),
        ({"inner": [[-1, "live"]]}, "inner.rank=-1"),
        ({"inner": [{"rank": 1, "state": "odd"}]}, "inner.state='odd'"),
        ({"clocks": {"x": ["a", 1]}}, "clocks="),
        ({"clocks": []}, r"clocks=\[\]"),
        ({"maybe": "x"}, "maybe='x'"),
    ],
)
def test_wrong_fields_are_named(changes, said):
    value = to_object(OUTER) | changes
    with pytest.raises(ProtocolError, match=rf"^It is damaged\. Received: {said}"):
        read_record(value, Outer, "It")


def test_dictionaries_with_known_names():
    assert read_record({"size": 1, "rest": [2]}, Named, "It") == {
        "size": 1,
        "rest": [2],
    }
    for value, said in [({"size": 1}, "rest is missing"), ([1, 2], r"\[1, 2\]")]:
        with pytest.raises(ProtocolError, match=said):
            read_record(value, Named, "It")
    for value in (None, [], [1], {"seconds": 1}):
        with pytest.raises(ProtocolError, match=r"^It is damaged\. Received: "):
            read_record(value, Outer, "It")
