"""The times of one worker's steps in a window, from its clock and communicator."""

from __future__ import annotations

import dataclasses

import numpy as np

from kerasdist.collectives import Communicator
from kerasdist.collectives.ops import Array
from kerasdist.strategies.measure.communication import Work
from kerasdist.strategies.measure.counters import (
    BEGIN,
    END,
    GRADIENTS,
    READY,
    REDUCED,
    ROWS,
    STEPS,
    UPDATES,
)

__all__ = ["PHASES", "StepTimes", "gather", "times_of"]

# The parts of a step, without the time between steps.
PHASES = ("input", "compute", "pack", "exchange", "update")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Sums over the steps of one worker.

    The phases and `outside` follow each other: they add up to `seconds`.

    Attributes:
        rank: The worker's rank in the job.
        steps: Number of steps.
        rows: Number of samples that this worker has trained on.
        seconds: From the beginning of the first step to the end of the last one,
            without the time between epochs.
        input: Seconds until the batch was ready.
        compute: Seconds of the forward and backward pass.
        pack: Seconds of copying data into the buffers that are sent.
        exchange: Seconds of communication, without packing, that no computation
            hides, including waiting for others.
        update: Seconds of the optimizer's update.
        outside: Seconds between the steps: callbacks, the progress bar, calls.
        late: Seconds of `exchange` in which the others hadn't arrived yet, as far as
            this worker can tell.
        sent: Bytes that this worker has sent to other processes.
        collectives: Number of collectives, or exchanges with servers.
        reduced: Bytes of all buffers that were reduced.
        communicating: Seconds of all collectives, also of those that computation hides.
    """

    rank: int
    steps: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    input: float = 0.0
    compute: float = 0.0
    pack: float = 0.0
    exchange: float = 0.0
    update: float = 0.0
    outside: float = 0.0
    late: float = 0.0
    sent: float = 0.0
    collectives: float = 0.0
    reduced: float = 0.0
    communicating: float = 0.0

    def to_array(self) -> Array:
        """Return all numbers, float64."""
        return np.array(dataclasses.astuple(self), np.float64)

    @classmethod
    def from_array(cls, array: Array) -> StepTimes:
        """Return the times from the result of `to_array`."""
        rank, *rest = (float(number) for number in array)
        names = [field.name for field in dataclasses.fields(cls)][1:]
        return cls(rank=int(rank), **dict(zip(names, rest, strict=True)))

    def plus(self, other: StepTimes) -> StepTimes:
        """Return the sums of both; the rank is this one's."""
        total = self.to_array() + other.to_array()
        return dataclasses.replace(self.from_array(total), rank=self.rank)


def times_of(
    sums: Array,
    spans: Work,
    *,
    rank: int,
    seconds: float,
    inside: float | None,
    waited: float,
    met: float,
    in_turn: bool,
) -> StepTimes:
    """Return the times of a window's steps.

    Args:
        sums: The sums of the steps, see `measure.counters`.
        spans: The communication in them.
        rank: The worker's rank in the job.
        seconds: Seconds of the window.
        inside: Seconds inside of the calls, if those are several steps each.
        waited: Seconds of waiting for data that no graph's clock measures.
        met: Seconds of waiting for other workers before a step; in graphs the clock
            measures it as waiting for data.
        in_turn: Whether waiting is for other workers, and not for servers at work.
    """
    begin, ready, end, gradients, reduced = (
        float(sums[slot]) for slot in (BEGIN, READY, END, GRADIENTS, REDUCED)
    )
    running, exchange = end - ready, max(reduced - gradients, 0.0)
    # Where the next batch is fetched within an execution, the fetch's end counts.
    waiting = (ready - begin if inside is None else inside - running) - met
    if sums[UPDATES] == sums[STEPS]:
        compute, update = gradients - ready, end - reduced
    else:
        # With several optimizers in one step, or none, the rest can't be divided.
        compute, update = running - exchange, 0.0
    servers = min(spans.seconds("push_pull"), update or running)
    if update:
        update -= servers
    else:
        compute -= servers
    exchange += servers
    packing = spans.share("pack") * exchange
    late = min(spans.late, exchange - packing) if in_turn else 0.0
    parts = {
        "input": max(waiting, 0.0) + waited,
        "compute": max(compute, 0.0),
        "pack": packing,
        "exchange": exchange - packing + met,
        "update": max(update, 0.0),
        "late": late + met,
    }
    whole = sum(parts[name] for name in PHASES)
    if whole > seconds:
        parts = {name: part * seconds / whole for name, part in parts.items()}
    return StepTimes(
        rank=rank,
        steps=float(sums[STEPS]),
        rows=float(sums[ROWS]),
        seconds=seconds,
        outside=max(seconds - whole, 0.0),
        sent=float(spans.sent),
        collectives=float(spans.count),
        reduced=float(spans.reduced),
        communicating=spans.communicating,
        **parts,
    )


def gather(
    communicator: Communicator, mine: StepTimes, more: Array
) -> tuple[list[StepTimes], list[Array]]:
    """Give every worker's times to all workers, which call it at the same point.

    Args:
        communicator: The communicator of the workers.
        mine: This worker's times.
        more: Further numbers, float64; their count may differ between workers.

    Returns:
        All workers' times, and their other numbers, in rank order.
    """
    own = mine.to_array()
    every = communicator.all_gather(np.concatenate([own, np.asarray(more, np.float64)]))
    times = [StepTimes.from_array(part[: len(own)]) for part in every]
    return times, [part[len(own) :] for part in every]
