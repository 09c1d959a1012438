"""The order of samples in an epoch, the same on all workers, and their division.

These are pure functions of numbers: nothing is communicated but the seed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kerasdist.collectives.ops import equal_part


def epoch_order(
    samples: int, batch_size: int, shuffle: bool | str, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Return the order of the samples in an epoch.

    Args:
        samples: Number of samples.
        batch_size: Rows of the global batch.
        shuffle: False, True, or "batch": only within each batch.
        seed: The seed, common to all workers.
        epoch: Number of the epoch; each has its own order.
    """
    order = np.arange(samples, dtype=np.int64)
    if not shuffle:
        return order
    random = np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, epoch]))
    )
    if shuffle == "batch":
        for start in range(0, samples, batch_size):
            random.shuffle(order[start : start + batch_size])
    else:
        random.shuffle(order)
    return order


def own_rows(
    order: npt.NDArray[np.int64],
    batch_size: int,
    first: int,
    local: int,
    replicas: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the samples of a worker's replicas, batch by batch.

    The division is that of `kerasdist.strategies.data.batch_split`.

    Args:
        order: All samples in the order of the epoch.
        batch_size: Rows of the global batch.
        first: Number of the worker's first replica over all workers.
        local: Number of its replicas.
        replicas: Number of replicas over all workers.

    Returns:
        The samples, and the bounds between parts: part i, which is replica
        `i % local`'s of batch `i // local`, is `samples[bounds[i]:bounds[i + 1]]`.
    """
    starts = np.arange(0, len(order), batch_size, dtype=np.int64)
    rows = np.minimum(batch_size, len(order) - starts)
    replica = first + np.arange(local, dtype=np.int64)
    length, longer = rows // replicas, rows % replicas
    lengths = length[:, None] + (replica[None, :] < longer[:, None])
    begins = starts[:, None] + (
        length[:, None] * replica[None, :]
        + np.minimum(replica[None, :], longer[:, None])
    )
    lengths, begins = lengths.reshape(-1), begins.reshape(-1)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    places = np.repeat(begins - bounds[:-1], lengths) + np.arange(bounds[-1])
    return order[places], bounds


def has_empty_parts(samples: int, batch_size: int, replicas: int) -> bool:
    """Return whether a batch of an epoch has fewer rows than there are replicas.

    Args:
        samples: Number of samples of an epoch.
        batch_size: Rows of the global batch.
        replicas: Number of replicas over all workers.
    """
    return (
        0 < min({min(batch_size, samples), samples % batch_size or samples}) < replicas
    )


def same_length(
    samples: int, batch_size: int, first: int, local: int, replicas: int
) -> int | None:
    """Return the number of rows of all parts of a worker, or None if it varies.

    A step that is traced for one number of rows costs less than one for any. A replica
    without rows needs the latter, because it computes with another's row.

    Args:
        samples: Number of samples of an epoch.
        batch_size: Rows of the global batch.
        first: Number of the worker's first replica over all workers.
        local: Number of its replicas.
        replicas: Number of replicas over all workers.
    """
    lengths = set()
    for rows in {min(batch_size, samples), samples % batch_size} - {0}:
        for replica in range(first, first + local):
            part = equal_part(rows, replicas, replica)
            lengths.add(part.stop - part.start)
    return lengths.pop() or None if len(lengths) == 1 else None
