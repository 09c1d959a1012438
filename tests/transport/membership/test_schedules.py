"""The agreement under schedules of loss, delay, duplicates, partitions and deaths."""

import collections
import time

import pytest

from kerasdist.collectives.elastic.consensus import Attempt, PaxosParticipant
from kerasdist.collectives.elastic.epochs import Member, StopReason
from membership_world import Violation, World, run

# Seeds of the suite, and those of the soak test in this many parts.
FEW, MANY, PARTS = 1000, 1_000_000, 20


class Lenient(Attempt):
    """Decides with whatever members it is in contact with."""

    def is_quorum(self, voters):
        return True


class AnyQuorum(PaxosParticipant):
    _attempts = Lenient


def test_random_schedules_find_a_broken_rule():
    with pytest.raises(Violation, match=r"(?s)^two .*\nseed \d+, "):
        for seed in range(1000):
            run(seed, machine=AnyQuorum)


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


@pytest.mark.parametrize("lost", range(3))
def test_a_loss_takes_two_round_trips_and_the_news(lost):
    world = World(3)
    world.do(("kill", lost))
    for other in range(3):
        world.do(("dead", other, lost))
    rounds = 0
    while world.lines:
        for (a, b), line in list(world.lines.items()):
            for _ in list(line):
                world.do(("deliver", a, b))
        rounds += 1
    # LOSS and PREPARE cross; PROMISE, PROPOSE, ACCEPTED, DECIDED.
    assert rounds <= 6
    others = tuple(Member(n) for n in range(3) if n != lost)
    for each in world.living():
        assert each.epoch == (1, others)
        assert not each.machine.decision.epoch.absent


# Schedules that chance hardly ever finds: each breaks the agreement without one rule.


def flow(world, *processes):
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
    freeze 1; silent 0 1; join 2; apply 2; flow 0 2; work 0; work 0; flow 0 2;
    work 2; work 2; work 0; work 2; kill 0; dead 2 0; thaw 1; dead 1 0
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
    ("size", "text"),
    [
        *((5, HALF_TOLD), (2, AWAKE_AMONG_THE_DEAD), (5, TOLD_BY_A_DEAD_ONE)),
        *((4, TOLD_BY_A_GUEST), (4, BELIEVED), (2, LATE_PROOF)),
    ],
)
def test_rare_schedules(size, text):
    world = World(size)
    script(world, text)
    assert world.settle() == "trains"


def test_random_schedules_after_an_exclusion():
    ends = collections.Counter(
        run(f"{seed} excluded", sizes=(2,), before=operations(EXCLUDED))[1]
        for seed in range(FEW // 2)
    )
    assert ends["trains"] > FEW / 4
