"""Decisions about the next epoch; messages survive their way, others are refused."""

import enum
import json
import tracemalloc
import typing
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasdist.collectives.elastic import epochs
from kerasdist.collectives.elastic.epochs import Ballot, SuspensionReport
from kerasdist.errors import ProtocolError
from kerasdist.transport.framing import MAX_CONTROL

A, B, C, D, E = (epochs.Member(n) for n in range(5))
ALL = (A, B, C, D, E)


def decide(reports, *, epoch=None, joiners=(), dead=(), min_workers=1):
    epoch = epoch or epochs.first_decision(ALL[:3]).epoch
    return epochs.next_decision(epoch, reports, joiners, frozenset(dead), min_workers)


@pytest.mark.parametrize(
    ("a", "progress", "furthest"),
    # Finished by one, or by all.
    [(7, 7, (A,)), (6, 6, (A, B)), (5, 6, (B,))],
)
def test_a_collective_counts_if_one_has_finished_it(a, progress, furthest):
    reports = {A: SuspensionReport(a), B: SuspensionReport(6)}
    verdict = decide(reports, dead=[C]).verdict
    assert (verdict.progress, verdict.furthest) == (progress, furthest)
    assert verdict.stop is None


def test_one_that_leaves_has_to_stay_while_the_others_need_it():
    joined = epochs.Epoch(4, (A, D), newcomers=(D,), elders=frozenset([A]))
    reports = {
        A: SuspensionReport(5, leaving=True),
        D: SuspensionReport(None),
    }
    assert decide(reports, epoch=joined).epoch.members == (A, D)
    reports[D] = SuspensionReport(5)
    assert decide(reports, epoch=joined).epoch.members == (A, D)
    reports[D] = SuspensionReport(6, confirmed=True)
    assert decide(reports, epoch=joined).epoch.members == (D,)
    # One that wants to join gets the state first.
    reports = {A: SuspensionReport(5, leaving=True)}
    alone = epochs.first_decision((A,)).epoch
    assert decide(reports, epoch=alone, joiners=(D,)).epoch.members == (A, D)
    assert decide(reports, epoch=alone).verdict.stop is epochs.StopReason.LEFT


def test_of_two_without_contact_the_later_one_is_left_out():
    reports = {
        A: SuspensionReport(1),
        B: SuspensionReport(1, silent=frozenset([C])),
        C: SuspensionReport(1),
    }
    epoch = decide(reports).epoch
    assert epoch.members == (A, B)
    assert epoch.absent == {C}


def values(hint):
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
MESSAGES = values(epochs.Message)


@settings(max_examples=200)
@given(MESSAGES)
def test_messages_survive(message):
    assert epochs.decode(epochs.encode(message)) == message


def test_those_of_a_large_job_fit_into_a_frame():
    members = tuple(epochs.Member(number, number % 3) for number in range(1000))
    every = frozenset(members)
    epoch = epochs.Epoch(1 << 30, members, members, every, every)
    decision = epochs.Decision(epoch, epochs.CollectiveVerdict(1 << 40, members))
    ballot = Ballot(1 << 30, members[-1])
    report = SuspensionReport(1 << 40, every)
    message = epochs.Promise(1, ballot, report, (ballot, decision))
    data = epochs.encode(message)
    assert len(data) < MAX_CONTROL
    assert epochs.decode(data) == message
    # And those that are sent most often take few bytes.
    few = epochs.Prepare(
        0, Ballot(1, members[0]), epochs.first_decision(members), frozenset()
    )
    assert len(epochs.encode(few)) < 5000


ODD = st.sampled_from([None, -2, 1.5, 1 << 80, "x", [], {}, True, [[]], float("nan")])


@settings(max_examples=100)
@given(MESSAGES, st.data())
def test_a_field_that_is_changed_is_refused_or_read_as_another(message, data):
    place = json.loads(zlib.decompress(epochs.encode(message)))
    whole, key = place, data.draw(st.sampled_from(["kind", "fields", "fields"]))
    while isinstance(place[key], list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.integers(0, len(place) - 1))
    place[key] = data.draw(ODD)
    try:
        found = epochs.decode(zlib.compress(json.dumps(whole).encode()))
    except ProtocolError:
        return
    # One without fields may have none in an object, too.
    assert (
        json.loads(zlib.decompress(epochs.encode(found))) == whole
        or not whole["fields"]
    )


def test_little_memory_is_taken_for_what_is_too_long():
    bomb = zlib.compress(b" " * (100 * MAX_CONTROL))
    assert len(bomb) < MAX_CONTROL
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=r"^A message about membership is dam"):
            epochs.decode(bomb)
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
        epochs.encode(epochs.Gone())[:-1],
        epochs.encode(epochs.Gone()) + b"x",
        *map(zlib.compress, TEXTS),
    ],
    ids=lambda data: repr(data[:30]),
)
def test_other_bytes_are_an_error(data):
    with pytest.raises(ProtocolError):
        epochs.decode(data)
