"""The sum of gradients over the workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kerasdist.collectives.communicator import Communicator
from kerasdist.collectives.ops import Array


def sum_gradients(
    communicator: Communicator,
    gradients: Sequence[Array],
    *,
    there: bool = True,
    beside: Sequence[Array] = (),
    lend: bool = False,
) -> list[Array]:
    """Return the sums of gradients over the workers, and sums beside them.

    Sums are computed in float32 for gradients of 16 bits.

    Args:
        communicator: Between the workers.
        gradients: Arrays of float dtypes, the same shapes on all workers.
        there: False for a worker that adds nothing, whatever its gradients hold.
        beside: Arrays of any dtypes whose sums are wanted, too, from the same
            collective: they are returned after the gradients'.
        lend: See `Communicator.all_reduce`.
    """
    wide = [
        g.astype(np.promote_types(g.dtype, np.float32), copy=False) for g in gradients
    ]
    sums = communicator.all_reduce(
        [*wide, *beside],
        scale=float(there),
        unscaled=len(beside),
        lend=lend,
    )
    found = [
        total.astype(gradient.dtype, copy=False)
        for total, gradient in zip(sums, gradients, strict=False)
    ]
    # Copies: a lent memory is used again when nothing of it is held any more.
    return [*found, *(np.array(each) for each in sums[len(gradients) :])]
