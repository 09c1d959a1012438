"""Evidence from rows' hashes that two workers hold the same data.

A worker holds a part of something: a part of its own, or the same data as all others
in another order, or split in another way. Rows that several workers hold show which:

| what the workers hold | rows of one that another one holds, too |
| --- | --- |
| the same rows in another order | all |
| random splits of the same rows | about as many as the part is of the whole |
| shards | none, but for rows that are in the data more than once |

How often a row has a second copy by chance is measured within one worker's data: rows
of a shard have a copy in another shard about as often as in their own. Only a number
clearly above that is evidence.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kerasdist.strategies.chief_data.comparison.fingerprint import Hashes

# How many rows of a worker are looked up in the others' data.
_LOOKED_UP = 4096
# The smallest part of a worker's rows that must be found; more if rows repeat.
_LEAST = 0.05
_LEAST_FOUND = 3


@dataclass(frozen=True)
class Sample:
    """A sample of a worker's rows.

    Attributes:
        hashes: Their hashes.
        repeated: The part of them that has a copy among the worker's other rows.
    """

    hashes: Hashes
    repeated: float


class Seen:
    """The rows that this worker has held so far, where the workers' data differed."""

    def __init__(self) -> None:
        self._parts: list[Hashes] = []

    def add(self, hashes: Hashes) -> None:
        """Remember rows."""
        self._parts.append(np.unique(hashes))

    def extend(self, other: Seen) -> None:
        """Remember the rows of another `Seen`."""
        self._parts += other._parts

    def count(self, hashes: Hashes) -> int:
        """Return how many of these rows are among those that were added."""
        return int(self.among(hashes).sum())

    def among(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Return for each of these rows whether it is among those that were added."""
        found = np.zeros(len(hashes), bool)
        for part in self._parts:
            if len(part):
                places = np.minimum(np.searchsorted(part, hashes), len(part) - 1)
                found |= part[places] == hashes
        return found


def sample_rows(hashes: Hashes) -> Sample:
    """Return rows from all over a worker's data."""
    rows = len(hashes)
    if not rows:
        return Sample(hashes, 0.0)
    chosen = np.linspace(0, rows - 1, min(rows, _LOOKED_UP)).astype(np.int64)
    known, counts = np.unique(hashes, return_counts=True)
    sample = hashes[chosen]
    repeated = counts[np.searchsorted(known, sample)] > 1
    return Sample(sample, float(repeated.mean()))


def are_alike(found: int, sample: int, repeated: float) -> bool:
    """Return whether a worker's rows are also another one's, and not by chance.

    Args:
        found: How many of the rows that were looked up the other worker holds.
        sample: How many rows were looked up.
        repeated: The larger one of both workers', see `Sample`.
    """
    if not sample or not found:
        return False
    part = found / sample
    if part < 0.5 and found < _LEAST_FOUND:
        return False
    return part >= _LEAST + 2.0 * repeated


def is_telling(hashes: Hashes) -> bool:
    """Return whether unrelated parts of data wouldn't share the order of these rows.

    Labels in a random order are such rows; sorted, periodic or constant ones aren't,
    nor are numbers that all differ, which may be a grid.
    """
    known, ids = np.unique(hashes, return_inverse=True)
    if len(known) < 2 or len(known) > 0.5 * len(hashes):
        return False
    # Numbered by first appearance, so that the names of the labels don't matter.
    first = np.full(len(known), len(ids))
    np.minimum.at(first, ids, np.arange(len(ids)))
    ids = np.argsort(np.argsort(first))[ids]
    kept = ids[:65536].astype(np.uint16 if len(known) > 256 else np.uint8)
    # A run, a period or a stair compresses to a few bytes.
    return len(zlib.compress(kept.tobytes(), 9)) >= 40 + 0.02 * len(kept)
