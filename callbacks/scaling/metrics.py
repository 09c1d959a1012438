"""The figures of a window of steps of all workers: pure functions of numbers."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from kerasdist.strategies.measure.communication import StepTimes

PHASES = ("input", "compute", "pack", "communicate", "wait", "update", "outside")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one window; times are means over its steps and workers.

    Attributes:
        workers: Number of workers.
        steps: Number of steps; where workers don't wait for each other, of all of them.
        examples_per_second: Samples per second of all workers.
        by_rank: Samples per second of each worker, by rank.
        step_seconds: Seconds of a step; the sum of `phases`.
        phases: Seconds of a step's parts, by the names in `PHASES`.
        busy: By rank the seconds of a step in which the worker doesn't communicate.
        slowest: The rank with the most busy seconds; None for one worker.
        lag: Its busy seconds minus the median of the others'.
        slow_part: The phase in which that rank lags most; "" for one worker.
        global_batch: Samples of a step.
        bytes_per_step: Bytes that a worker sends in a step, mean over the workers; of a
            worker alone those between its devices.
        bandwidth: Bytes per second that a worker sends while it communicates, of the
            worker that waits least; 0 if nothing is sent.
        link: The same for a single buffer, on an idle machine; None if it wasn't
            measured.
        baseline: Examples per second of one worker, or of one device of a worker; None
            if they aren't known.
        devices: How many devices the worker has, if the baseline is that of one device.
        in_step: Whether workers take each step together.
        arrays: Whether the batches are rows of arrays.
        staleness: Number of reads of weights, by their staleness in steps.
        idle: By stage the share of a step in which it has nothing to do, 0 to 1.
    """

    workers: int
    steps: float
    examples_per_second: float
    by_rank: Mapping[int, float]
    step_seconds: float
    phases: Mapping[str, float]
    busy: Mapping[int, float]
    slowest: int | None = None
    lag: float = 0.0
    slow_part: str = ""
    global_batch: float = 0.0
    bytes_per_step: float = 0.0
    bandwidth: float = 0.0
    link: float | None = None
    baseline: float | None = None
    devices: int = 1
    in_step: bool = True
    arrays: bool = False
    staleness: Mapping[int, int] = dataclasses.field(default_factory=dict)
    idle: Sequence[float] = ()

    @property
    def efficiency(self) -> float | None:
        """Examples per second divided by those of as many workers alone, or None.

        Or of as many devices, see `devices`.
        """
        if not self.baseline:
            return None
        return self.examples_per_second / (self.baseline * self.workers * self.devices)

    def share(self, *phases: str) -> float:
        """Return the part of a step that these phases are, 0 to 1."""
        if not self.step_seconds:
            return 0.0
        return sum(self.phases[phase] for phase in phases) / self.step_seconds


def combine(
    times: Sequence[StepTimes],
    *,
    seconds: float | None = None,
    in_step: bool = True,
    arrays: bool = False,
    link: float | None = None,
    baseline: float | None = None,
    devices: int = 1,
    between_devices: float = 0.0,
    staleness: Mapping[int, int] | None = None,
    idle: Sequence[float] = (),
) -> Figures | None:
    """Return the figures of all workers' measurements; None if there was no step.

    A worker that communicates longer than another one waits for it: the difference is
    the least value of `wait`. It's more if a worker measured that the others were late,
    each now and then.

    Args:
        times: Of each worker, in rank order.
        seconds: The duration of all steps; by default that of the worker that took
            longest.
        in_step: Whether workers take each step together.
        arrays: See `Figures`.
        link: See `Figures`.
        baseline: See `Figures`.
        devices: See `Figures`.
        between_devices: Bytes moved between the devices of one worker in a step.
        staleness: See `Figures`.
        idle: See `Figures`.
    """
    moved = [one for one in times if one.steps > 0 and one.seconds > 0]
    if not moved:
        return None
    least = min(one.exchange / one.steps for one in moved)
    parts: dict[int, dict[str, float]] = {}
    for one in moved:
        exchange = one.exchange / one.steps
        wait = min(exchange, max(exchange - least, one.late / one.steps))
        parts[one.rank] = {
            "input": one.input / one.steps,
            "compute": one.compute / one.steps,
            "pack": one.pack / one.steps,
            "communicate": exchange - wait,
            "wait": wait,
            "update": one.update / one.steps,
            "outside": one.outside / one.steps,
        }
    total = sum(one.steps for one in moved)
    phases = {
        phase: sum(parts[one.rank][phase] * one.steps for one in moved) / total
        for phase in PHASES
    }
    idle_parts = ("communicate", "wait")
    busy = {
        rank: sum(value for phase, value in part.items() if phase not in idle_parts)
        for rank, part in parts.items()
    }
    slowest, lag, slow_part = _slowest(parts, busy)
    rows = sum(one.rows for one in moved)
    steps = max(one.steps for one in moved) if in_step else total
    speeds = [
        one.sent / one.communicating
        for one in moved
        if one.communicating > 0 and one.sent > 0
    ]
    return Figures(
        workers=len(times),
        steps=steps,
        examples_per_second=rows / (seconds or max(one.seconds for one in moved)),
        by_rank={one.rank: one.rows / one.seconds for one in moved},
        step_seconds=sum(phases.values()),
        phases=phases,
        busy=busy,
        slowest=slowest,
        lag=lag,
        slow_part=slow_part,
        global_batch=rows / steps,
        bytes_per_step=sum(one.sent for one in moved) / total or between_devices,
        bandwidth=max(speeds, default=0.0),
        link=link,
        baseline=baseline,
        devices=devices,
        in_step=in_step,
        arrays=arrays,
        staleness=dict(staleness or {}),
        idle=tuple(idle),
    )


def _slowest(
    parts: Mapping[int, Mapping[str, float]], busy: Mapping[int, float]
) -> tuple[int | None, float, str]:
    """Return the slowest rank, its lag, and the phase in which it lags most."""
    if len(busy) < 2:
        return None, 0.0, ""
    slowest = max(busy, key=lambda rank: busy[rank])
    others = [rank for rank in busy if rank != slowest]
    lag = busy[slowest] - statistics.median(busy[rank] for rank in others)
    behind = {
        phase: parts[slowest][phase]
        - statistics.median(parts[rank][phase] for rank in others)
        for phase in PHASES
        if phase not in ("communicate", "wait")
    }
    return slowest, max(lag, 0.0), max(behind, key=lambda phase: behind[phase])
