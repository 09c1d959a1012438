"""Inspection of a `tf.data.Dataset`'s pipeline, without reading from it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.ops.cache_op import CacheDataset

# The attributes in which sources have their tensors.
_TENSORS = ("_tensors", "_filenames", "_start", "_stop", "_step")
# How deeply nested functions are inspected.
_DEPTH = 6
# A pipeline with more stages was built by a loop: the rest isn't inspected.
_MOST_STAGES = 1000


@dataclass
class Pipeline:
    """The parts of a pipeline.

    Attributes:
        shards: For each `shard`: number of shards, and index.
        numbers: Numbers that select elements: of `skip`, and in functions.
        tensors: The tensors of sources, by stage, attribute and index.
        generators: The functions that `from_generator` was called with.
    """

    shards: list[tuple[int, int]] = field(default_factory=list)
    numbers: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Callable[..., Any]] = field(default_factory=dict)


def inspect_pipeline(dataset: Any) -> Pipeline:
    """Return the parts of a dataset's pipeline, as far as TensorFlow exposes them."""
    found = Pipeline()
    for place, stage in enumerate(_stages(dataset)):
        kind = type(stage).__name__.strip("_").removesuffix("V2")
        _inspect(stage, f"{kind} {place}", found)
    return found


def has_cache(dataset: Any) -> bool:
    """Return whether a dataset keeps elements of a pass for the next ones."""
    return any(isinstance(each, CacheDataset) for each in _stages(dataset))


def _stages(dataset: Any) -> Iterator[Any]:
    stages, count = [dataset], 0
    while stages and count < _MOST_STAGES:
        stage = stages.pop()
        yield stage
        stages += reversed(stage._inputs())
        count += 1


def iterator_dataset(iterator: Any, dataset: Any) -> Any:
    """Return a dataset of an iterator's remaining elements; for one pass.

    Args:
        iterator: The iterator.
        dataset: The dataset that it iterates over, whose options are kept.
    """
    plain = tf.autograph.experimental.do_not_convert

    def following(_: Any) -> Any:
        return iterator.get_next_as_optional()

    made = (
        tf.data.Dataset.counter()
        .map(plain(following))
        .take_while(plain(lambda optional: optional.has_value()))
        .map(plain(lambda optional: optional.get_value()))
    )
    return made.with_options(dataset.options())


def _inspect(stage: Any, name: str, found: Pipeline) -> None:
    if hasattr(stage, "_num_shards") and hasattr(stage, "_index"):
        found.shards.append((int(stage._num_shards), int(stage._index)))
    if name.startswith("SkipDataset"):
        found.numbers[f"count of {name}"] = str(int(stage._count))
    for attribute in _TENSORS:
        value = getattr(stage, attribute, None)
        if value is None or isinstance(value, tf.data.Dataset):
            continue
        values = value if isinstance(value, (list, tuple)) else [value]
        for index, tensor in enumerate(values):
            if tf.is_tensor(tensor) and tensor.dtype not in (tf.variant, tf.resource):
                found.tensors[f"{name}{attribute}[{index}]"] = tensor
    for index, wrapper in enumerate(stage._functions()):
        _look_into(wrapper.function.graph.as_graph_def(), f"{name}[{index}]", found)
        generator = _generator_in(wrapper._func, _DEPTH)
        if generator is not None:
            found.generators[f"{name}[{index}]"] = generator


def _look_into(graph: Any, name: str, found: Pipeline) -> None:
    """Find shards and integers in a function and in those that it calls."""
    every = [graph.node, *(function.node_def for function in graph.library.function)]
    numbers = []
    for nodes in every:
        constants = {}
        for node in nodes:
            if node.op == "Const":
                value = tf.make_ndarray(node.attr["value"].tensor)
                if value.ndim == 0 and value.dtype.kind in "iu":
                    constants[node.name] = int(value)
        numbers += list(constants.values())
        for node in nodes:
            if node.op == "ShardDataset":
                of = [constants.get(each.split(":")[0], -1) for each in node.input[1:3]]
                found.shards.append((of[0], of[1]))
    found.numbers[f"numbers in {name}"] = str(numbers)


def _generator_in(function: Any, depth: int) -> Callable[..., Any] | None:
    """Return the generator function, if `from_generator` has made this function."""
    for value in _closure(function):
        if isinstance(value, dataset_ops.DatasetV2._GeneratorState):
            return value._generator
        if depth and isinstance(value, types.FunctionType):
            found = _generator_in(value, depth - 1)
            if found is not None:
                return found
    return None


def _closure(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # it is empty
