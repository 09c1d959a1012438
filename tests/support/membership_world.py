"""Workers that agree on epochs, in one thread, with lines of memory.

A `World` has processes with a membership machine each, lines between them, and a
training job of collectives. What happens is an operation, a tuple; a
schedule is a list of them: `run` draws one from a seed. One that can't be done is left
out.

    deliver a b   the first message of the line from a to b
    again a b     the last message that came from a to b comes once more, some time
    break a b     the line from a to b: its messages are lost, or come some time
    stray n       the n-th of those that come some time comes
    cut a b       no message between a and b, until `heal`
    work a        a fetches what it lacks, or finishes a collective that all have begun
    kill, freeze, thaw a
    dead a b      a learns that b is dead; only if it is
    silent a b    a finds b silent; also if it isn't
    timeout a, giveup a
    join n        process n starts, or starts again
    apply a       a asks to join
    leave a       a wants to leave

After each one: one verdict per epoch, no two groups that can train, nothing lost that
a survivor has finished. `settle` shows progress: without further failures, each group
that is a quorum trains.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kerasdist.collectives.elastic import epochs
from kerasdist.collectives.elastic.consensus import PaxosParticipant
from kerasdist.collectives.elastic.epochs import (
    Decision,
    Member,
    Message,
    TooLate,
)

Operation = tuple[Any, ...]  # a name, and numbers of processes

ROUNDS = 8  # of time-outs, until progress without failures
_STEPS = {
    "timeout": PaxosParticipant.retry,
    "giveup": PaxosParticipant.give_up,
    "leave": PaxosParticipant.leave,
}
# Why a process has stopped that starts again.
REJOINING = (epochs.StopReason.EXCLUDED, epochs.StopReason.NO_ELDER)


class Violation(AssertionError):
    """Something happened that must not."""


class Process:
    def __init__(self, machine: PaxosParticipant) -> None:
        self.machine = machine
        self.me = machine.me
        self.alive = True
        self.frozen = False
        self.done = 0  # collectives of this epoch
        # From a collective to a number for its result.
        self.results: dict[int, int] = {0: 0} if machine.decision else {}

    @property
    def epoch(self) -> tuple[int, tuple[Member, ...]] | None:
        decision = self.machine.decision
        return (decision.epoch.number, decision.epoch.members) if decision else None


class World:
    """Processes 0 to `size` - 1 in their first epoch, and those that join."""

    def __init__(
        self,
        size: int,
        *,
        min_workers: int = 1,
        machine: type[PaxosParticipant] = PaxosParticipant,
    ) -> None:
        self.new = machine
        self.min_workers = min_workers
        first = epochs.first_decision(tuple(Member(n) for n in range(size)))
        self.processes = {
            n: Process(machine(Member(n), first, min_workers=min_workers))
            for n in range(size)
        }
        self.lines: dict[tuple[int, int], list[tuple[Member, Member, Message]]] = {}
        self.last: dict[tuple[int, int], tuple[Member, Member, Message]] = {}
        self.stray: list[tuple[Member, Member, Message]] = []
        self.cuts: set[tuple[int, int]] = set()
        self.gone: set[Member] = set()
        # By epoch: how many collectives a member has begun.
        self.begun: dict[object, dict[Member, int]] = {}
        self.verdicts: dict[object, Decision] = {}
        self.latest = 0  # the process that was the last one to install an epoch
        self.counts = {"epochs": 0, "stops": 0, "committed": 0}

    # Operations.

    def do(self, operation: Operation) -> bool:
        name, *args = operation
        if name in _STEPS:
            return self._simple(*args, _STEPS[name])
        return bool(getattr(self, f"_{name}")(*args))

    def _living(self, n: int) -> Process | None:
        process = self.processes.get(n)
        return process if process and process.alive and not process.frozen else None

    def reaches(self, a: int, b: int) -> bool:
        return (min(a, b), max(a, b)) not in self.cuts

    def _deliver(self, a: int, b: int) -> bool:
        line = self.lines.get((a, b))
        if not line or not self.reaches(a, b) or self.processes[b].frozen:
            return False
        item = line.pop(0)
        if not line:
            del self.lines[a, b]
        self.last[a, b] = item
        self._hand(item)
        return True

    def _hand(self, item: tuple[Member, Member, Message]) -> None:
        sender, to, message = item
        process = self.processes[to.id]
        if process.alive and process.me == to:
            self.call(process, PaxosParticipant.receive, sender, message)

    def _again(self, a: int, b: int) -> bool:
        if (a, b) in self.last:
            self.stray.append(self.last[a, b])
        return (a, b) in self.last

    def _break(self, a: int, b: int) -> bool:
        line = self.lines.pop((a, b), [])
        self.stray += line
        return bool(line)

    def _stray(self, n: int) -> bool:
        if not self.stray:
            return False
        item = self.stray[n % len(self.stray)]
        if self.processes[item[1].id].frozen:
            return False
        self.stray.remove(item)
        self._hand(item)
        return True

    def _cut(self, a: int, b: int) -> bool:
        self.cuts.add((min(a, b), max(a, b)))
        return True

    def _heal(self, a: int, b: int) -> bool:
        self.cuts.discard((min(a, b), max(a, b)))
        return True

    def _kill(self, a: int) -> bool:
        process = self.processes.get(a)
        if alive := bool(process and process.alive):
            self._end(process)
        return alive

    def _end(self, process: Process) -> None:
        process.alive = process.frozen = False
        self.gone.add(process.me)

    def _freeze(self, a: int) -> bool:
        if process := self._living(a):
            process.frozen = True
        return process is not None

    def _thaw(self, a: int) -> bool:
        process = self.processes.get(a)
        if frozen := bool(process and process.frozen):
            process.frozen = False
        return frozen

    def _dead(self, a: int, b: int) -> bool:
        process, other = self._living(a), self.processes.get(b)
        if process is None or other is None or a == b:
            return False
        # Also what it was before it started again.
        for incarnation in range(other.me.incarnation + 1):
            if (member := Member(b, incarnation)) in self.gone:
                self.call(process, PaxosParticipant.bury, member)
        return True

    def _silent(self, a: int, b: int) -> bool:
        other = self.processes.get(b)
        return (
            a != b and bool(other) and self._simple(a, PaxosParticipant.miss, other.me)
        )

    def _simple(self, a: int, step: Callable[..., None], *args: Any) -> bool:
        if process := self._living(a):
            self.call(process, step, *args)
        return process is not None

    def _join(self, n: int) -> bool:
        process = self.processes.get(n)
        if process is not None and process.alive:
            return False
        incarnation = process.me.incarnation + 1 if process else 0
        machine = self.new(Member(n, incarnation), min_workers=self.min_workers)
        self.processes[n] = Process(machine)
        return True

    def _apply(self, a: int) -> bool:
        living = tuple(each.me for each in self.processes.values() if each.alive)
        others = tuple(m for m in living if m.id != a)
        return self._simple(a, PaxosParticipant.apply, others)

    def _work(self, a: int) -> bool:
        process = self._living(a)
        if process is None or not process.epoch:
            return False
        machine, epoch = process.machine, process.epoch
        if self._lacks(process):
            return self._fetch(process)
        begun = self.begun.setdefault(epoch, {})
        moved = process.me not in begun and not machine.suspended
        if moved:
            begun[process.me] = 1
        number = process.done + 1
        # Also while it is suspended: the result may be there already.
        if all(begun.get(member, 0) >= number for member in epoch[1]):
            self._finish(process, (machine.progress or 0) + 1)
            if not machine.suspended and process.epoch == epoch:
                begun[process.me] = process.done + 1
            return True
        return moved

    def _lacks(self, process: Process) -> bool:
        machine = process.machine
        wanted = machine.decision.verdict.progress if machine.decision else 0
        return machine.progress is None or machine.progress < wanted

    def _fetch(self, process: Process) -> bool:
        machine = process.machine
        decision, old = machine.decision, machine.progress
        if decision is None:
            return False
        wanted = decision.verdict.progress
        for member in decision.verdict.furthest:
            holder = self._living(member.id)
            if (
                holder is not None
                and holder.me == member
                and holder.epoch == process.epoch
                and not self._lacks(holder)
                and self.reaches(member.id, process.me.id)
            ):
                step = PaxosParticipant.finish
                outputs = self.call(process, step, decision.epoch.number, wanted, True)
                if TooLate() in outputs or not process.alive:
                    return True
                theirs = holder.results
                if old is None:
                    process.results = {n: theirs[n] for n in theirs if n <= wanted}
                same = not wanted or process.results[wanted - 1] == theirs[wanted - 1]
                self.must(same, f"{process.me} and {member} differ before {wanted}")
                process.results[wanted] = theirs[wanted]
                return True
        return False

    def _finish(self, process: Process, number: int) -> None:
        epoch = process.epoch
        # Before a plan that it fulfils: that may end the epoch.
        process.done += 1
        process.results[number] = hash((process.results[number - 1], number, epoch))
        of_epoch = epoch[0] if epoch else 0
        if TooLate() in self.call(process, PaxosParticipant.finish, of_epoch, number):
            process.done -= 1
            del process.results[number]
        else:
            self.counts["committed"] += 1

    # The machine, and what must hold.

    def call(
        self, process: Process, step: Callable[..., None], *args: Any
    ) -> tuple[object, ...]:
        """Let a process' machine do a step: a method of `PaxosParticipant`."""
        machine = process.machine
        outputs = machine.handle(step, machine, *args)
        for output in outputs:
            if type(output) is epochs.Send:
                to = output.to
                known = self.processes.get(to.id)
                if known and known.me == to and known.alive:
                    item = (process.me, to, output.message)
                    self.lines.setdefault((process.me.id, to.id), []).append(item)
            elif type(output) is epochs.Install:
                self._installed(process, output.decision)
            elif type(output) is epochs.Stop:
                self.counts["stops"] += 1
                self._end(process)
            elif type(output) is not epochs.Suspend and type(output) is not TooLate:
                raise Violation(f"unknown output {output}")
        return outputs

    def must(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(what)

    def _installed(self, process: Process, decision: Decision) -> None:
        epoch, verdict = decision.epoch, decision.verdict
        me, number = process.me, max(process.results, default=None)
        self.counts["epochs"] += 1
        self.latest = me.id
        self.must(me in epoch.members, f"{me} is in an epoch without it: {epoch}")
        if me in epoch.newcomers:
            process.results = {}
        elif number is not None:
            last = verdict.progress
            self.must(
                last - 1 <= number <= last,
                f"{me} has finished {number}, the verdict is {verdict}",
            )
        process.done = 0
        operable = self._operable(decision)
        for other in self.living():
            theirs = other.machine.decision
            if theirs is None or theirs is decision or theirs == decision:
                continue
            one_number = theirs.epoch.number == epoch.number
            if one_number and not self._doomed(theirs) and not self._doomed(decision):
                raise Violation(f"two decisions: {me} {decision}, {other.me} {theirs}")
            if operable and self._operable(theirs):
                raise Violation(f"two groups: {epoch}; {theirs.epoch}")

    def living(self) -> list[Process]:
        return [each for each in self.processes.values() if each.alive]

    def _at(self, member: Member, decision: Decision) -> Process | None:
        """The living process of the member if that is its present epoch."""
        process = self.processes.get(member.id)
        if process and process.alive and process.me == member:
            theirs = process.machine.decision
            if theirs is decision or theirs == decision:
                return process
        return None

    def _operable(self, decision: Decision) -> bool:
        """Whether all its members live, and are in it."""
        return all(self._at(member, decision) for member in decision.epoch.members)

    def _doomed(self, decision: Decision) -> bool:
        """Whether it can't have a successor: no elder, and it isn't settled."""
        epoch = decision.epoch
        if any(self._at(member, decision) for member in epoch.elders):
            return False
        present = [self._at(member, decision) for member in epoch.members]
        known = any(each and each.machine.confirmed for each in present)
        return not (known and not epoch.absent)

    # Progress.

    def settle(self, apart: Iterable[int] = ()) -> str:
        """Without further failures: all but those `apart` reach each other."""
        apart = {n for n in apart if n in self.processes}
        for process in self.processes.values():
            process.frozen = process.alive and process.me.id in apart
        self.cuts.clear()
        self.stray.clear()
        finished = (step for each in self.living() for step in each.results)
        goal = 2 + max(finished, default=0)
        for number in range(ROUNDS):
            if not any(each.epoch for each in self.living() if not each.frozen):
                return "stops"
            if self._round(apart, goal):
                self.counts["rounds"] = number + 1
                return "trains"
        self._explain(apart)
        for _ in range(3):
            for process in self.living():
                if not process.frozen:
                    self.call(process, PaxosParticipant.give_up)
            self._quiet()
        return "stops"

    def _round(self, apart: set[int], goal: int) -> bool:
        """Everything that happens until a time-out; return whether all train."""
        for n, process in list(self.processes.items()):
            if not process.alive and process.machine.stopped in REJOINING:
                self._join(n)
        for process in self.living():
            if not process.frozen:
                self._apply(process.me.id)
                for n, other in list(self.processes.items()):
                    if other.me.incarnation or not other.alive:
                        self._dead(process.me.id, n)
                    if (n in apart and other.alive) or self._ended(process, other):
                        self._silent(process.me.id, n)
        for _ in range(8):
            self._quiet()
            for n in list(self.processes):
                self._work(n)
        self._quiet()
        active = [each for each in self.living() if not each.frozen]
        if (
            active
            and all(max(each.results, default=0) >= goal for each in active)
            and all(each.epoch == active[0].epoch for each in active)
        ):
            results = [each.results[goal] for each in active]
            self.must(len(set(results)) == 1, f"different results: {results}")
            return True
        for process in active:
            suspended = process.machine.suspended
            self.call(process, PaxosParticipant.retry)
            if suspended:
                self._quiet()
        return False

    def _ended(self, process: Process, other: Process) -> bool:
        """Whether the other has closed the lines of this one's epoch."""
        mine, theirs = process.epoch, other.epoch
        if not (mine and theirs and other.alive) or process.machine.suspended:
            return False
        return other.me in mine[1] and mine[0] < theirs[0]

    def _quiet(self) -> None:
        for _ in range(2000):
            for a, b in list(self.lines):
                if self._deliver(a, b):
                    break
                if self.processes[b].frozen:
                    del self.lines[a, b]
            else:
                return
        raise Violation("messages without end")

    def _explain(self, apart: set[int]) -> None:
        """Raise if those in contact are a quorum, of the newest epoch or of theirs."""
        active = [each for each in self.living() if not each.frozen]
        held = [each.machine.decision for each in active if each.machine.decision]
        newest = max(held, key=lambda decision: decision.epoch.number, default=None)
        for decision in dict.fromkeys(held):
            if self._doomed(decision):
                continue
            members = decision.epoch.members
            # Those in earlier epochs learn the newest one, and none else.
            present = {
                each.me
                for each in active
                if decision == newest or self._at(each.me, decision)
            }
            here = [each for each in active if each.me in members]
            # Those that have the state, and may have a successor.
            useful = {each.me for each in here if each.results} & present
            known = any(each.machine.confirmed for each in here)
            settled = known and not decision.epoch.absent
            elders = set(members) if settled else decision.epoch.elders
            if (
                epochs.is_quorum(present, members, self.gone)
                and useful & elders
                and len(present) >= self.min_workers
            ):
                raise Violation(f"no progress: {present} are a quorum of {decision}")


# Schedules: drawn from seeds.

# How many workers a schedule starts with, and how many operations it has.
SIZES = (2, 3, 3, 4, 4, 5, 5)
LENGTHS = (40, 80, 160)

_ALWAYS = {"deliver": 40.0, "work": 8.0}
_SOMETIMES = {
    **{"look": 6.0, "silent": 1.0, "split": 2.0, "unite": 1.0, "timeout": 4.0},
    **{"kill": 1.0, "freeze": 2.0, "thaw": 2.0, "cut": 1.0, "heal": 1.0, "break": 2.0},
    **{"stray": 4.0, "again": 1.5, "join": 2.0, "apply": 3.0, "leave": 0.3},
    **{"giveup": 0.05},
}


def draw(world: World, chance: random.Random, length: int) -> Iterator[Operation]:
    """Yield operations that fit the world's state; do each before the next one.

    Each schedule leaves out some kinds of them, and favours others ("swarm testing",
    Groce et al., 2012); some of its lines are slow.
    """
    spares = len(world.processes) + chance.choice((0, 1, 2))
    weights = dict(_ALWAYS)
    for name, weight in _SOMETIMES.items():
        weights[name] = weight * chance.choice((0, 1, 1, 3))

    slow: dict[tuple[int, int], bool] = {}
    slowness = chance.choice((0, 0.2, 0.5))
    strike = chance.choice((0, 0.2, 0.6))
    latest = 0
    for name in chance.choices(list(weights), list(weights.values()), k=length):
        if latest < world.counts["epochs"]:
            # One is in a new epoch, the others may not have heard of it.
            latest = world.counts["epochs"]
            if chance.random() < strike:
                yield from _strike(world, chance, world.latest)
        if name == "deliver" and not world.lines:
            yield "work", chance.choice(list(world.processes))
        elif name == "deliver":
            line = chance.choice(list(world.lines))
            if line not in slow:
                slow[line] = chance.random() < slowness
            if slow[line] and chance.random() < 0.9:
                continue
            yield name, *line
        elif name in ("break", "again"):
            if lines := world.lines if name == "break" else world.last:
                yield name, *chance.choice(list(lines))
        elif name == "stray":
            if world.stray:
                yield name, chance.randrange(len(world.stray))
        elif name == "join":
            yield name, chance.randrange(max(spares, 1))
        else:
            everyone = list(world.processes)
            a, b = chance.choice(everyone), chance.choice(everyone)
            if name in ("cut", "heal", "silent"):
                yield name, a, b
            elif name == "look":
                yield from _look(world, a)
            elif name == "split":
                side = {n for n in everyone if chance.random() < 0.5}
                for x in side:
                    for y in world.processes.keys() - side:
                        yield "cut", x, y
            elif name == "unite":
                for x, y in sorted(world.cuts):
                    yield "heal", x, y
            else:
                yield name, a


def _strike(world: World, chance: random.Random, a: int) -> Iterator[Operation]:
    if (name := chance.choice(("kill", "freeze", "cut"))) == "cut":
        for b in world.processes:
            if b != a and chance.random() < 0.7:
                yield name, a, b
    else:
        yield name, a
    for b in list(world.processes):
        if chance.random() < 0.5:
            yield from _look(world, b)


def _look(world: World, a: int) -> Iterator[Operation]:
    for b, other in list(world.processes.items()):
        if not other.alive or other.me.incarnation:
            yield "dead", a, b
        if other.alive and (other.frozen or not world.reaches(a, b)):
            yield "silent", a, b


def run(
    seed: int | str,
    *,
    sizes: tuple[int, ...] = SIZES,
    machine: type[PaxosParticipant] = PaxosParticipant,
    before: Sequence[Operation] = (),
) -> tuple[World, str]:
    chance = random.Random(f"{seed} start")
    size = chance.choice(sizes)
    min_workers = 2 if chance.random() < 0.1 else 1
    some = chance.random() < 0.5
    apart = {n for n in range(size) if some and chance.random() < 0.35}
    world, done = World(size, min_workers=min_workers, machine=machine), []
    chance = random.Random(f"{seed} schedule")
    drawn = draw(world, chance, chance.choice(LENGTHS))
    try:
        for operation in itertools.chain(before, drawn):
            done.append(operation)
            world.do(operation)
        return world, world.settle(apart)
    except Violation as violation:
        lines = "\n".join(" ".join(map(str, each)) for each in done)
        raise Violation(
            f"{violation}\nseed {seed!r}, {size} workers, then apart {apart}:\n{lines}"
        ) from None
