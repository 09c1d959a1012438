import dataclasses
import itertools

import pytest

from kerasdist.collectives.elastic.consensus import Attempt
from kerasdist.collectives.elastic.epochs import (
    Ballot,
    Epoch,
    Member,
    Prepare,
    Progress,
    Promise,
    StopReason,
    SuspensionReport,
    first_decision,
    is_quorum,
    next_decision,
)

A, B, C, D, E = (Member(n) for n in range(5))
ALL = (A, B, C, D, E)


def subsets(members):
    for count in range(len(members) + 1):
        yield from map(frozenset, itertools.combinations(members, count))


@pytest.mark.parametrize(
    ("voters", "members", "dead", "enough"),
    [
        ((B, C), (A, B, C), (), True),
        ((C,), (A, B, C), (), False),
        # Half, with and without the first one.
        ((A, D), (A, B, C, D), (), True),
        ((B, C, D), (A, B, C, D), (), True),
        ((C, D), (A, B, C, D), (), False),
        ((B,), (A, B), (), False),
        # All others are dead.
        ((B,), (A, B), (A,), True),
        ((E,), ALL, (A, B, C, D), True),
        # Two of the three that aren't dead: the third one may be in another group.
        ((C, D), (A, B, C, D), (A,), False),
    ],
)
def test_a_quorum(voters, members, dead, enough):
    assert is_quorum(voters, members, dead) is enough


@pytest.mark.parametrize("size", range(1, 6))
def test_two_quorums_share_a_member_unless_one_of_them_is_dead(size):
    members = ALL[:size]
    # What another one decided that didn't know of these deaths, or was before them.
    earlier = [one for one in subsets(members) if is_quorum(one, members, ())]
    for dead in subsets(members):
        known = [one for one in subsets(members) if is_quorum(one, members, dead)]
        for one, other in itertools.product(known, earlier):
            assert one & other or other <= dead
        assert set(members) - dead in known


def decide(reports, *, epoch=None, joiners=(), dead=(), min_workers=1):
    epoch = epoch or first_decision(ALL[:3]).epoch
    return next_decision(epoch, reports, joiners, frozenset(dead), min_workers)


@pytest.mark.parametrize(
    ("a", "progress", "holders", "furthest"),
    [
        # Finished by one: committed. By none: done again.
        (Progress(7), Progress(7), (A,), (A,)),
        (Progress(6, 2), Progress(6, 3), (A, B), (B,)),
    ],
)
def test_a_step_is_committed_if_one_has_finished_it(a, progress, holders, furthest):
    reports = {A: SuspensionReport(a), B: SuspensionReport(Progress(6, 3))}
    verdict = decide(reports, dead=[C]).verdict
    assert verdict.progress == progress
    assert (verdict.holders, verdict.furthest) == (holders, furthest)
    assert verdict.stop is None


def test_members_keep_their_order_and_those_that_join_are_last():
    reports = {B: SuspensionReport(Progress(1)), C: SuspensionReport(Progress(1))}
    epoch = decide(reports, dead=[A], joiners=(E, D)).epoch
    assert epoch.number == 1
    assert epoch.members == (B, C, E, D)
    assert epoch.newcomers == (E, D)
    assert epoch.elders == {B, C}


def test_those_without_the_state_wait_for_one_that_has_it():
    joined = Epoch(4, (A, D, E), newcomers=(D, E), elders=frozenset([A]))
    assert (
        decide({D: SuspensionReport(None), E: SuspensionReport(None)}, epoch=joined)
        is None
    )


def test_those_left_out_are_absent_unless_they_are_dead():
    epoch = first_decision(ALL).epoch
    reports = {
        A: SuspensionReport(Progress(1)),
        B: SuspensionReport(Progress(1), leaving=True),
        C: SuspensionReport(Progress(1)),
    }
    assert decide(reports, epoch=epoch, dead=[D]).epoch.absent == {B, E}


def test_one_that_leaves_has_to_stay_while_the_others_need_it():
    joined = Epoch(4, (A, D), newcomers=(D,), elders=frozenset([A]))
    reports = {
        A: SuspensionReport(Progress(5), leaving=True),
        D: SuspensionReport(None),
    }
    assert decide(reports, epoch=joined).epoch.members == (A, D)
    reports[D] = SuspensionReport(Progress(5))
    assert decide(reports, epoch=joined).epoch.members == (A, D)
    reports[D] = SuspensionReport(Progress(6), confirmed=True)
    assert decide(reports, epoch=joined).epoch.members == (D,)
    # One that wants to join gets the state first.
    reports = {A: SuspensionReport(Progress(5), leaving=True)}
    alone = first_decision((A,)).epoch
    assert decide(reports, epoch=alone, joiners=(D,)).epoch.members == (A, D)
    assert decide(reports, epoch=alone).verdict.stop is StopReason.LEFT


def test_of_two_without_contact_the_later_one_is_left_out():
    reports = {
        A: SuspensionReport(Progress(1)),
        B: SuspensionReport(Progress(1), silent=frozenset([C])),
        C: SuspensionReport(Progress(1)),
    }
    epoch = decide(reports).epoch
    assert epoch.members == (A, B)
    assert epoch.absent == {C}


def test_all_become_elders_when_none_can_be_in_an_earlier_epoch():
    joined = Epoch(4, (A, D), newcomers=(D,), elders=frozenset([A]))
    reports = {D: SuspensionReport(Progress(9), confirmed=True)}
    assert decide(reports, epoch=joined, dead=[A]).epoch.elders == {D}


@pytest.mark.parametrize("absent", [False, True])
def test_there_is_no_next_epoch_without_an_elder(absent):
    joined = Epoch(*(4, (A, D), (D,), frozenset([A])), frozenset([B] if absent else ()))
    reports = {D: SuspensionReport(Progress(9), confirmed=absent)}
    assert decide(reports, epoch=joined, dead=[A]) is None
    # B may have continued between the deaths of A and of B.
    if absent:
        assert decide(reports, epoch=joined, dead=[A, B]) is None


@pytest.mark.parametrize(
    ("dead", "elders"), [((), {A}), ((B,), {A, D}), ((B, C), {A, D})]
)
def test_all_become_elders_when_the_absent_ones_die_before_the_last_elder(dead, elders):
    joined = Epoch(4, (A, D), (D,), frozenset([A]), frozenset([B]))
    reports = {
        A: SuspensionReport(Progress(9)),
        D: SuspensionReport(Progress(9), confirmed=True),
    }
    epoch = decide(reports, epoch=joined, dead=dead).epoch
    assert epoch.elders == elders
    assert epoch.absent == {B} - set(dead)


@pytest.mark.parametrize("leaving", [False, True])
def test_why_all_stop(leaving):
    reports = {B: SuspensionReport(Progress(3), leaving=leaving)}
    verdict = decide(reports, dead=[A, C], min_workers=2).verdict
    assert verdict.stop is (StopReason.LEFT if leaving else StopReason.TOO_FEW)


# Attempts.


FIRST = first_decision((A, B, C))


def attempt(*, dead=()):
    return Attempt(Prepare(0, Ballot(3, A), FIRST, frozenset(dead)))


def promise(accepted=None):
    return Promise(0, Ballot(3, A), SuspensionReport(Progress(1)), accepted)


def test_it_awaits_all_in_contact_and_a_quorum():
    one = attempt().with_promise(A, promise())
    assert one.awaits(frozenset())
    assert one.awaits(frozenset([B, C]))
    two = one.with_promise(B, promise())
    assert two.awaits(frozenset())
    assert not two.awaits(frozenset([C]))
    assert not two.with_promise(C, promise()).awaits(frozenset())
    assert set(two.reports()) == {A, B}
    # The dead are not awaited.
    assert not attempt(dead=[B, C]).with_promise(A, promise()).awaits(frozenset())


def test_there_is_no_elder_when_all_are_dead_and_the_others_have_promised():
    epoch = dataclasses.replace(FIRST.epoch, elders=frozenset([A]))
    base = dataclasses.replace(FIRST, epoch=epoch)
    for dead, expected in [((), False), ((A,), True), ((A, C), True)]:
        one = Attempt(Prepare(0, Ballot(3, B), base, frozenset(dead)))
        one = one.with_promise(B, promise())
        assert one.has_no_elder() is (C in dead)
        assert one.with_promise(C, promise()).has_no_elder() is expected
