"""Messages survive their way over a connection; anything else is one kind of error."""

from __future__ import annotations

import enum
import json
import random
import tracemalloc
import typing
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasdist.collectives.elastic.epochs import (
    Ballot,
    Decision,
    Epoch,
    Gone,
    Member,
    Message,
    Prepare,
    Progress,
    Promise,
    StepVerdict,
    SuspensionReport,
    decode,
    encode,
    first_decision,
)
from kerasdist.errors import ProtocolError
from kerasdist.transport.framing import MAX_CONTROL


def values(hint: Any) -> st.SearchStrategy[Any]:
    """All values of a type that a message has."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is int:
        return st.integers(0, (1 << 60) - 1)
    if hint in (bool, type(None)) or isinstance(hint, enum.EnumType):
        return st.from_type(hint)
    if origin is frozenset:
        return st.frozensets(values(args[0]), max_size=3)
    if origin is tuple and args[1:] == (...,):
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if args:
        return st.one_of(*map(values, args))
    hints = typing.get_type_hints(hint)
    return st.builds(hint, *map(values, hints.values()))


# Of each kind as often as of any other.
MESSAGES = values(Message)


@settings(max_examples=200)
@given(MESSAGES)
def test_messages_survive(message: Message) -> None:
    assert decode(encode(message)) == message


def test_those_of_a_large_job_fit_into_a_frame() -> None:
    members = tuple(Member(number, number % 3) for number in range(1000))
    every = frozenset(members)
    epoch = Epoch(1 << 30, members, members, every, every)
    decision = Decision(epoch, StepVerdict(Progress(1 << 40), members, members))
    ballot = Ballot(1 << 30, members[-1])
    report = SuspensionReport(Progress(1 << 40), every)
    message = Promise(1, ballot, report, (ballot, decision))
    data = encode(message)
    assert len(data) < MAX_CONTROL
    assert decode(data) == message
    # And those that are sent most often take few bytes.
    few = Prepare(0, Ballot(1, members[0]), first_decision(members), frozenset())
    assert len(encode(few)) < 5000


def test_anything_else_is_an_error() -> None:
    """Bits and fields of messages are changed at random."""
    ends = []

    @settings(max_examples=300)
    @given(MESSAGES, st.randoms(use_true_random=True))
    def work(message: Message, chance: random.Random) -> None:
        try:
            decode(damaged(encode(message), chance))
            ends.append("accepted")
        except ProtocolError:
            ends.append("refused")

    work()
    # A number may have become another one.
    assert ends.count("refused") > len(ends) * 0.4


def damaged(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.3:
        changed = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        return bytes(changed)
    if chance.random() < 0.2:
        return data[: chance.randrange(len(data))]
    value = json.loads(zlib.decompress(data))
    bad: list[Any] = [None, -2, 1.5, 1 << 80, "x", [], {}, True, [[]], float("nan")]
    place: Any = value
    key: Any = chance.choice(["kind", "fields", "fields", "fields"])
    while isinstance(place[key], list) and place[key] and chance.random() < 0.7:
        place = place[key]
        key = chance.randrange(len(place))
    place[key] = chance.choice(bad)
    return zlib.compress(json.dumps(value).encode())


def test_little_memory_is_taken_for_what_is_too_long() -> None:
    bomb = zlib.compress(b" " * (100 * MAX_CONTROL))
    assert len(bomb) < MAX_CONTROL
    tracemalloc.start()
    try:
        with pytest.raises(
            ProtocolError, match=r"^A message about membership is damag"
        ):
            decode(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_CONTROL
    finally:
        tracemalloc.stop()


TEXTS = [
    b"[]",
    b"\xff" * 40,
    b'{"kind":"Gone"}',
    b'{"kind":"Message","fields":[]}',
    b'{"kind":"Excluded","fields":[true]}',
    b'{"kind":"Join","fields":' + b"[" * 100_000,
    b" " * (MAX_CONTROL + 1),
]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"kind":"Gone","fields":[]}',
        b" " * (MAX_CONTROL + 1),
        encode(Gone())[:-1],
        encode(Gone()) + b"x",
        *map(zlib.compress, TEXTS),
    ],
    ids=lambda data: repr(data[:30]),
)
def test_other_bytes_are_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)
