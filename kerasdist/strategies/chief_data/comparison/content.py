"""The contents of data to compare: batches, or whole arrays, as x and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist.strategies.chief_data.comparison.fingerprint import (
    Hashes,
    digest_of,
    row_hashes,
)
from kerasdist.strategies.chief_data.encoding import Encoded, encode


@dataclass(frozen=True)
class Batch:
    """Tensors with the same number of rows.

    Attributes:
        x: Inputs.
        rest: Targets and weights.
    """

    x: tuple[Encoded, ...]
    rest: tuple[Encoded, ...]

    @property
    def form(self) -> str:
        """Return kinds, dtypes and numbers of dimensions, as text."""
        x, rest = ([leaf.form for leaf in leaves] for leaves in (self.x, self.rest))
        return f"x: {', '.join(x)}" + (f"; y: {', '.join(rest)}" if rest else "")

    @property
    def leaves(self) -> list[Encoded]:
        """Return all tensors, in their order."""
        return [*self.x, *self.rest]


def batch_of(data: Any) -> Batch:
    """Return a batch from Keras's data: `x`, `(x, y)` or `(x, y, sample_weight)`.

    Raises:
        TypeError: It contains tensors that aren't data.
    """
    x, rest = data, ()
    if isinstance(data, tuple) and data:
        x, rest = data[0], data[1:]
    return Batch(tuple(_encoded(x)), tuple(_encoded(rest)))


def _encoded(nest: Any) -> list[Encoded]:
    found = [encode(leaf) for leaf in tf.nest.flatten(nest)]
    return [leaf for leaf in found if leaf.kind != "none"]


@dataclass(frozen=True)
class Content:
    """The part of a worker's data that is compared.

    Attributes:
        batches: All of the data, or the first batches.
    """

    batches: Sequence[Batch]

    @property
    def form(self) -> str:
        """Return the form of the first batch, as text; empty if there is none."""
        return self.batches[0].form if self.batches else ""

    @property
    def rows(self) -> int:
        """Return the number of rows of all batches."""
        return sum(_rows(batch) for batch in self.batches)

    def digests(self) -> tuple[str, str]:
        """Return hashes of all of x, and of the rest."""
        return (
            digest_of([leaf for batch in self.batches for leaf in batch.x]),
            digest_of([leaf for batch in self.batches for leaf in batch.rest]),
        )

    def row_hashes(self) -> tuple[Hashes, Hashes]:
        """Return hashes of each row's x, and of the rest; the latter may be empty."""
        return (
            _joined([row_hashes(batch.x) for batch in self.batches]),
            _joined([row_hashes(batch.rest) for batch in self.batches if batch.rest]),
        )


def _rows(batch: Batch) -> int:
    sizes = [leaf.rows for leaf in batch.leaves if leaf.rows is not None]
    return sizes[0] if sizes else 0


def _joined(parts: list[Hashes]) -> Hashes:
    return np.concatenate([np.zeros(0, np.uint64), *parts])
