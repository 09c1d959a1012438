"""Schedules of what happens to workers that agree on epochs: drawn from seeds.

A schedule is a list of operations of a `World`. `run` draws one from a seed, and
`World.settle`s.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from kerasdist.collectives.elastic.consensus import PaxosParticipant
from membership_world import Operation, Violation, World

# How many workers a schedule starts with, and how many operations it has.
SIZES = (2, 3, 3, 4, 4, 5, 5)
LENGTHS = (40, 80, 160)

_ALWAYS = {"deliver": 40.0, "work": 8.0}
_SOMETIMES = {
    "look": 6.0,
    "silent": 1.0,
    "split": 2.0,
    "unite": 1.0,
    "timeout": 4.0,
    "kill": 1.0,
    "freeze": 2.0,
    "thaw": 2.0,
    "cut": 1.0,
    "heal": 1.0,
    "break": 2.0,
    "stray": 4.0,
    "again": 1.5,
    "join": 2.0,
    "apply": 3.0,
    "leave": 0.3,
    "giveup": 0.05,
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
    names, sums, total = list(weights), [], 0.0
    for weight in weights.values():
        sums.append(total := total + weight)
    slow: dict[tuple[int, int], bool] = {}
    slowness = chance.choice((0, 0.2, 0.5))
    strike = chance.choice((0, 0.2, 0.6))
    epochs = 0
    for name in chance.choices(names, cum_weights=sums, k=length):
        if epochs < world.counts["epochs"]:
            # One is in a new epoch, the others may not have heard of it.
            epochs = world.counts["epochs"]
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
        elif name == "break":
            if world.lines:
                yield name, *chance.choice(list(world.lines))
        elif name == "again":
            if world.last:
                yield name, *chance.choice(list(world.last))
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
    lengths: tuple[int, ...] = LENGTHS,
    machine: type[PaxosParticipant] = PaxosParticipant,
    before: Sequence[Operation] = (),
) -> tuple[World, str]:
    """Run the schedule of a seed, then `settle`."""
    world, apart = _start(seed, sizes, machine)
    size, done = len(world.processes), []
    chance = random.Random(f"{seed} schedule")
    try:
        for operation in before:
            done.append(operation)
            world.do(operation)
        for operation in draw(world, chance, chance.choice(lengths)):
            done.append(operation)
            world.do(operation)
        return world, world.settle(apart)
    except Violation as violation:
        lines = "\n".join(" ".join(map(str, each)) for each in done)
        raise Violation(
            f"{violation}\nseed {seed!r}, {size} workers, at last apart {apart}:\n"
            f"{lines}"
        ) from None


def _start(
    seed: int | str, sizes: tuple[int, ...], machine: type[PaxosParticipant]
) -> tuple[World, set[int]]:
    chance = random.Random(f"{seed} start")
    size = chance.choice(sizes)
    min_workers = 2 if chance.random() < 0.1 else 1
    apart: set[int] = set()
    if chance.random() < 0.5:
        apart = {n for n in range(size) if chance.random() < 0.35}
    return World(size, min_workers=min_workers, machine=machine), apart
