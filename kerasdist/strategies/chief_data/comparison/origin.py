"""The origin of data, as far as it can be seen without reading them.

A generator, a PyDataset or a pipeline of `tf.data` reads from a source: arrays, lists
of files, ranges. Where that is the same on all workers, the data are the same in
another order; where each worker has other files, they are a part. Different numbers,
such as the rank at which a generator begins, show that the workers read parts, too.

The arguments, free variables and globals of a generator's function are inspected, and
the attributes of objects among them and of a PyDataset, and the sources of a pipeline.
"""

from __future__ import annotations

import os
import secrets
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist._keras import GeneratorFacts
from kerasdist._tf.graph.row_pipelines import inspect_pipeline
from kerasdist.strategies.chief_data.comparison.fingerprint import (
    Hashes,
    hash_text,
    row_hashes,
)
from kerasdist.strategies.chief_data.encoding import encode

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
        elif isinstance(value, (str, bytes, os.PathLike)):
            # It may be the folder that a worker reads.
            self.numbers[name] = repr(value)[:500]
        elif isinstance(value, tf.distribute.Strategy):
            # The code probably has it to get its rank.
            self.numbers[f"{name}.rank"] = str(getattr(value, "rank", "unknown"))
        elif isinstance(value, tf.data.Dataset):
            self._add_dataset(name, value)
        elif isinstance(value, types.GeneratorType):
            self.add_facts(name, GeneratorFacts(value), depth)
        elif isinstance(value, range):
            self.numbers[name] = str(value)
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


def of_dataset(dataset: Any) -> Origin:
    """Return the origin of a `tf.data.Dataset`."""
    origin = Origin()
    origin.add("", dataset)
    return origin


def of_generator(facts: GeneratorFacts) -> Origin:
    """Return the origin of a generator's data."""
    origin = Origin()
    origin.add_facts("", facts)
    return origin


def of_object(value: Any) -> Origin:
    """Return the origin of an object's data."""
    origin = Origin()
    for key, each in list(vars(value).items())[:100]:
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
