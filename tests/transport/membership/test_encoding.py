"""Messages survive their way over a connection; anything else is one kind of error."""

from __future__ import annotations

import json
import random
import tracemalloc
import typing
import zlib
from typing import Any

import pytest

from kerasdist.errors import ProtocolError
from kerasdist.transport.membership.encoding import decode, encode
from kerasdist.transport.membership.epochs import (
    Decision,
    Epoch,
    Member,
    Progress,
    Report,
    StopReason,
    Verdict,
    first_decision,
)
from kerasdist.transport.membership.messages import (
    Accepted,
    Ballot,
    Decided,
    Excluded,
    Gone,
    Join,
    Leaving,
    Loss,
    Message,
    Prepare,
    Promise,
    Propose,
    Rejected,
)
from kerasdist.transport.wire.framing import MAX_CONTROL


class Samples:
    """Random messages."""

    def __init__(self, seed: int, most: int = 5) -> None:
        self.random = random.Random(seed)
        self.most = most

    def number(self) -> int:
        return self.random.choice([0, 1, 7, self.random.getrandbits(60)])

    def member(self) -> Member:
        return Member(self.random.randrange(1000), self.random.randrange(3))

    def members(self) -> tuple[Member, ...]:
        return tuple(self.member() for _ in range(self.random.randrange(self.most)))

    def decision(self) -> Decision:
        some = [self.members() for _ in range(6)]
        epoch = Epoch(
            self.number(), some[0], some[1], frozenset(some[2]), frozenset(some[3])
        )
        stop = self.random.choice([None, *StopReason])
        progress = Progress(self.number(), self.number())
        return Decision(epoch, Verdict(progress, some[4], some[5], stop))

    def messages(self) -> list[Message]:
        ballot = Ballot(self.number(), self.member())
        progress = self.random.choice([None, Progress(self.number(), 3)])
        report = Report(progress, frozenset(self.members()), True, False)
        dead = frozenset(self.members())
        n = self.number()
        return [
            Join(self.random.choice([None, self.decision()])),
            Leaving(n),
            Loss(n, dead, True),
            Prepare(n, ballot, self.decision(), dead, self.random.choice([None, n])),
            Promise(n, ballot, report),
            Promise(n, ballot, report, (ballot, self.decision())),
            Propose(n, ballot, self.decision()),
            Accepted(n, ballot),
            Rejected(n, ballot),
            Decided(self.decision()),
            Excluded(n),
            Gone(),
        ]


def test_messages_survive() -> None:
    for seed in range(200):
        for message in Samples(seed).messages():
            assert decode(encode(message)) == message


def test_those_of_a_large_job_fit_into_a_frame() -> None:
    members = tuple(Member(number, 1) for number in range(1000))
    every = frozenset(members)
    epoch = Epoch(1 << 30, members, members, every, every)
    decision = Decision(epoch, Verdict(Progress(1 << 40), members, members))
    ballot = Ballot(1 << 30, members[-1])
    report = Report(Progress(1 << 40), every)
    message = Promise(1, ballot, report, (ballot, decision))
    data = encode(message)
    assert len(data) < MAX_CONTROL
    assert decode(data) == message


def test_anything_else_is_an_error() -> None:
    """Bits and fields of messages are changed at random."""
    refused = 0
    for seed in range(2000):
        samples = Samples(seed)
        for message in samples.messages():
            try:
                decode(damaged(encode(message), samples.random))
            except ProtocolError:
                refused += 1
    assert refused > 10_000


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


def test_a_thousand_members_take_few_bytes() -> None:
    members = tuple(Member(number, number % 3) for number in range(1000))
    message = Prepare(0, Ballot(1, members[0]), first_decision(members), frozenset())
    assert len(encode(message)) < 5000


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
    b"",
    b"[]",
    b"{}",
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
        b"\xff" * 40,
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


def test_all_kinds_are_covered() -> None:
    kinds = {type(message) for message in Samples(0).messages()}
    assert kinds == set(typing.get_args(Message))
