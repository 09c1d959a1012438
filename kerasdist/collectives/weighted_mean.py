"""The mean over rows that are spread over the workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kerasdist.collectives.communicator import Communicator
from kerasdist.collectives.ops import Array

__all__ = ["weighted_mean"]


def weighted_mean(
    communicator: Communicator,
    rows: int,
    gradients: Sequence[Array],
    total: int | None = None,
    *,
    beside: Sequence[Array] = (),
    lend: bool = False,
) -> list[Array]:
    """Return sum(rows x gradients) / sum(rows) over the workers, and sums beside them.

    Sums are computed in float32 for gradients of 16 bits. float32 counts rows exactly
    up to 16,777,216 per global batch. A worker without rows adds nothing, whatever
    its gradients hold.

    If the total is known, each worker contributes its share of the mean: the gradients
    are multiplied while they are packed, and their sum is the result. Else the rows are
    added up beside the gradients, which are divided at the end.

    Args:
        communicator: Between the workers.
        rows: Number of rows of this worker.
        gradients: Arrays of float dtypes, the same shapes on all workers.
        total: sum(rows) over the workers, if all know it.
        beside: Arrays of any dtypes whose sums are wanted, too, from the same
            collective: they are returned after the means.
        lend: See `Communicator.all_reduce`. Without the total nothing is lent.
    """
    wide = [
        g.astype(np.promote_types(g.dtype, np.float32), copy=False) for g in gradients
    ]
    if total is not None:
        share = rows / total if total else 0.0
        sums = communicator.all_reduce(
            [*wide, *beside], scale=share, unscaled=len(beside), lend=lend
        )
        means = sums[: len(wide)]
    else:
        dtypes: list[Any] = list(dict.fromkeys(array.dtype for array in wide))
        ones = [np.ones(1, dtype) for dtype in dtypes]
        sums = communicator.all_reduce(
            [*wide, *ones, *beside], scale=float(rows), unscaled=len(beside)
        )
        means = sums[: len(wide)]
        counts = dict(zip(dtypes, sums[len(wide) :], strict=False))
        for mean in means:
            count = counts[mean.dtype]
            if count[0]:
                np.multiply(mean, 1 / count[0], out=mean)
    found = [
        mean.astype(gradient.dtype, copy=False)
        for mean, gradient in zip(means, gradients, strict=True)
    ]
    # Copies: a lent memory is used again when nothing of it is held any more.
    return [*found, *(np.array(each) for each in sums[len(sums) - len(beside) :])]
