import dataclasses

from kerasdist.transport.membership.attempt import Attempt
from kerasdist.transport.membership.epochs import (
    Member,
    Progress,
    Report,
    first_decision,
)
from kerasdist.transport.membership.messages import Ballot, Prepare, Promise

A, B, C = (Member(n) for n in range(3))
FIRST = first_decision((A, B, C))


def attempt(*, dead=()):
    return Attempt(Prepare(0, Ballot(3, A), FIRST, frozenset(dead)))


def promise(accepted=None):
    return Promise(0, Ballot(3, A), Report(Progress(1)), accepted)


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


def test_what_was_accepted_in_the_largest_ballot_is_proposed_again():
    early, late = first_decision((A, B)), first_decision((B, C))
    one = attempt().with_promise(A, promise())
    assert one.earlier() is None
    two = one.with_promise(B, promise((Ballot(2, C), late)))
    three = two.with_promise(C, promise((Ballot(2, B), early)))
    assert three.earlier() is late


def test_there_is_no_elder_when_all_are_dead_and_the_others_have_promised():
    epoch = dataclasses.replace(FIRST.epoch, elders=frozenset([A]))
    base = dataclasses.replace(FIRST, epoch=epoch)
    for dead, expected in [((), False), ((A,), True), ((A, C), True)]:
        one = Attempt(Prepare(0, Ballot(3, B), base, frozenset(dead)))
        one = one.with_promise(B, promise())
        assert one.has_no_elder() is (C in dead)
        assert one.with_promise(C, promise()).has_no_elder() is expected


def test_votes_are_counted_once():
    one = attempt().with_proposal(FIRST).with_vote(B).with_vote(B)
    assert not one.is_quorum(one.votes)
    assert one.is_quorum(one.with_vote(A).votes)
