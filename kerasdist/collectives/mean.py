"""The mean over rows that are spread over the workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kerasdist.collectives.communicator import Communicator
from kerasdist.collectives.ops import Array

__all__ = ["weighted_mean"]


def weighted_mean(
    communicator: Communicator, rows: int, gradients: Sequence[Array]
) -> list[Array]:
    """Return sum(rows x gradients) / sum(rows) over the workers.

    Sums are made in float32 for gradients of 16 bits. float32 counts rows exactly
    up to 16,777,216 per global batch. A worker without rows adds nothing, whatever
    its gradients hold.

    Args:
        communicator: Between the workers.
        rows: Number of rows of this worker.
        gradients: Arrays of float dtypes, the same shapes on all workers.
    """
    groups: dict[np.dtype[Any], list[int]] = {}
    for index, gradient in enumerate(gradients):
        wide = np.promote_types(gradient.dtype, np.float32)
        groups.setdefault(wide, []).append(index)
    buckets = []
    for dtype, indices in groups.items():
        bucket = np.empty(sum(gradients[i].size for i in indices) + 1, dtype)
        start = 0
        if not rows:
            bucket.fill(0)
        for i in indices if rows else ():
            stop = start + gradients[i].size
            np.multiply(gradients[i].reshape(-1), rows, out=bucket[start:stop])
            start = stop
        bucket[-1] = rows
        buckets.append(bucket)
    means: list[Array] = [np.empty(0)] * len(gradients)
    for bucket, indices in zip(
        communicator.all_reduce(buckets), groups.values(), strict=True
    ):
        total = bucket[-1]
        if total:
            np.multiply(bucket, 1 / total, out=bucket)
        start = 0
        for i in indices:
            stop = start + gradients[i].size
            mean = bucket[start:stop].reshape(gradients[i].shape)
            means[i] = mean.astype(gradients[i].dtype, copy=False)
            start = stop
    return means
