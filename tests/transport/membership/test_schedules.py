"""The agreement under schedules of loss, delay, duplicates, partitions and deaths.

First that the schedules find what they are there for: machines with a broken rule.
"""

from __future__ import annotations

import collections
import re
import time

import pytest

from kerasdist.transport.membership.attempt import Attempt
from kerasdist.transport.membership.events import Finished
from kerasdist.transport.membership.machine import Machine
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


class AnyQuorum(Machine):
    _attempts = Lenient


class LivingMajority(Machine):
    _attempts = Living


class SilentIsDead(Machine):
    """Takes silence for a proof of death."""

    def _miss(self, member):
        self._bury(member)


class AnyBallot(Machine):
    """Forgets what it has promised."""

    def _on_prepare(self, sender, message):
        self._promised = None
        super()._on_prepare(sender, message)

    def _on_propose(self, sender, message):
        self._promised = message.ballot
        super()._on_propose(sender, message)


class LateResults(Machine):
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
    words = [line.split() for line in found[2].split("\n")]
    operations = [(name, *map(int, numbers)) for name, *numbers in words]
    assert replay(seed, operations, machine=broken)
    assert len(operations) < int(found[1]) / 2


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
