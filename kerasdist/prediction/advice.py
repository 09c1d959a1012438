"""The choice of a strategy: each one's steps are simulated, the fastest is proposed.

Among choices that are nearly as fast the one that changes least is proposed: one
process before several workers, fewer workers before more, plain strategies before those
with more arguments. A choice that changes the numbers of one process is proposed only
where that was allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from kerasdist.placement.plan import human_bytes
from kerasdist.prediction.profile import LOOPBACK, Profile, Stages
from kerasdist.prediction.simulation import Prediction, Setup, predict

# A choice that gives this part less than the fastest is as good, if it's simpler.
_AS_GOOD = 0.05
# Speeds that differ by more are unequal.
_UNEQUAL = 0.05
_LOCAL_STEPS = 8
# Steps that an asynchronous worker may be ahead of the slowest.
_STALENESS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a job.

    Attributes:
        profiles: By the name of a compressor the step with it; "": without one.
        setup: Its link, servers and speeds.
        workers: The largest number of workers.
        memory: Bytes of a device; None: not limited.
    """

    profiles: Mapping[str, Profile]
    setup: Setup
    workers: int
    memory: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """A strategy with its arguments, and what it gives.

    Attributes:
        strategy: As it's written in a script.
        options: Of `kerasdist run`, beside the hosts.
        workers: Number of workers.
        batch_size: Rows of all workers.
        exact: Whether its numbers are those of one process.
        predicted: Its steps; None if it was ruled out before.
        verdict: "proposed", or by which figure it was ruled out.
    """

    strategy: str
    options: str
    workers: int
    batch_size: int
    exact: bool = True
    predicted: Prediction | None = None
    verdict: str = ""

    @property
    def speed(self) -> float:
        """Examples per second; 0 if it was ruled out."""
        return self.predicted.examples_per_s if self.predicted else 0.0


def advise(facts: Facts, *, lossy: bool = False) -> list[StrategyChoice]:
    """Return all choices with their verdicts, the proposed one first.

    Args:
        facts: What is known of the job.
        lossy: Whether the proposed one may change the numbers of one process.

    Returns:
        The others are in the order of their speed.
    """
    found = list(_choices(facts))
    allowed = [each for each in found if each.speed and (each.exact or lossy)]
    if not allowed:
        return found
    fastest = max(each.speed for each in allowed)
    # The first in the order of `_choices`, which begins with what changes least.
    best = next(e for e in allowed if e.speed >= (1 - _AS_GOOD) * fastest)
    others = [each for each in found if each is not best]
    others.sort(key=lambda each: -each.speed)
    return [
        dataclasses.replace(best, verdict="proposed"),
        *(_judged(each, best, allowed=each.exact or lossy) for each in others),
    ]


def _judged(
    choice: StrategyChoice, best: StrategyChoice, *, allowed: bool
) -> StrategyChoice:
    """Return a choice with the figure by which it was ruled out."""
    if choice.predicted is None:
        return choice
    part = choice.speed / best.speed - 1
    if not allowed:
        verdict = f"changes numbers; {part:+.0%}"
    elif part > -_AS_GOOD:
        verdict = f"as fast ({part:+.0%}), and changes more"
    else:
        verdict = f"{part:+.0%}: {choice.predicted.limit}"
    return dataclasses.replace(choice, verdict=verdict)


def _choices(facts: Facts) -> Iterator[StrategyChoice]:
    """Yield all choices, those first that change least."""
    plain = facts.profiles[""]
    needed = plain.stages[0].memory if plain.stages else 0.0
    fits = facts.memory is None or needed <= facts.memory
    too_large = ""
    if not fits:
        too_large = (
            f"needs {human_bytes(needed)} of {human_bytes(facts.memory or 0)} memory"
        )
    counts = _counts(facts.workers)
    for workers in counts:
        for strategy, options, changes, name, exact in _ways(facts, workers):
            choice = StrategyChoice(
                strategy=strategy,
                options=f"-n {workers}{options}",
                workers=workers,
                batch_size=round(plain.rows * workers),
                exact=exact,
                verdict=too_large,
            )
            if fits:
                setup = dataclasses.replace(facts.setup, **changes)
                found = predict(facts.profiles[name], setup, workers)
                choice = dataclasses.replace(choice, predicted=found)
            yield choice
    for workers in () if fits else counts:
        yield from _placed(facts, workers)


def _counts(most: int) -> list[int]:
    """Return numbers of workers: the powers of two, and the largest."""
    return sorted({*(1 << n for n in range(most.bit_length())), most})


def _ways(
    facts: Facts, workers: int
) -> Iterator[tuple[str, str, dict[str, Any], str, bool]]:
    """Yield text, options, changes of the setup, compressor and whether it's exact."""
    ring = "kerasdist.RingStrategy"
    yield f"{ring}()", "", {}, "", True
    if workers == 1:
        return
    speeds = facts.setup.speeds_of(workers)
    if speeds.max() / speeds.min() - 1 > _UNEQUAL:
        yield f'{ring}(balance="measured")', "", {"balance": True}, "", True
    servers = {"strategy": "sync"}
    more = f" --ps {facts.setup.servers}"
    yield "kerasdist.ParameterServerStrategy()", more, servers, "", True
    for name in facts.profiles:
        if name:
            yield f'{ring}(compression="{name}")', "", {}, name, False
    local = {"local_steps": _LOCAL_STEPS}
    yield f"{ring}(local_steps={_LOCAL_STEPS})", "", local, "", False
    servers = {"strategy": "async"}
    text = f'kerasdist.ParameterServerStrategy("async", max_staleness={_STALENESS})'
    yield text, more, servers, "", False


def _placed(facts: Facts, workers: int) -> Iterator[StrategyChoice]:
    """Yield the divisions into stages, of a model that doesn't fit on one device."""
    plain = facts.profiles[""]
    for stages in plain.stages:
        if stages.devices == 1:
            continue
        arguments = f'"auto", micro_batches={stages.micro_batches}'
        kind = "RingStrategy(placement=" if workers > 1 else "ModelParallelStrategy("
        choice = StrategyChoice(
            strategy=f"kerasdist.{kind}{arguments})",
            options=f"-n {workers}",
            workers=workers,
            batch_size=round(plain.rows * workers),
        )
        if facts.memory is not None and stages.memory > facts.memory:
            verdict = f"needs {human_bytes(stages.memory)} of a device's memory"
            yield dataclasses.replace(choice, verdict=verdict)
            continue
        found = predict(_of_stages(plain, stages), facts.setup, workers)
        yield dataclasses.replace(choice, predicted=found)


def _of_stages(profile: Profile, stages: Stages) -> Profile:
    """Return the step of a worker that divides its model into stages.

    All wait for the slowest; the pipeline is empty while it fills and drains.
    """
    parts = stages.micro_batches
    filled = (parts + stages.devices - 1) / parts * stages.share
    moved = 2 * stages.moved * LOOPBACK.byte
    return dataclasses.replace(
        profile,
        compute=tuple(each * filled + moved for each in profile.compute),
        update=profile.update * stages.share,
    )
