"""Work by speed: the rows of each batch are divided by the workers' measured speeds.

    epoch 1   worker 0  |compute |................|all-reduce|    rows 42, 43, 43
              worker 1  |compute     |............|all-reduce|
              worker 2  |compute                 ||all-reduce|
    epoch 2   worker 0  |compute            |all-reduce|          rows 73, 37, 18
              worker 1  |compute           |.|all-reduce|
              worker 2  |compute            |all-reduce|

A worker's speed is its rows per second from the beginning of a step until it has its
gradients, when it arrives at the all-reduce, without the time in which layers waited
for other workers. (A whole step takes all workers as long.)
At the end of an epoch all workers learn all speeds, and compute the same shares from
them. The gradient is the mean over the rows of all, however these are divided, so that
the numbers are those of one process.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kerasdist._keras.protocols import KerasHooks
from kerasdist.strategies.data.chief_data import Passes
from kerasdist.strategies.measure.communication import Slot
from kerasdist.strategies.measure.step_clock import StepClock
from kerasdist.strategies.options import Options
from kerasdist.strategies.reduce.workers import WHOLE, Workers
from kerasdist.strategies.sync.data import SynchronousData
from kerasdist.strategies.sync.extended import SynchronousExtended
from kerasdist.transport import log

# A new division has to save this part of a step, or it isn't worth its pipelines.
_GAIN = 0.02
# Epochs without a measurement after which that is told.
_UNMEASURED = 3
# Rows of a share, of which each batch then has one at least.
_LEAST = 1.5
# Of a batch: shares that differ by more weren't used.
_SLACK = 0.05


def speeds_of(
    rows: Sequence[float], seconds: Sequence[float], before: Sequence[float]
) -> list[float]:
    """Return the workers' speeds, in rows per second; 0.0: not known.

    Args:
        rows: Each worker's rows of a step.
        seconds: How long each has computed them; 0.0: not measured.
        before: The speeds that were found before. What is measured now counts as much
            as these, because other work on a machine may be short.
    """
    speeds = []
    for n, taken, known in zip(rows, seconds, before, strict=True):
        now = n / taken if taken > 0 else 0.0
        speeds.append(math.sqrt(now * known) if now and known else now or known)
    return speeds


def shares_of(speeds: Sequence[float], rows: Sequence[float]) -> list[float] | None:
    """Return each worker's share of the rows, for which all take as long.

    Args:
        speeds: See `speeds_of`.
        rows: Each worker's present rows of a step.

    Returns:
        The shares, whose sum is 1; None if the present ones are as good.
    """
    total = sum(rows)
    if not total or not all(speeds):
        return None
    best = total / sum(speeds)
    longest = max(n / speed for n, speed in zip(rows, speeds, strict=True))
    if longest * (1 - _GAIN) <= best:
        return None
    # A worker without rows would never be measured again.
    shares = [max(speed * best, _LEAST) / total for speed in speeds]
    return [share / sum(shares) for share in shares]


def cuts_of(shares: Sequence[float], replicas: Sequence[int]) -> tuple[int, ...]:
    """Return the places at which a batch is cut, see `ReplicaLayout`.

    Args:
        shares: Each worker's share of the rows.
        replicas: Each worker's number of replicas, which divide its share equally.
    """
    each = np.repeat(np.divide(shares, replicas), replicas)
    inner = np.rint(np.cumsum(each)[:-1] * WHOLE).astype(int)
    return (0, *map(int, inner), WHOLE)


def in_words(rows: Sequence[float]) -> str:
    """Return numbers of rows as text."""
    return ", ".join(f"{each:.4g}" for each in rows)


class Balance:
    """The division of one strategy's batches.

    Args:
        workers: The workers, whose `cuts` it sets.
        clock: Measures this worker's steps.
    """

    def __init__(self, workers: Workers, clock: StepClock) -> None:
        self._workers = workers
        self._clock = clock
        clock.always = clock.asked = True
        workers.ops.waited = clock.awaited
        self._before = clock.sums()
        replicas = workers.job.replicas
        self._speeds = [0.0] * len(replicas)
        self._unmeasured = 0
        self._is_told = False
        # From the start, because steps are traced for any number of rows then.
        self._shares = [each / sum(replicas) for each in replicas]
        workers.cuts = cuts_of(self._shares, replicas)

    def end_epoch(self) -> None:
        """Divide the next batches by the speeds of this epoch; all workers call it."""
        now = self._clock.sums()
        sums, self._before = now - self._before, now
        steps, rows, measured, updates = sums[: Slot.BEGIN]
        # Where a call is several steps, only the first one's beginning is known.
        begin = sums[Slot.READY if self._clock.several else Slot.BEGIN]
        seconds = sums[Slot.GRADIENTS] - begin - sums[Slot.AWAITED]
        # Rows are of all steps, the time of those that were measured.
        is_measured = measured > 0 and updates == measured
        mine = [
            rows / steps if steps else 0.0,
            seconds / measured if is_measured else 0.0,
        ]
        every = self._workers.communicator.all_gather(np.array(mine))
        found, taken = (list(map(float, column)) for column in zip(*every, strict=True))
        if self._is_ignored(found):
            return
        self._speeds = speeds_of(found, taken, self._speeds)
        # An epoch of one step, which is traced, isn't measured either.
        self._unmeasured = 0 if any(taken) else self._unmeasured + 1
        if self._unmeasured == _UNMEASURED:
            self._tell(
                "kerasdist: balance='measured' has no effect on these steps, which "
                "can't be measured: they are compiled (`jit_compile=True`), or have "
                "several optimizers or none.",
            )
        shares = shares_of(self._speeds, found)
        if shares is None:
            return
        self._workers.cuts = cuts_of(shares, self._workers.job.replicas)
        self._shares = shares
        self._tell(
            "kerasdist: rows of a batch by measured speed, rank by rank: %s "
            "(this epoch: %s).",
            *(in_words([share * sum(found) for share in shares]), in_words(found)),
        )

    def _is_ignored(self, found: list[float]) -> bool:
        """Return whether the data aren't divided by the shares, and tell that once."""
        total = sum(found)
        # The last batch of an epoch may be small.
        slack = 2 + _SLACK * total
        pairs = zip(found, self._shares, strict=True)
        if all(abs(rows - share * total) <= slack for rows, share in pairs):
            return False
        if self._is_told:
            return True
        self._is_told = True
        self._tell(
            "kerasdist: balance='measured' has no effect on these data: either each "
            "worker has its own, or one iterator serves several epochs, as with "
            "`steps_per_epoch`. Rows of this epoch, rank by rank: %s.",
            in_words(found),
        )
        return True

    def _tell(self, line: str, *values: str) -> None:
        if self._workers.rank == 0:
            log.log_in_background(logging.INFO, line, *values)


class BalancedData(SynchronousData):
    """See `SynchronousData`; parts are by the workers' shares.

    Attributes:
        balance: Changes the shares.
    """

    balance: Balance

    def end_epoch(self) -> None:
        """See `DataHooks.end_epoch`."""
        self.balance.end_epoch()

    def describe(self) -> str:
        """See `DataHooks.describe`."""
        return f"{super().describe()}, rows by measured speed"

    def _passes(self, divide: Callable[..., Any], dataset: Any) -> Any:
        return Passes(self._workers, divide, dataset)


class BalancedExtended(SynchronousExtended):
    """See `SynchronousExtended`; faster workers get more rows."""

    data_class = BalancedData

    def _make_hooks(self, options: Options, timer: StepClock) -> KerasHooks:
        hooks = super()._make_hooks(options, timer)
        data: Any = self.data
        data.balance = Balance(self.workers, timer)
        return hooks
