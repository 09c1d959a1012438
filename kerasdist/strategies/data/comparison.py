"""The origin of data, as far as it can be seen without reading them.

A generator, a PyDataset or a pipeline of `tf.data` reads from a source: arrays, lists
of files, ranges. Where that is the same on all workers, the data are the same in
another order; where each worker has other files, they are a part. Different numbers,
such as the rank at which a generator begins, show that the workers read parts, too.

The arguments, free variables and globals of a generator's function are inspected, and
the attributes of objects among them and of a PyDataset, and the sources of a pipeline.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from kerasdist._keras.data.pydataset import GeneratorFacts
from kerasdist._tf.row_pipelines import inspect_pipeline
from kerasdist.strategies.data.encoding import Encoded, encode

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
        sizes = ([leaf.rows for leaf in batch.leaves] for batch in self.batches)
        return sum(next((n for n in each if n is not None), 0) for each in sizes)

    @property
    def leaves(self) -> list[Encoded]:
        """Return the tensors of the first batch."""
        return [leaf for batch in self.batches[:1] for leaf in batch.leaves]

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


def _joined(parts: list[Hashes]) -> Hashes:
    return np.concatenate([np.zeros(0, np.uint64), *parts])


Array = npt.NDArray[Any]
Hashes = npt.NDArray[np.uint64]

# Hashes of data, the same in every process: of the whole, and of each row.
#
# Both are hashes of the bytes: equal numbers of different dtypes have different hashes.

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
        # An array, because numpy warns of an overflow of one number.
        salt = np.array([2 * place + 1], np.uint64) * _GOLDEN
        hashes = _mixed(_hashes_of(leaf) + salt)
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
        words = np.array([hash_text(word) for word in leaf.words], np.uint64)
        return _dense(words.reshape(leaf.arrays[0].shape))
    hashes = _hashes_of(leaf.values)
    if leaf.kind == "sparse":
        indices, shape = leaf.rest
        return _of_rows(hashes, indices[:, 0], _dense(indices[:, 1:]), int(shape[0]))
    for splits in reversed(leaf.rest):
        sizes = np.diff(splits)
        owners = np.repeat(np.arange(len(sizes)), sizes)
        places = np.arange(len(hashes)) - splits[owners]
        rows = _of_rows(hashes, owners, places.astype(np.uint64), len(sizes))
        hashes = rows + _mixed(sizes.astype(np.uint64))
    return hashes


def _of_rows(hashes: Hashes, owners: Array, places: Hashes, rows: int) -> Hashes:
    """Return a hash of each row: of its values' hashes, and their places in it."""
    found = np.zeros(rows, np.uint64)
    np.add.at(found, owners, _mixed(hashes + (places + np.uint64(1)) * _GOLDEN))
    return found


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


# Longer lists aren't inspected.
_MOST_ITEMS = 2_000_000
_DEPTH = 2
# The prefix of a number that isn't known, and differs between any two workers.
ITS_OWN = "its own"
# Code that uses one of these names reads a part.
_RANKS = frozenset(
    {"rank", "local_rank", "node_rank", "task_id", "task_index", "input_pipeline_id"}
)


@dataclass
class Origin:
    """The known facts about the origin of data.

    Attributes:
        shards: For each `shard` in a pipeline: number of shards, and index.
        numbers: Numbers by name.
        rows: Hashes of the rows or items of the sources, by name.
        files: Names of those sources that are lists of file names.
    """

    shards: list[tuple[int, int]] = field(default_factory=list)
    numbers: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Hashes] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)

    def add(self, name: str, value: Any, depth: int = _DEPTH) -> None:
        """Record a variable, if it is data or a number, or contains some."""
        if isinstance(value, (bool, int, np.integer)):
            self.numbers[name] = str(int(value))
        elif isinstance(value, (str, bytes, os.PathLike, range)):
            # Text may be the folder that a worker reads.
            self.numbers[name] = repr(value)[:500]
        elif isinstance(value, tf.distribute.Strategy):
            # The code probably has it to get its rank.
            self.numbers[f"{name}.rank"] = str(getattr(value, "rank", "unknown"))
        elif isinstance(value, tf.data.Dataset):
            self._add_dataset(name, value)
        elif isinstance(value, types.GeneratorType):
            self.add_facts(name, GeneratorFacts(value), depth)
        elif isinstance(value, dict):
            for key, each in list(value.items())[:100]:
                self.add(f"{name}[{key!r}]", each, 0)
        elif isinstance(value, types.FunctionType):
            if depth:
                self.add_facts(name, GeneratorFacts(value), depth - 1)
        else:
            rows = _rows_of(value)
            if rows is not None:
                self._add_rows(name, value, rows)
            elif depth and hasattr(value, "__dict__") and _is_users(value):
                for key, each in list(vars(value).items())[:100]:
                    self.add(f"{name}.{key}", each, depth - 1)

    def _add_rows(self, name: str, value: Any, rows: Hashes) -> None:
        if _is_index(value):
            return  # an index, which doesn't show what it refers to
        self.rows[name] = rows
        if _are_files(value):
            self.files.add(name)

    def _add_dataset(self, name: str, dataset: Any) -> None:
        pipeline = inspect_pipeline(dataset)
        self.shards += pipeline.shards
        self.numbers.update({f"{name}{k}": v for k, v in pipeline.numbers.items()})
        for key, tensor in pipeline.tensors.items():
            if tensor.shape.rank == 0:
                self.numbers[f"{name}{key}"] = str(np.asarray(tensor))
            else:
                rows = row_hashes([encode(tensor)])
                self._add_rows(f"{name}{key}", tensor, rows)
        for key, generator in pipeline.generators.items():
            self.add_facts(f"{name}{key} ", GeneratorFacts(generator))

    def add_facts(self, name: str, facts: GeneratorFacts, depth: int = _DEPTH) -> None:
        """Record the variables that a generator's code can access."""
        for asked in sorted(_RANKS & facts.names):
            # The number that it gets isn't known: a different one on each worker.
            self.numbers[f"{name}(.{asked})"] = f"{ITS_OWN} {secrets.token_hex(8)}"
        for key, value in facts.variables:
            self.add(f"{name}{key}", value, depth)


def origin_of(data: Any) -> Origin:
    """Return the origin of the data of a `tf.data.Dataset`, a generator or an object.

    Args:
        data: The dataset; the facts of the generator; or the object.
    """
    origin = Origin()
    if isinstance(data, GeneratorFacts):
        origin.add_facts("", data)
    elif isinstance(data, tf.data.Dataset):
        origin.add("", data)
    else:
        for key, each in list(vars(data).items())[:100]:
            if not key.startswith("_"):
                origin.add(key, each, _DEPTH - 1)
    return origin


def _rows_of(value: Any) -> Hashes | None:
    """Return hashes of an array's rows, or of a list's items; None for others."""
    if isinstance(value, (list, tuple)):
        if not 1 < len(value) <= _MOST_ITEMS:
            return None
        return _items_of(value)
    if isinstance(value, (type, types.ModuleType)):
        return None
    dimensions = getattr(value, "ndim", None)
    if isinstance(value, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        dimensions = value.shape.rank
    if not dimensions or not (tf.is_tensor(value) or hasattr(value, "__array__")):
        return None
    try:
        return row_hashes([encode(value)])
    except (TypeError, ValueError, NotImplementedError):
        return None


def _is_index(value: Any) -> bool:
    """Return whether an array has the numbers from 0 on, in any order."""
    try:
        numbers = np.asarray(value)
    except (TypeError, ValueError):
        return False
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        return False
    return bool(np.array_equal(np.sort(numbers), np.arange(len(numbers))))


def _are_files(value: Any) -> bool:
    """Return whether a value is text that could be names of files."""
    try:
        some = np.asarray(value[:100]).reshape(-1)
    except (TypeError, ValueError):
        return False
    if not some.size or some.dtype.kind not in "OSU":
        return False
    texts = [os.fsdecode(t) for t in some if isinstance(t, (str, bytes, os.PathLike))]
    return len(texts) == len(some) and all(
        os.sep in text or os.path.splitext(text)[1] for text in texts
    )


def _items_of(items: Any) -> Hashes | None:
    found = np.empty(len(items), np.uint64)
    for place, item in enumerate(items):
        if isinstance(item, np.ndarray):
            text = f"{item.dtype}{item.shape}".encode() + item.tobytes()
        elif isinstance(item, (str, bytes, int, float, tuple, list, np.generic)):
            text = repr(item).encode()
        else:
            text = str(item).encode()
        if b" object at 0x" in text:
            return None
        found[place] = hash_text(text)
    return found


def _is_users(value: Any) -> bool:
    """Return whether an object's class isn't one of a library."""
    if isinstance(value, (type, types.ModuleType)):
        return False
    package = type(value).__module__.partition(".")[0]
    return package not in ("tensorflow", "keras", "kerasdist", "numpy", "builtins")
