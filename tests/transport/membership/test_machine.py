"""What happens in a change; see `test_schedules.py` for what must never happen."""

import pytest

from kerasdist.collectives.elastic.consensus import PaxosParticipant
from kerasdist.collectives.elastic.epochs import (
    Apply,
    Excluded,
    Finished,
    GiveUp,
    Install,
    Leave,
    Member,
    Progress,
    Send,
    Stop,
    StopReason,
    Suspend,
    TooLate,
)
from membership_world import COLLECTIVES, World


class Recorded(World):
    """Also keeps the outputs."""

    def __init__(self, size, **kwargs):
        self.outputs = {}
        super().__init__(size, **kwargs)

    def call(self, process, event):
        outputs = super().call(process, event)
        self.outputs.setdefault(process.me.id, []).extend(outputs)
        return outputs

    def quiet(self):
        """Deliver all there is, a round at a time; return the number of rounds."""
        rounds = 0
        while self.lines:
            for (a, b), line in list(self.lines.items()):
                for _ in list(line):
                    self.do(("deliver", a, b))
            rounds += 1
        return rounds

    def train(self, steps, *, of=None):
        """Train, in lockstep, with the messages that come."""
        for _ in range(steps * (COLLECTIVES + 1)):
            for n in of or list(self.processes):
                self.do(("work", n))
            self.quiet()

    def kinds(self, n, *kinds):
        return [each for each in self.outputs.get(n, []) if isinstance(each, kinds)]

    def lose(self, n, *, to=None):
        self.do(("kill", n))
        for other in to if to is not None else self.processes:
            self.do(("dead", other, n))

    def apply(self, n):
        """Process n asks to join."""
        self.do(("join", n))
        self.do(("apply", n))

    def flow(self, lines=None, rounds=1):
        """Deliver what can be delivered on these lines, or on all that there are."""
        for _ in range(rounds):
            for line in lines or list(self.lines):
                while self.do(("deliver", *line)):
                    pass

    def progress(self):
        return {each.machine.progress.step for each in self.living()}

    def groups(self):
        return {
            each.me.id: [member.id for member in each.epoch[1]]
            for each in self.living()
            if each.epoch
        }


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_loss_takes_two_round_trips_and_the_news(lost):
    world = Recorded(3)
    world.train(1)
    world.lose(lost)
    # LOSS and PREPARE cross; PROMISE, PROPOSE, ACCEPTED, DECIDED.
    assert world.quiet() <= 6
    others = [n for n in range(3) if n != lost]
    assert world.groups() == {n: others for n in others}
    for n in others:
        assert world.kinds(n, Suspend, Install, Stop)[0] == Suspend()
        (installed,) = world.kinds(n, Install)
        assert installed.decision.epoch.number == 1
        assert not installed.decision.epoch.absent


def test_a_worker_joins_and_nothing_is_aborted():
    world = Recorded(2)
    world.train(1)
    world.apply(5)
    world.quiet()
    # Announced, training goes on.
    assert world.groups() == {0: [0, 1], 1: [0, 1]}
    world.train(4)
    assert world.groups() == {0: [0, 1, 5], 1: [0, 1, 5], 5: [0, 1, 5]}
    verdict = world.kinds(5, Install)[0].decision.verdict
    assert verdict.progress == Progress(3)
    assert verdict.holders == verdict.furthest == (Member(0), Member(1))
    assert len(world.progress()) == 1
    assert not world.kinds(0, TooLate)
    assert not world.kinds(1, TooLate)


def test_a_result_of_an_earlier_epoch_is_discarded():
    world = Recorded(2)
    world.lose(1)
    machine = world.processes[0].machine
    assert not machine.suspended
    assert machine.handle(Finished(0, Progress(1))) == (TooLate(),)
    assert machine.handle(Finished(1, Progress(1))) == ()
    assert machine.progress == Progress(1)


def test_a_task_that_starts_again_proves_its_earlier_process_dead():
    world = Recorded(2)
    world.train(1)
    world.do(("kill", 1))
    world.apply(1)
    world.quiet()
    assert world.processes[0].epoch[1] == (Member(0), Member(1, 1))


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_worker_leaves_after_a_step_and_nothing_is_done_again(leaver):
    world = Recorded(3)
    world.train(1)
    world.do(("leave", leaver))
    world.train(4)
    others = [n for n in range(3) if n != leaver]
    assert world.groups() == {n: others for n in others}
    assert world.kinds(leaver, Stop) == [Stop(StopReason.LEFT)]
    (installed,) = world.kinds(1, Install)
    assert installed.decision.verdict.furthest == tuple(map(Member, others))
    assert installed.decision.verdict.progress == Progress(3)
    assert not any(world.kinds(n, TooLate) for n in range(3))
    # It has sent that it stopped, so none waits for a proof of that.
    assert installed.decision.epoch.absent == {Member(leaver)}
    world.lose(others[0])
    assert not world.processes[others[1]].machine.decision.epoch.absent


def test_a_worker_takes_the_place_of_one_that_leaves():
    world = Recorded(1)
    world.do(("leave", 0))
    world.apply(1)
    world.train(8)
    assert world.groups() == {1: [1]}
    assert world.kinds(0, Stop) == [Stop(StopReason.LEFT)]
    assert not world.kinds(0, TooLate)


def test_the_smaller_side_of_a_partition_stops():
    world = Recorded(5)
    for a in (0, 1):
        for b in (2, 3, 4):
            world.do(("cut", a, b))
            world.do(("silent", a, b))
            world.do(("silent", b, a))
    world.flow(rounds=3)
    assert world.groups()[2] == [2, 3, 4]
    assert world.processes[0].machine.suspended
    for n in (0, 1):
        world.do(("giveup", n))
        (stop,) = world.kinds(n, Stop)
        assert stop.reason is StopReason.NO_QUORUM
        assert stop.missing == (Member(2), Member(3), Member(4))


def test_a_frozen_worker_is_excluded_and_joins_again():
    world = Recorded(3)
    world.train(2)
    world.do(("freeze", 1))
    world.do(("silent", 0, 1))
    world.do(("silent", 2, 1))
    world.flow(rounds=4)
    assert world.groups()[0] == [0, 2]
    world.do(("thaw", 1))
    world.quiet()
    assert world.kinds(1, Stop)[0].reason is StopReason.EXCLUDED
    world.apply(1)
    world.train(5)
    assert world.processes[0].epoch[1] == (Member(0), Member(2), Member(1, 1))
    assert len(world.progress()) == 1


def without_1_and_with_2():
    """0 has excluded 1, which is silent, and trains with 2, which is new."""
    world = Recorded(2)
    for a, b in [(0, 1), (1, 0)]:
        world.do(("cut", a, b))
    world.do(("silent", 0, 1))
    world.apply(2)
    for _ in range(20):
        for n in (0, 2):
            world.do(("work", n))
        world.flow([(2, 0), (0, 2)])
    world.lines.clear()
    epoch = world.processes[2].machine.decision.epoch
    assert epoch.members == (Member(0), Member(2))
    assert (epoch.elders, epoch.absent) == ({Member(0)}, {Member(1)})
    return world


@pytest.mark.parametrize("dead", [False, True])
def test_without_an_elder_the_others_stop_since_an_absent_one_may_continue(dead):
    world = without_1_and_with_2()
    if dead:
        # A proof of that comes too late after the death of the last elder.
        world.lose(1, to=[])
    world.lose(0, to=[2])
    assert world.kinds(2, Stop) == [Stop(StopReason.NO_ELDER, (Member(1),))]
    if not dead:
        # It does, and the other one joins it.
        assert world.settle() == "trains"
        assert world.groups() == {n: [1, 2] for n in (1, 2)}


def test_only_an_elder_excludes_an_absent_one():
    world = without_1_and_with_2()
    world.do(("silent", 2, 0))
    world.do(("silent", 0, 2))
    for n, excludes in [(2, False), (0, True)]:
        assert (Send(Member(1), Excluded(2)) in world.kinds(n, Send)) is excludes


def test_a_proof_that_an_absent_one_is_dead_makes_elders_of_all():
    world = without_1_and_with_2()
    world.lose(1, to=[0])
    world.train(4, of=[0, 2])
    epoch = world.processes[2].machine.decision.epoch
    assert (epoch.elders, epoch.absent) == ({Member(0), Member(2)}, set())
    assert not world.kinds(2, TooLate)
    world.lose(0)
    assert world.groups() == {2: [2]}


def test_what_changes_nothing():
    # A time-out of training that goes on.
    machine = World(2).processes[0].machine
    assert machine.handle(GiveUp()) == ()
    assert machine.stopped is None
    # Anything that comes to one that has stopped.
    world = World(2)
    world.do(("silent", 1, 0))
    machine = world.processes[1].machine
    machine.handle(GiveUp())
    assert machine.stopped is StopReason.NO_QUORUM
    assert machine.handle(Leave()) == ()
    # One that hasn't joined yet only applies.
    machine = PaxosParticipant(Member(4))
    assert len(machine.handle(Apply((Member(0), Member(1))))) == 2
    assert machine.handle(Finished(0, Progress(1))) == ()
