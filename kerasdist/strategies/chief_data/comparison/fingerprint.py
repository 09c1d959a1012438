"""Hashes of data, the same in every process: of the whole, and of each row.

Both are hashes of the bytes: equal numbers of different dtypes have different hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from kerasdist.strategies.chief_data.encoding import Encoded, encode

# The contents of data to compare: batches, or whole arrays, as x and the rest.


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


Array = npt.NDArray[Any]
Hashes = npt.NDArray[np.uint64]

# Arrays of up to this many bytes are hashed as a whole.
_ALL = 4 << 20
# Of a larger one, rows of this many bytes in all are hashed, and sums of blocks.
_SAMPLED = 1 << 20
_BLOCK_WORDS = 8192
# No more than this is read: an array may be a file that doesn't fit into memory.
_MOST_READ = 4 << 30
# Rows are hashed in parts of about this many bytes, which stay in the cache.
_PART = 1 << 20
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def digest_of(leaves: Sequence[Encoded]) -> str:
    """Return a hash of the contents of tensors, as hexadecimal digits.

    Large arrays are sampled: rows at positions that depend on the shape alone, and the
    sum of each 64 KB, so that a different value is found wherever it is.
    """
    digest = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        digest.update(f"{leaf.kind} {leaf.inner};".encode())
        for array in leaf.arrays:
            digest.update(f"{array.dtype.name}{array.shape};".encode())
            _update(digest, array)
    return digest.hexdigest()


def row_hashes(leaves: Sequence[Encoded]) -> Hashes:
    """Return a hash of each row of tensors that have the same number of rows.

    Tensors without a first dimension, and those with another number of rows than the
    first one, are ignored.
    """
    total: Hashes | None = None
    for place, leaf in enumerate(leaves):
        if leaf.rows is None or (total is not None and leaf.rows != len(total)):
            continue
        hashes = _mixed(_hashes_of(leaf) + np.uint64(2 * place + 1) * _GOLDEN)
        total = hashes if total is None else total + hashes
    return np.zeros(0, np.uint64) if total is None else total


def hash_text(text: bytes) -> int:
    """Return a hash of bytes that fits into 64 bits."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _update(digest: Any, array: Array) -> None:
    if array.nbytes <= _ALL or not array.ndim:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return
    rows = len(array)
    size = max(1, array.nbytes // rows)
    count = min(rows, max(8, _SAMPLED // size))
    chosen = np.linspace(0, rows - 1, count).astype(np.int64)
    sample = np.ascontiguousarray(array[chosen])
    digest.update(sample.reshape(-1).view(np.uint8).data)
    if array.nbytes > _MOST_READ:
        return
    if array.flags.c_contiguous:
        digest.update(_block_sums(array).data)
        return
    step = max(1, _PART // size)
    for start in range(0, rows, step):
        digest.update(_block_sums(np.ascontiguousarray(array[start : start + step])))


def _block_sums(array: Array) -> Array:
    """Return the sums of the words of each block, then of the rest."""
    octets = array.reshape(-1).view(np.uint8)
    whole = len(octets) // (8 * _BLOCK_WORDS) * _BLOCK_WORDS
    sums = octets[: 8 * whole].view(np.uint64).reshape(-1, _BLOCK_WORDS).sum(axis=1)
    rest = octets[8 * whole :]
    words = rest[: len(rest) // 8 * 8].view(np.uint64).sum(dtype=np.uint64)
    last = rest[len(rest) // 8 * 8 :].sum(dtype=np.uint64)
    return np.concatenate([sums, np.array([words, last], np.uint64)])


def _hashes_of(leaf: Encoded) -> Hashes:
    if leaf.kind == "dense":
        return _dense(leaf.arrays[0])
    if leaf.kind == "text":
        lengths, joined = leaf.arrays
        data, ends = joined.tobytes(), np.cumsum(lengths.reshape(-1))
        words = [
            hash_text(data[end - length : end])
            for end, length in zip(ends, lengths.reshape(-1), strict=True)
        ]
        return _dense(np.array(words, np.uint64).reshape(lengths.shape))
    values = leaf.values
    octets = values.arrays[-1].reshape(-1).view(np.uint8).tobytes()
    bounds = _value_bounds(values)
    if leaf.kind == "ragged":
        return _ragged(leaf, bounds, octets)
    indices, shape = leaf.rest
    order = np.argsort(indices[:, 0], kind="stable")
    firsts = np.searchsorted(indices[order, 0], np.arange(int(shape[0]) + 1))
    hashes = np.empty(int(shape[0]), np.uint64)
    for row in range(len(hashes)):
        own = order[firsts[row] : firsts[row + 1]]
        text = indices[own, 1:].tobytes()
        text += b"".join(octets[bounds[i] : bounds[i + 1]] for i in own)
        hashes[row] = hash_text(text)
    return hashes


def _ragged(leaf: Encoded, bounds: Array, octets: bytes) -> Hashes:
    splits = leaf.rest
    hashes = np.empty(len(splits[0]) - 1, np.uint64)
    for row in range(len(hashes)):
        begin, end = row, row + 1
        text = b""
        for split in splits:
            # The lengths of the inner rows of this row.
            text += np.diff(split[begin : end + 1]).tobytes()
            begin, end = int(split[begin]), int(split[end])
        hashes[row] = hash_text(text + octets[bounds[begin] : bounds[end]])
    return hashes


def _value_bounds(values: Encoded) -> Array:
    """Return where each of the values begins among the bytes of all, and the end."""
    first = values.arrays[0]
    if values.kind == "text":
        sizes = first.reshape(len(first), -1).sum(axis=1) if len(first) else first
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    size = first.nbytes // len(first) if len(first) else 0
    return np.arange(len(first) + 1, dtype=np.int64) * size


def _dense(array: Array) -> Hashes:
    rows = len(array)
    hashes = np.empty(rows, np.uint64)
    size = array.nbytes // rows if rows else 0
    words = -(-size // 8)
    if not words:
        hashes[:] = 0
        return hashes
    factors = _mixed(np.arange(1, words + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)
    step = max(1, _PART // (8 * words))
    padded = np.zeros((min(rows, step), 8 * words), np.uint8)
    for start in range(0, rows, step):
        part = np.ascontiguousarray(array[start : start + step])
        here = padded[: len(part)]
        here[:, :size] = part.reshape(-1).view(np.uint8).reshape(len(part), size)
        mixed = _mixed(here.view(np.uint64))
        hashes[start : start + len(part)] = (mixed * factors).sum(axis=1)
    return hashes


def _mixed(words: Hashes) -> Hashes:
    """Make each bit of a word depend on others: floats end in many zeros."""
    mixed = (words ^ (words >> np.uint64(32))) * _MIX
    mixed ^= mixed >> np.uint64(29)
    return mixed
