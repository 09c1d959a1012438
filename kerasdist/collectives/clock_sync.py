"""The offsets of ranks' clocks, estimated by repeated barriers.

    1. r     reads its clock: a
    2. all   barrier
    3. 0     reads its clock: t
    4. all   barrier
    5. r     reads its clock: b

Rank 0 reads after r has reached the first barrier and before r leaves the second one.
So at the moment of t the clock of r was between a and b, and r is ahead of rank 0 by
at least a - t and at most b - t. Each round gives such bounds, and all of them hold:
the tightest ones of many rounds differ by less than a round trip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kerasdist.collectives.communicator import Communicator
from kerasdist.collectives.row_exchange import Array
from kerasdist.transport.tracing import now

_ROUNDS = 16


@dataclass(frozen=True, kw_only=True)
class Offset:
    """The lead of this rank's clock over rank 0's, in nanoseconds.

    Attributes:
        at: The time of the estimate, by this rank's clock.
        ahead: The estimate.
        error: Its largest error, to either side.
    """

    at: int
    ahead: int
    error: int


def clock_offset(
    communicator: Communicator,
    *,
    clock: Callable[[], int] = now,
    rounds: int = _ROUNDS,
) -> Offset:
    """Estimate the lead of this rank's clock; all ranks call it.

    Args:
        communicator: Between the ranks.
        clock: This rank's clock, in nanoseconds.
        rounds: Number of rounds.

    Raises:
        CollectiveError: See `kerasdist.errors`.
    """
    if communicator.size == 1:
        return Offset(at=clock(), ahead=0, error=0)
    before = np.zeros(rounds, np.int64)
    middle = np.zeros(rounds, np.int64)
    after = np.zeros(rounds, np.int64)
    communicator.barrier()  # from here on all ranks are in step
    for number in range(rounds):
        before[number] = clock()
        communicator.barrier()
        middle[number] = clock()
        communicator.barrier()
        after[number] = clock()
    (theirs,) = communicator.broadcast([middle], 0)
    if communicator.rank == 0:
        return Offset(at=int(after[-1]), ahead=0, error=0)
    return compare(before, theirs, after)


def compare(before: Array, theirs: Array, after: Array) -> Offset:
    """Return the lead of a clock over another one.

    Args:
        before: Times of this clock, int64 of shape (rounds,), in nanoseconds.
        theirs: Times of the other clock, each read after that moment.
        after: Times of this clock, each after that.
    """
    least = int((before - theirs).max())
    most = int((after - theirs).min())
    # Clocks run at speeds that differ a little: bounds of long rounds may cross.
    error = max(most - least, 0) // 2 + 1
    return Offset(at=int(after[-1]), ahead=(least + most) // 2, error=error)
