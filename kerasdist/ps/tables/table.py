"""One server's part of a table: an additive store of numbers.

Dense pieces of one dtype are in one flat buffer. A piece of a sparse variable is an
array of rows, and each row has the version at which it was last changed: so the rows
that are new to a reader are found by one vectorized comparison.

Versions count the updates of this part, from 1. A reader keeps the version of its last
read, and next time requests the rows that have changed since.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kerasdist.collectives.ops import Array
from kerasdist.errors import ProtocolError
from kerasdist.ps.layout import Layout

Indices = npt.NDArray[np.integer]
# Bytes that are added and read at once: they stay in the caches in between.
_BLOCK_BYTES = 256 << 10


def merge_rows(indices: npt.ArrayLike, values: Array) -> tuple[Indices, Array]:
    """Sum the rows of equal indices.

    Args:
        indices: Indices of rows, of shape `(n,)`, in any order, with repetitions.
        values: The rows, of shape `(n, row_elements)`.

    Returns:
        Increasing indices, and the sum of each one's rows. Rows of one index are
        added in the order in which they are given.
    """
    flat = np.asarray(indices).reshape(-1)
    if flat.size < 2 or bool((flat[1:] > flat[:-1]).all()):
        return flat, values
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    starts = np.flatnonzero(first)
    # ufunc.at takes ten times as long.
    return ordered[starts], np.add.reduceat(values[order], starts, axis=0)


class Table:
    """One server's part of a table, all zeros at first. Not safe for threads.

    Args:
        layout: The layout of the table.
        server: Index of the server.

    Attributes:
        version: Number of updates so far.
        dense: One flat array per dtype, in the order of `Layout.dense`.
        rows: One array of shape `(rows, row_elements)` per piece of `Layout.sparse`.
        versions: For each of `rows`, the version at which each row changed last;
            int64.
    """

    def __init__(self, layout: Layout, server: int) -> None:
        self.version = 0
        self.dense: list[Array] = [
            np.zeros(sum(map(layout.elements, pieces)), name)
            for name, pieces in layout.dense(server).items()
        ]
        self.rows: list[Array] = []
        self.versions: list[npt.NDArray[np.int64]] = []
        for piece in layout.sparse(server):
            variable = layout.variables[piece.variable]
            shape = (piece.rows, variable.row_elements)
            self.rows.append(np.zeros(shape, variable.held))
            self.versions.append(np.zeros(piece.rows, np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(array.nbytes for array in (*self.dense, *self.rows))

    def load(self, parts: Sequence[Array]) -> None:
        """Take over values as `Layout.cut` returns them; that counts as an update.

        Raises:
            ProtocolError: They don't fit this part.
        """
        own = [*self.dense, *self.rows]
        _check_like(parts, own, "values")
        for mine, part in zip(own, parts, strict=True):
            np.copyto(mine, part)
        self.version += 1
        for versions in self.versions:
            versions[:] = self.version

    def check(self, parts: Sequence[Array]) -> None:
        """Check that `add` can take these parts.

        Raises:
            ProtocolError: It can't. The sender has another model, or another version
                of kerasdist.
        """
        count = len(self.dense)
        _check_like(parts[:count], self.dense, "changes")
        if len(parts) != count + 2 * len(self.rows):
            raise ProtocolError(
                "An update has the wrong number of parts. "
                f"Received: {len(parts)}, expected {count + 2 * len(self.rows)}."
            )
        for number, rows in enumerate(self.rows):
            indices = parts[count + 2 * number]
            values = parts[count + 2 * number + 1]
            fits = (
                indices.ndim == 1
                and indices.dtype.kind in "iu"
                and values.dtype == rows.dtype
                and values.shape == (indices.size, rows.shape[1])
            )
            if fits and indices.size:
                # Increasing: so no index is there twice, and the ends are the bounds.
                fits = bool((indices[1:] > indices[:-1]).all())
                fits = fits and indices[0] >= 0 and indices[-1] < len(rows)
            if not fits:
                raise ProtocolError(
                    f"Changed rows don't fit their table of shape {rows.shape}. "
                    f"Received: indices of shape {indices.shape}, dtype "
                    f"{indices.dtype}, rows of shape {values.shape}, dtype "
                    f"{values.dtype}; expected increasing indices from 0 to "
                    f"{len(rows) - 1} and a row of dtype {rows.dtype} for each."
                )

    def add(self, parts: Sequence[Array], out: Sequence[Array] | None = None) -> None:
        """Add checked changes; that is one update.

        Args:
            parts: One flat array per dtype of `dense`, then increasing indices and
                rows for each of `rows`.
            out: Arrays for the new values of `dense` in the same pass, or None.
        """
        self.version += 1
        # An overflow is infinite: the model's script has to deal with it.
        with np.errstate(all="ignore"):
            for number, mine in enumerate(self.dense):
                delta = parts[number]
                if out is None:
                    np.add(mine, delta, out=mine)
                    continue
                step = max(1, _BLOCK_BYTES // mine.itemsize)
                for start in range(0, mine.size, step):
                    block = mine[start : start + step]
                    np.add(block, delta[start : start + step], out=block)
                    out[number][start : start + step] = block
            for number, rows in enumerate(self.rows):
                place = len(self.dense) + 2 * number
                indices, values = parts[place], parts[place + 1]
                if indices.size:
                    rows[indices] += values
                    self.versions[number][indices] = self.version

    def read(self, out: Sequence[Array]) -> None:
        """Copy the values of `dense` into `out`, arrays of the same sizes."""
        for mine, copy in zip(self.dense, out, strict=True):
            np.copyto(copy, mine)

    def changed(self, since: int) -> list[Indices]:
        """Return the rows that changed after version `since`, for each of `rows`."""
        return [np.flatnonzero(versions > since) for versions in self.versions]


def _check_like(parts: Sequence[Array], own: Sequence[Array], what: str) -> None:
    given = [(part.dtype, part.shape) for part in parts]
    expected = [(array.dtype, array.shape) for array in own]
    if given != expected:
        raise ProtocolError(
            f"The {what} don't fit this server's part of the table. "
            f"Received: {given}, expected {expected}."
        )
