"""The times of one worker's steps in a window."""

from __future__ import annotations

import dataclasses

import numpy as np

from kerasdist.collectives import Communicator
from kerasdist.collectives.ops import Array

# The parts of a step, without the time between steps.
PHASES = ("input", "compute", "pack", "exchange", "update")
# All fields of a step that are determined from the measured steps.
PARTS = (*PHASES, "late", "sent", "collectives", "reduced", "communicating")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Sums over the steps of one worker.

    The phases follow each other: they add up to `seconds`. `steps`, `rows`, `seconds`
    are of all steps; values measured in some of them are extrapolated to all.

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
