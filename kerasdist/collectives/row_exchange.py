"""Slices of several tables, and small arrays, from all ranks to all, in one exchange.

Slices are rows of a table, by their indices; each rank has its own number of them.

    1. each rank sends a header: its weight, how many slices of each table it has,
       and the small arrays
    2. all know the weights and the sizes: they reduce the small arrays, in rank order
    3. each rank writes its slices, weighted, to its place in the results: the slices
       of rank 0 come first

If the slices of a table are more bytes than the table has, and occur once on each rank,
the table is summed as a whole instead of 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kerasdist.transport.framing import DTYPES, OPS

# The reduction operations, and the dtypes that each is defined on.

Array = np.ndarray[Any, Any]

_REDUCERS: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def equal_part(length: int, parts: int, index: int, start: int = 0) -> slice:
    """Return the `index`-th of `parts` nearly equal parts of `length` from `start`.

    The first `length % parts` parts are one longer; parts are empty where there are
    more of them than `length`.
    """
    size, longer = divmod(length, parts)
    start += index * size + min(index, longer)
    return slice(start, start + size + (index < longer))


def octets(array: Array) -> memoryview:
    """Return the bytes of a C-contiguous array, which must not be 0-d."""
    return array.reshape(-1).view(np.uint8).data


def itemsize(name: str) -> int:
    """Return the bytes of one element of a checked dtype; 0 for "none"."""
    bits = name.lstrip("abcdefghijklmnopqrstuvwxyz")  # also of bfloat16
    return int(bits) // 8 if bits else int(name == "bool")


def reducer(op: str) -> np.ufunc:
    """Return the element-wise function of a checked op."""
    return _REDUCERS[op]


def reduce_in_order(inputs: Sequence[Array], op: str, out: Array) -> None:
    """Reduce arrays in rank order into `out`, which is none of them."""
    combine = reducer(op)
    if len(inputs) == 1:
        np.copyto(out, inputs[0])
        return
    combine(inputs[0], inputs[1], out=out)
    for values in inputs[2:]:
        combine(out, values, out=out)


def check_dtype(dtype: np.dtype[Any]) -> str:
    """Return the dtype's name in messages between ranks.

    Raises:
        TypeError: It isn't a numeric dtype or bool.
    """
    if dtype.name not in DTYPES[1:] or not dtype.isnative:
        raise TypeError(
            "A collective moves arrays of numbers or bools in the machine's byte "
            f"order. Received: dtype={dtype!r}; expected one of {DTYPES[1:]}. Convert "
            "the array first."
        )
    return str(dtype.name)


def check_op(op: str, dtype: np.dtype[Any]) -> None:
    """Check that `op` exists and has a meaning on `dtype`.

    Raises:
        ValueError: There is no such op.
        TypeError: It has no meaning on this dtype.
    """
    if op not in _REDUCERS:
        raise ValueError(
            f"Unknown reduction. Received: op={op!r}; expected one of {OPS[1:]}."
        )
    if dtype.kind == "b" and op in ("sum", "prod"):
        raise TypeError(
            f"{op!r} has no meaning on bool. Received: op={op!r}, dtype=bool. Use "
            "'max' for a logical or, 'min' for a logical and, or convert to an integer "
            "dtype to count."
        )
    if dtype.kind == "c" and op in ("min", "max"):
        raise TypeError(
            f"Complex numbers have no order. Received: op={op!r}, dtype={dtype.name}. "
            "Use 'sum' or 'prod'."
        )


def check_scale(scale: float, op: str, dtype: np.dtype[Any]) -> None:
    """Check that a scale is possible with this operation and dtype.

    Raises:
        TypeError: `dtype` isn't one of numpy's floats.
        ValueError: The op isn't a sum.
    """
    if op != "sum":
        raise ValueError(
            f"A scale is only for sums. Received: scale={scale!r}, op={op!r}. Use "
            "op='sum', or multiply the result."
        )
    if dtype.kind != "f":
        raise TypeError(
            f"Only floats can be scaled. Received: scale={scale!r}, "
            f"dtype={dtype.name}; expected float16, float32 or float64. Convert the "
            "array first."
        )


# TensorFlow takes over memory that begins at a multiple of this without copying.
_ALIGNMENT = 64
_LEAST_BYTES = 64 << 10


class Slices(NamedTuple):
    """One rank's slices of a table.

    Attributes:
        values: Of shape `(n, ...)`.
        indices: Integers of shape `(n,)`.
        rows: The number of rows of the table, if no index occurs twice: then the table
            may be summed as a whole. Else 0.
    """

    values: Array
    indices: Array
    rows: int = 0


class RowExchange:
    """One exchange, as one rank sees it: what is sent, and where results are.

    Args:
        rank: This rank.
        size: The number of ranks.
        tables: This rank's slices.
        weight: What this rank's slices and `means` are multiplied with, after division
            by the total. With 0 the rank adds nothing, whatever its arrays hold. None:
            nothing is multiplied.
        total: The sum of the weights, if it's known, or None.
        means: Small arrays of floats; those of 16 bits are added up in 32.
        sums: Small arrays of any dtype, which aren't weighted.

    Attributes:
        shapes: Dtypes and shapes that are the same on all ranks.
        header_bytes: Bytes of a header.
        notes: A number of each rank, after `read`.
        whole: The numbers of the tables that are summed as a whole, after `read`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        tables: Sequence[Slices],
        weight: int | None,
        total: int | None,
        means: Sequence[Array],
        sums: Sequence[Array],
    ) -> None:
        self._rank, self._size = rank, size
        self._tables = list(tables)
        self._weight, self._total = weight, total
        self._small = [np.asarray(a, order="C") for a in (*means, *sums)]
        self._means = len(means)
        self.shapes = [
            *((t.values.dtype.name, t.values.shape[1:]) for t in tables),
            *((t.indices.dtype.name, ()) for t in tables),
            *((a.dtype.name, a.shape) for a in self._small),
        ]
        self._numbers = 2 + 2 * len(self._tables)
        self.header_bytes = 8 * self._numbers + sum(
            _even(a.nbytes) for a in self._small
        )
        self.notes: list[int] = []
        self.whole: list[int] = []
        self._shares: list[float | None] = []
        self._counts = np.zeros((size, len(self._tables)), np.int64)

    def write_header(self, header: Array, note: int) -> None:
        """Fill this rank's header, an array of bytes.

        Args:
            header: Where to.
            note: A number for the other ranks.
        """
        numbers = header[: 8 * self._numbers].view(np.uint64)
        numbers[0] = note
        numbers[1] = 1 if self._weight is None else self._weight
        for place, table in enumerate(self._tables):
            count = 0 if self._weight == 0 else len(table.indices)
            numbers[2 + 2 * place : 4 + 2 * place] = count, table.rows
        start = numbers.nbytes
        for array in self._small:
            header[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
            start += _even(array.nbytes)

    def read(self, headers: Array) -> list[Array]:
        """Read all ranks' headers, an array of bytes; return the small arrays' results.

        They are new arrays, bit-identical on all ranks.
        """
        numbers = headers[:, : 8 * self._numbers].view(np.uint64)
        self.notes = numbers[:, 0].tolist()
        weights = numbers[:, 1].tolist()
        self._counts = numbers[:, 2::2].astype(np.int64)
        self._shares = [None] * self._size
        if self._weight is not None:
            total = sum(weights) if self._total is None else self._total
            self._shares = [weight / total if total else 0.0 for weight in weights]
        rows = numbers[:, 3::2].min(0).tolist() if self._tables else []
        counts = self._counts.sum(0).tolist()
        for place, table in enumerate(self._tables):
            row = _row_bytes(table.values)
            sent = counts[place] * (row + table.indices.itemsize)
            if self._size > 1 and rows[place] and sent >= rows[place] * row:
                self.whole.append(place)
        found = []
        start = 8 * self._numbers
        for place, array in enumerate(self._small):
            every = headers[:, start : start + array.nbytes].view(array.dtype)
            shares = self._shares if place < self._means else [None] * self._size
            total = _sum(every, shares).astype(array.dtype, copy=False)
            found.append(total.reshape(array.shape))
            start += _even(array.nbytes)
        return found

    def table(self, place: int) -> Array:
        """Return this rank's part of a table that is summed as a whole: flat, wide."""
        values, indices, rows = self._tables[place]
        wide = np.promote_types(values.dtype, np.float32)
        if values.dtype.kind in "iuc":
            wide = values.dtype
        dense = np.zeros((rows, *values.shape[1:]), wide)
        if self._counts[self._rank, place]:
            share = self._shares[self._rank]
            dense[indices] = values if share is None else values.astype(wide) * share
        return dense.reshape(-1)

    def as_slices(self, place: int, table: Array) -> tuple[Array, Array]:
        """Return the values and indices of a table that was summed."""
        values, indices, rows = self._tables[place]
        summed = table.reshape(rows, *values.shape[1:])
        return (
            summed.astype(values.dtype, copy=False),
            np.arange(rows, dtype=indices.dtype),
        )

    def _sent(self) -> list[tuple[int, Array, bool]]:
        """Return the arrays whose rows are gathered.

        Each with the number of its table, and whether it is weighted.
        """
        some = [i for i in range(len(self._tables)) if i not in self.whole]
        return [
            *((i, self._tables[i].values, True) for i in some),
            *((i, self._tables[i].indices, False) for i in some),
        ]

    @property
    def result_bytes(self) -> int:
        """The bytes of all gathered arrays, one after the other, rounded up."""
        size = 0
        for place, array, _ in self._sent():
            size += _aligned(int(self._counts[:, place].sum()) * _row_bytes(array))
        if not size:
            return 0
        # Numbers of slices that change a little need the same memory.
        unit = max(_LEAST_BYTES, 1 << max(size.bit_length() - 4, 0))
        return -(-size // unit) * unit

    def write(self, memory: Array) -> list[Array]:
        """Write this rank's slices into memory that all ranks share.

        Returns:
            All ranks' values and then indices, as views of the memory, which are
            complete when all ranks have written.
        """
        found = []
        start = 0
        for place, array, weighted in self._sent():
            counts = self._counts[:, place]
            row = _row_bytes(array)
            end = start + int(counts.sum()) * row
            shape = (int(counts.sum()), *array.shape[1:])
            every = memory[start:end].view(array.dtype).reshape(shape)
            first = int(counts[: self._rank].sum())
            mine = every[first : first + int(counts[self._rank])]
            self._put(array, weighted, mine)
            found.append(every)
            start = start + _aligned(end - start)
        return found

    def buffers(self) -> list[Array]:
        """Return a buffer of bytes for each rank's slices; this rank's is filled."""
        sent = self._sent()
        buffers = [
            np.zeros(sum(int(counts[i]) * _row_bytes(a) for i, a, _ in sent), np.uint8)
            for counts in self._counts
        ]
        mine = self._parts(buffers, self._rank)
        for (_, array, weighted), part in zip(sent, mine, strict=True):
            self._put(array, weighted, part)
        return buffers

    def join(self, buffers: list[Array]) -> list[Array]:
        """Return all ranks' values and then indices, from their buffers."""
        parts = [self._parts(buffers, rank) for rank in range(self._size)]
        return [np.concatenate(same) for same in zip(*parts, strict=True)]

    def _parts(self, buffers: list[Array], rank: int) -> list[Array]:
        found = []
        start = 0
        for place, array, _ in self._sent():
            count = int(self._counts[rank, place])
            end = start + count * _row_bytes(array)
            part = buffers[rank][start:end]
            found.append(part.view(array.dtype).reshape(count, *array.shape[1:]))
            start = end
        return found

    def results(self, gathered: list[Array], tables: list[Array]) -> list[Array]:
        """Return values and indices of each table, in order.

        Args:
            gathered: What `write` or `join` returned.
            tables: The sums of `whole`.
        """
        half = len(gathered) // 2
        pairs = iter(zip(gathered[:half], gathered[half:], strict=True))
        sums = iter(tables)
        found: list[Array] = []
        for place in range(len(self._tables)):
            if place in self.whole:
                found += self.as_slices(place, next(sums))
            else:
                found += next(pairs)
        return found

    def _put(self, array: Array, weighted: bool, out: Array) -> None:
        """Write this rank's rows of an array, of which it may send none."""
        share = self._shares[self._rank] if weighted else None
        rows = array[: len(out)]
        if share is None or not len(out):
            np.copyto(out, rows)
        elif array.itemsize < 4:
            out[...] = rows.astype(np.float32) * share
        else:
            np.multiply(rows, share, out=out)


def _sum(every: Array, shares: Sequence[float | None]) -> Array:
    """Add up the ranks' arrays in rank order; weighted ones at least in 32 bits."""
    if shares[0] is None:
        added: Array = every[0].copy()
        for array in every[1:]:
            added += array
        return added
    wide = np.promote_types(every.dtype, np.float32)
    total: Array = np.zeros(every.shape[1:], wide)
    for array, share in zip(every, shares, strict=True):
        if share:
            total += array.astype(wide, copy=False) * share
    return total


def _row_bytes(array: Array) -> int:
    return int(math.prod(array.shape[1:], start=array.itemsize))


def _even(size: int) -> int:
    return -(-size // 8) * 8


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
