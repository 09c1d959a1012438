"""The agreement under schedules of loss, delay, duplicates, partitions and deaths.

First that the schedules find what they are there for: machines with a broken rule.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import time

import pytest

from kerasdist.collectives.elastic.consensus import Attempt, PaxosParticipant
from kerasdist.collectives.elastic.epochs import Finished, StopReason
from membership_schedules import explore, replay, run
from membership_world import Violation, World

# Seeds of the suite, and those of the soak test in this many parts.
FEW, MANY, PARTS = 3000, 1_000_000, 20


class Lenient(Attempt):
    """Decides with whatever members it is in contact with."""

    def is_quorum(self, voters):
        return True


class Living(Attempt):
    """Counts only the members that aren't proven dead."""

    def is_quorum(self, voters):
        dead = self.request.dead
        members = [m for m in self.request.base.epoch.members if m not in dead]
        twice = 2 * sum(member in voters for member in members)
        return twice > len(members) or (twice == len(members) and members[0] in voters)


class AnyQuorum(PaxosParticipant):
    _attempts = Lenient


class LivingMajority(PaxosParticipant):
    _attempts = Living


class SilentIsDead(PaxosParticipant):
    """Takes silence for a proof of death."""

    def _miss(self, member):
        self._bury(member)


class AnyBallot(PaxosParticipant):
    """Forgets what it has promised."""

    def _on_prepare(self, sender, message):
        self._promised = None
        super()._on_prepare(sender, message)

    def _on_propose(self, sender, message):
        self._promised = message.ballot
        super()._on_propose(sender, message)


class LateResults(PaxosParticipant):
    """Uses a result after it has reported that it hasn't got it."""

    def _finish(self, event):
        if self.suspended and isinstance(event, Finished):
            self.progress = event.progress
        else:
            super()._finish(event)


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (AnyQuorum, "two groups"),
        (LivingMajority, "two decisions of one number"),
        (SilentIsDead, "two groups"),
        (AnyBallot, "two decisions of one number"),
        (LateResults, "Member.* has finished step"),
    ],
)
def test_random_schedules_find_a_broken_rule(broken, what):
    """And say by which few operations it shows."""
    expected = rf"(?s){what}.*\nseed \d+, .* (\d+) operations, of these suffice:\n(.*)"
    for seed in range(20_000):
        try:
            run(seed, machine=broken)
        except Violation as violation:
            if found := re.match(expected, str(violation)):
                break
    else:
        pytest.fail("no schedule shows it")
    shrunk = list(operations(found[2].replace("\n", ";")))
    assert replay(seed, shrunk, machine=broken)
    assert len(shrunk) < int(found[1]) / 2


def test_few_random_schedules():
    ends = collections.Counter(run(seed)[1] for seed in range(FEW))
    # Else most would show nothing.
    assert ends["trains"] > FEW / 2


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_random_schedules(part):
    begun = time.process_time()
    counts = collections.Counter()
    for seed in range(part * MANY // PARTS, (part + 1) * MANY // PARTS):
        world, end = run(seed)
        counts[end] += 1
        counts.update(world.counts)
    print(f"{dict(counts)} in {time.process_time() - begun:.0f} s of CPU")


LOSSES = [("kill", 0), ("kill", 1), ("kill", 2)]
FALSE_ALARMS = [("silent", 1, 0), ("silent", 0, 1)]


@pytest.mark.parametrize(
    ("size", "losses", "options"),
    [
        (3, LOSSES, {"until": 2}),
        (2, [("kill", 0), *FALSE_ALARMS], {"most": 2}),
        pytest.param(
            *(3, LOSSES, {"most": 2}),
            marks=[pytest.mark.soak, pytest.mark.timeout(7200)],
        ),
    ],
    ids=["one loss", "a death and false alarms", "two losses"],
)
def test_losses_at_any_moment_in_any_order(size, losses, options):
    states, ends = explore(World(size), losses=losses, **options)
    assert states > 1000
    assert ends > 10


def test_exploring_finds_a_broken_rule():
    with pytest.raises(Violation, match=r"^two "):
        explore(World(2, machine=AnyQuorum), losses=FALSE_ALARMS, most=2)


# Schedules that chance hardly ever finds, each of which shows why a rule is needed.


class Forgetful(Attempt):
    """Proposes its own decision, whatever was accepted before."""

    def earlier(self):
        return None


class OwnProposals(PaxosParticipant):
    _attempts = Forgetful


class OtherEpoch(PaxosParticipant):
    """Chooses as if its epoch were another one, that of `_changed`."""

    def _choice(self, attempt):
        decision = self.decision
        epoch = self._changed(decision.epoch)
        self.decision = dataclasses.replace(decision, epoch=epoch)
        try:
            return super()._choice(attempt)
        finally:
            self.decision = decision


class NoElders(OtherEpoch):
    """Counts newcomers as elders."""

    def _changed(self, epoch):
        elders = frozenset(epoch.members)
        return dataclasses.replace(epoch, elders=elders, absent=frozenset())


class ListensToTheDead(PaxosParticipant):
    """Takes messages of dead processes that arrive late."""

    def _receive(self, sender, message):
        dead = self._dead
        self._dead = dead - {sender}
        super()._receive(sender, message)
        self._dead |= dead


class GuestsAnswer(PaxosParticipant):
    """Passes on the decision by which it joined, before all have learned it."""

    def _is_guest(self):
        return False


class GuestsAreBelieved(PaxosParticipant):
    """Learns a newcomer's decision, whatever it has promised."""

    _bound = property(lambda self: None, lambda self, value: None)


class LateProofs(OtherEpoch):
    """Takes a proof of an absent one's death that comes after the last elder's."""

    def _changed(self, epoch):
        return dataclasses.replace(epoch, absent=epoch.absent - self._dead)

    def _stop(self, reason, others=()):
        if reason is not StopReason.NO_ELDER:
            super()._stop(reason, others)


def flow(world, *processes):
    """Deliver all messages among some processes."""
    while any(
        world.do(("deliver", a, b))
        for a in processes
        for b in processes
        if (a, b) in world.lines
    ):
        pass


def operations(text):
    for words in map(str.split, text.split(";")):
        if words:
            yield words[0], *map(int, words[1:])


def script(world, text):
    """Do operations; `flow a b` delivers all messages among a and b."""
    for name, *numbers in operations(text):
        if name == "flow":
            flow(world, *numbers)
        else:
            assert world.do((name, *numbers)), (name, numbers)


# 0 decides 0 1 2, and tells only 1. The others lose 0 and 1 before they learn it, and
# are a majority. The rule "the highest epoch wins" lets both groups train.
HALF_TOLD = """
    silent 0 3; silent 0 4; deliver 0 1; deliver 1 0; deliver 0 2; deliver 2 0;
    deliver 0 1; deliver 1 0; deliver 0 2; deliver 2 0; deliver 0 1; silent 2 0;
    silent 2 1; silent 3 0; silent 3 1; silent 4 0; silent 4 1; flow 2 3 4;
    silent 0 2; silent 1 2; flow 0 1
"""


# 0 excludes 1, which is frozen; 2 joins, and trains with 0. Then 0 dies, 1 wakes up.
AWAKE_AMONG_THE_DEAD = """
    freeze 1; silent 0 1; join 2; apply 2; flow 0 2; work 0; work 0; work 0;
    work 0; flow 0 2; work 2; work 2; work 0; work 2; kill 0; dead 2 0; thaw 1;
    dead 1 0
"""


# 0, 1 and 2 decide 0 1 2 4, and die. 3 and 4, all that live, decide 3 4; but before 4
# learns it, there is the message by which 0 told it the first decision.
TOLD_BY_A_DEAD_ONE = """
    silent 0 3; deliver 0 4; deliver 4 0; flow 0 1 2; kill 0; kill 1; kill 2;
    dead 3 0; dead 3 1; dead 3 2; deliver 3 4; deliver 4 3; deliver 3 4;
    deliver 4 3; flow 0 4
"""


# 0 and 1 decide 0 1 2 3 4, where 4 is new, tell only 4, and die. 2 and 3, all of the
# others that live, decide 2 3; but before 3 learns it, it gets a message of 4.
TOLD_BY_A_GUEST = """
    join 4; apply 4; deliver 4 0; silent 0 1; flow 0 1; timeout 0; flow 0 1;
    deliver 0 2; deliver 0 2; deliver 0 2; deliver 2 0; deliver 2 0;
    deliver 0 3; deliver 0 3; deliver 0 3; deliver 3 0; deliver 3 0; flow 0 1;
    flow 0 4; kill 0; kill 1; dead 2 0; dead 2 1; deliver 2 3; deliver 3 2;
    deliver 2 3; deliver 3 2; dead 4 0; dead 4 1; silent 4 2; silent 4 3;
    flow 4 3
"""


# The same, but 4 asks 3 to let it join.
BELIEVED = TOLD_BY_A_GUEST.replace("silent 4 2", "apply 4").replace("silent 4 3", "")


# 0 decides 0 2, tells 2, which is new, and dies. 1 decides 1 2: of the same number.
TWICE_NEW = """
    join 2; apply 2; deliver 2 1; deliver 2 0; silent 0 1; kill 0; deliver 0 2;
    dead 1 0
"""


# 0 and 1 decide 0 1 2, where 2 has started again; only 2 learns it, before 0 is frozen.
KNOWN_TO_A_GUEST = """
    kill 2; join 2; apply 2; deliver 2 0; silent 0 3; deliver 0 1; deliver 1 0;
    deliver 0 1; deliver 1 0; break 0 1; deliver 0 2; freeze 0
"""


# 0, 2 and 3 decide 2 3 1, where 1 has started again; 0 leaves, and 3, which has
# accepted that, isn't told. Then it promises a ballot of its own, in which 0 and the
# earlier 1 are dead, so that it and 2 may decide alone.
ACCEPTED_BUT_NOT_TOLD = """
    kill 1; join 1; leave 0; deliver 0 2; deliver 0 3; apply 1; deliver 1 0;
    deliver 0 2; deliver 2 0; deliver 0 3; deliver 3 0; deliver 0 2;
    deliver 2 0; deliver 0 3; break 0 3; deliver 0 1; apply 1; deliver 1 2;
    freeze 2; dead 3 0; dead 3 1; silent 3 2
"""


# 0 excludes 1, which is silent, and decides 0 3, where 3 is new: 1 may continue when 0
# is dead.
EXCLUDED = """
    join 3; apply 3; deliver 3 0; break 3 1; silent 0 1; break 0 1; deliver 0 3;
    work 3; work 0; work 3;
"""


# 0 dies; 1 finds it dead, and continues alone: in an epoch of the same number.
TWO_OF_ONE_NUMBER = EXCLUDED + "kill 0; dead 1 0; dead 3 0"


# The same, but 5 joins 1, which then dies, too: 3 and 5 each know that it is dead.
LATE_PROOF = f"""
    {EXCLUDED} kill 0; join 5; apply 5; deliver 5 1; break 5 3; dead 1 0; deliver 1 5;
    work 5; work 1; work 5; kill 1; dead 5 1; dead 5 0; dead 3 1; dead 3 0
"""


def test_a_member_learns_from_a_newcomer_in_which_epoch_it_is():
    world = World(4)
    script(world, KNOWN_TO_A_GUEST)
    assert world.settle(apart=[0, 3]) == "trains"


def test_a_member_learns_from_a_newcomer_what_it_has_accepted():
    world = World(4)
    script(world, ACCEPTED_BUT_NOT_TOLD)
    assert world.processes[3].machine.suspended
    assert world.processes[3].epoch[0] == 0
    assert world.settle(apart=[2]) == "trains"


def test_a_newcomer_stops_when_it_learns_that_the_last_elder_is_dead():
    world = World(2)
    script(world, TWICE_NEW + "; dead 2 0")
    assert world.processes[2].machine.stopped is StopReason.NO_ELDER


def test_those_without_an_elder_join_the_one_that_has_continued():
    world = World(2)
    script(world, TWO_OF_ONE_NUMBER)
    assert world.processes[1].epoch[0] == 1
    assert world.processes[3].machine.stopped is StopReason.NO_ELDER
    assert world.settle() == "trains"


def test_a_newcomer_of_an_epoch_that_has_died_out_gives_it_up():
    world = World(2)
    script(world, TWICE_NEW)
    assert [world.processes[n].epoch[0] for n in (1, 2)] == [1, 1]
    flow(world, 1, 2)
    assert world.processes[2].machine.stopped is StopReason.EXCLUDED
    assert world.settle() == "trains"


@pytest.mark.parametrize(
    ("size", "text", "broken", "what"),
    [
        (5, HALF_TOLD, OwnProposals, "two decisions of one number"),
        (2, AWAKE_AMONG_THE_DEAD, NoElders, "two groups"),
        (5, TOLD_BY_A_DEAD_ONE, ListensToTheDead, "two decisions of one number"),
        (4, TOLD_BY_A_GUEST, GuestsAnswer, "two decisions of one number"),
        (4, BELIEVED, GuestsAreBelieved, "two decisions of one number"),
        (2, LATE_PROOF, LateProofs, "two decisions of one number"),
    ],
)
def test_rare_schedules_find_a_broken_rule(size, text, broken, what):
    with pytest.raises(Violation, match=rf"^{what}"):
        script(World(size, machine=broken), text)
    world = World(size)
    script(world, text)
    assert world.settle() == "trains"


def after_an_exclusion(seed, machine=PaxosParticipant):
    before = operations(EXCLUDED)
    return run(f"{seed} excluded", sizes=(2,), machine=machine, before=before)


def test_random_schedules_after_an_exclusion_find_a_broken_rule():
    with pytest.raises(Violation, match=r"^(no progress|two )"):
        for seed in range(1000):
            after_an_exclusion(seed, LateProofs)


@pytest.mark.parametrize(
    "seeds",
    [
        FEW // 3,
        pytest.param(MANY // 10, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_random_schedules_after_an_exclusion(seeds):
    ends = collections.Counter(after_an_exclusion(seed)[1] for seed in range(seeds))
    assert ends["trains"] > seeds / 2
