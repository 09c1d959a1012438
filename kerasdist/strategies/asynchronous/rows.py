"""An embedding that asynchronous workers train together: only rows are sent.

    w: this worker's table     b: its last received rows     T: the servers' table

    1. step        an optimizer of Keras changes some rows of w
    2. push        w[i] - b[i] of these rows i
    3. the answer  the rows of T that any push has changed since the last answer: they
                   are put into w and into b

The rows i that a step has changed are the indices of the gradient's slices, if the
optimizer changes no others (`kerasdist._keras.optimizer.sparse_updates`). Otherwise w
is compared with b: that reads the whole table, but sends only the rows that differ. In
both cases there is one copy of the table, b, and none is made in a step.

Rows that are changed within an epoch by anything but an optimizer aren't found in the
first case; at ends of epochs (`restore`) they are reset to the servers' values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from kerasdist.collectives.ops import Array
from kerasdist.ps import Rows

# This many bytes are compared at once, so that they stay in the caches.
_BLOCK_BYTES = 256 << 10


class SharedRows:
    """A sparse variable of a table.

    Args:
        copies: The variable on each of this worker's devices.
        base: The variable's value at the servers, of its shape and dtype. This object
            owns it from now on.
        held: The dtype in which servers hold it.
    """

    def __init__(self, copies: Sequence[Any], base: Array, held: str) -> None:
        self._copies = copies
        self._base = base
        self._held = np.dtype(held)

    @property
    def base(self) -> Array:
        """The rows as last received."""
        return self._base

    def read(self, touched: Any) -> list[Any]:
        """Return tensors from which `change` makes a step's change, in any context.

        Args:
            touched: Indices of all rows that may have changed, an integer tensor; or
                None if they aren't known.
        """
        variable = self._copies[0]
        with tf.device(variable.device):
            if touched is None:
                return [variable.read_value()]
            indices, _ = tf.unique(tf.reshape(touched, [-1]))
            return [indices, variable.sparse_read(indices)]

    def change(self, arrays: Sequence[Array]) -> Rows:
        """Return the difference between the changed rows and those last received.

        Args:
            arrays: The values of the tensors of `read`.
        """
        if len(arrays) == 1:
            indices: npt.NDArray[Any] = rows_that_differ(arrays[0], self._base)
            values = arrays[0][indices]
        else:
            indices, values = arrays
        with np.errstate(all="ignore"):  # NaN is the model's own concern
            before = self._base[indices].astype(self._held)
            return Rows(indices, np.subtract(values, before, dtype=self._held))

    def take(self, rows: Rows) -> list[Array]:
        """Store rows that were received; return indices and rows for `assign`."""
        self._base[rows.indices] = rows.values
        return [np.asarray(rows.indices, np.int64), rows.values]

    def assign(self, indices: Any, rows: Any) -> None:
        """Put rows into the variable, in any context."""
        for variable in self._copies:
            with tf.device(variable.device):
                variable.scatter_update(tf.IndexedSlices(rows, indices))

    def differing(self) -> npt.NDArray[np.int64]:
        """Return the indices of the rows that differ from those last received."""
        return rows_that_differ(np.asarray(self._copies[0]), self._base)

    def restore(self) -> None:
        """Reset all rows to those last received."""
        indices = self.differing()
        if indices.size:
            self.assign(tf.constant(indices), tf.constant(self._base[indices]))


def rows_that_differ(value: Array, base: Array) -> npt.NDArray[np.int64]:
    """Return the increasing indices of rows that differ in a bit.

    Args:
        value: Of shape `(rows, ...)`.
        base: Of the same shape and dtype.
    """
    # Bits, since NaN differs from itself; in large words, of which there are fewer.
    mine, theirs = _words(value), _words(base)
    rows, row_bytes = mine.shape[0], mine.shape[1] * mine.itemsize
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    found = [np.empty(0, np.int64)]
    for start in range(0, rows, step):
        different = mine[start : start + step] != theirs[start : start + step]
        if different.any():
            found.append(np.flatnonzero(different.any(axis=1)) + start)
    return np.concatenate(found)


def _words(array: Array) -> npt.NDArray[Any]:
    flat = np.ascontiguousarray(array)
    rows = flat.shape[0]
    row_bytes = flat.nbytes // rows if rows else 0
    if not row_bytes:
        return np.empty((rows, 0), np.uint8)
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    octets = flat.reshape(-1).view(np.uint8).reshape(rows, row_bytes)
    return octets.view(f"u{size}")
