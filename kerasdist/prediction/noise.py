"""The noise of gradients: how large a batch pays, and what a worker more is worth.

The gradient of a batch of B samples is the true gradient plus noise, whose variance is
that of one sample divided by B. Norms of two batch sizes tell the two apart. Each step
has both: of the replicas' gradients, and of their mean (McCandlish et al., "An
empirical model of large-batch training", 2018, appendix A.1):

    mean of a replica's |g|^2      |G|^2 + variance / (rows of a replica)
    |mean over the replicas|^2     |G|^2 + variance / (rows of the global batch)

With unequal rows the first mean is weighted by them, which gives `replicas / rows` in
place of one divided by the rows of a replica.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

# A mean over fewer steps is too noisy to be shown.
LEAST_STEPS = 20


class GradientNorms(NamedTuple):
    """Sums over steps of one worker.

    Attributes:
        steps: Number of steps.
        own: Of its replicas the squared norm of the gradient, weighted by the replica's
            share of the rows.
        own_by_rows: The same, each step's times the rows of its global batch.
        mean: The squared norm of the mean gradient of the global batch.
        mean_by_rows: The same times these rows.
        per_row: One divided by these rows.
    """

    steps: float = 0.0
    own: float = 0.0
    own_by_rows: float = 0.0
    mean: float = 0.0
    mean_by_rows: float = 0.0
    per_row: float = 0.0

    def plus(self, other: GradientNorms, kept: float = 1.0) -> GradientNorms:
        """Return the sums of both, these multiplied by `kept`."""
        return GradientNorms(*(kept * a + b for a, b in zip(self, other, strict=True)))


def add_norms(
    sums: Sequence[GradientNorms], new: list[GradientNorms], kept: float = 1.0
) -> list[GradientNorms]:
    """Add to the sums of each worker, multiplied by `kept`; of others forget them."""
    if len(sums) != len(new):
        return new
    # Perhaps they were sent as lists.
    return [GradientNorms(*a).plus(b, kept) for a, b in zip(sums, new, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """The size of the gradient, and of its noise.

    Attributes:
        gradient: The squared norm of the true gradient, at least 0.
        variance: The variance of one sample's gradient, the sum over all weights, at
            least 0.
    """

    gradient: float
    variance: float

    @property
    def scale(self) -> float:
        """The gradient noise scale in samples; infinite without a gradient.

        A batch of this size needs twice the steps of one that is infinitely large.
        """
        if self.gradient > 0:
            return self.variance / self.gradient
        return math.inf if self.variance > 0 else 0.0

    def gain(self, batch: float, base: float) -> float:
        """Return how many steps of a batch of `base` samples one of `batch` is worth.

        From 1 (no noise) to batch / base (nothing but noise): the gain of AdaScale
        (Johnson et al., 2020).
        """
        small = self.gradient + self.variance / base
        large = self.gradient + self.variance / batch
        return small / large if large > 0 else 1.0

    def efficiency(self, batch: float, base: float) -> float:
        """Return the progress per sample, beside that of batches of `base` samples.

        The statistical efficiency of Pollux (Qiao et al., OSDI 2021).
        """
        return self.gain(batch, base) * base / batch

    def goodput(self, throughput: float, batch: float, base: float) -> float:
        """Return the useful part of `throughput`, in its unit; see `efficiency`."""
        return throughput * self.efficiency(batch, base)

    def next_worker(self, workers: int, batch: float) -> float:
        """Return what a worker more adds, in steps of the first one; 0 to 1.

        Communication, and that steps may take longer, is not counted.

        Args:
            workers: Number of workers now.
            batch: Samples of their global batch, of which each has an equal part.
        """
        base = batch / workers
        return self.gain(batch + base, base) - self.gain(batch, base)


def noise_of(norms: Sequence[GradientNorms], replicas: int) -> GradientNoise | None:
    """Return the noise that all workers' norms show; None if there are too few.

    Args:
        norms: Of each worker.
        replicas: Number of replicas of all workers: each has had rows in each step.
    """
    if replicas < 2 or not norms or not all(each.steps > 0 for each in norms):
        return None
    # Workers may have measured different steps: their means count.
    own = sum(each.own / each.steps for each in norms)
    own_by_rows = sum(each.own_by_rows / each.steps for each in norms)
    mean, mean_by_rows, per_row = (
        sum(getattr(each, name) / each.steps for each in norms) / len(norms)
        for name in ("mean", "mean_by_rows", "per_row")
    )
    variance = max(own_by_rows - mean_by_rows, 0.0) / (replicas - 1)
    if variance == 0.0:
        return GradientNoise(gradient=min(own, mean), variance=0.0)
    gradient = max(mean - variance * per_row, 0.0)
    return GradientNoise(gradient=gradient, variance=variance)
