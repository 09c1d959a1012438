"""The part of the start-up line about the data, as far as known without reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kerasdist.collectives.row_exchange import equal_part
from kerasdist.placement.advice import counted


@dataclass(frozen=True, kw_only=True)
class GivenData:
    """The known facts about the data that `fit` was given.

    Attributes:
        batch_size: Rows of a global batch; None: unknown.
        batches: Number of global batches in an epoch; None: unknown or endless.
        endless: Whether the data never end.
        samples: Number of samples in an epoch, if it's known exactly.
        division: How the data are divided, unless by rows.
    """

    batch_size: int | None = None
    batches: int | None = None
    endless: bool = False
    samples: int | None = None
    division: str = ""


def describe(given: GivenData | None, replicas: Sequence[int], rank: int) -> str:
    """Describe how a job and its data are divided.

    Args:
        given: The data; None: nothing is known about them.
        replicas: Number of replicas of each worker.
        rank: The worker that prints it.
    """
    total = sum(replicas)
    workers = counted(len(replicas), "worker")
    parts = [f"{workers} with {counted(total, 'replica')} in all"]
    if given is None:
        return parts[0]
    batch = given.batch_size
    if batch is None:
        parts.append("global batch unknown")
    else:
        low, more = divmod(batch * replicas[rank], total)
        parts.append(f"global batch {batch}")
        parts.append(f"per worker {low}{f'-{low + 1}' if more else ''}")
    parts += _amount(given, replicas, rank)
    if given.division:
        parts.append(given.division)
    elif batch is not None:
        rows = batch if given.samples is None else min(batch, given.samples)
        idle = [
            r
            for r in range(len(replicas))
            if len(replicas) > 1 and not _rows_of(rows, replicas, r)
        ]
        if idle:
            parts.append(
                f"ranks {idle} never get a row (batches of {rows} rows for {total} "
                "replicas: use a larger batch size or fewer workers)"
            )
        elif rows < total:
            parts.append(f"only {rows} of {total} replicas get rows in any batch")
    return ", ".join(parts)


def _amount(given: GivenData, replicas: Sequence[int], rank: int) -> list[str]:
    """Describe how many samples there are, and how many are this worker's."""
    batch = given.batch_size
    if given.endless:
        return ["batches without end"]
    if given.samples is not None and batch is not None:
        full, rest = divmod(given.samples, batch)
        own = full * _rows_of(batch, replicas, rank) + _rows_of(rest, replicas, rank)
        return [f"{given.samples} samples", f"{own} of them here"]
    if given.batches is None:
        return ["number of samples unknown"]
    parts = [f"{given.batches} batch(es)"]
    if batch is not None:
        # The last batch may be smaller.
        own = given.batches * _rows_of(batch, replicas, rank)
        parts.append(f"about {given.batches * batch} samples")
        parts.append(f"about {own} of them here")
    return parts


def _rows_of(rows: int, replicas: Sequence[int], rank: int) -> int:
    """Return how many rows of a global batch belong to a worker."""
    first, total = sum(replicas[:rank]), sum(replicas)
    last = equal_part(rows, total, first + replicas[rank] - 1)
    return last.stop - equal_part(rows, total, first).start
