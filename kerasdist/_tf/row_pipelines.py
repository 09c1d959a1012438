"""Pipelines whose rows are made one by one: maps that can follow a choice of rows.

    source, shuffle  ->  map, repeat, take  ->  batch(B)  ->  prefetch, repeat, take
    read whole           rows                                 batches

The maps between the last other stage and `batch` can be called for some rows only, if
their functions have no state: random numbers, counters and Python depend on the rows
before. So the pipeline is taken apart: elements in windows of B, and the maps.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import (
    batch_op,
    dataset_ops,
    map_op,
    prefetch_op,
    repeat_op,
    skip_op,
    take_op,
)
from tensorflow.python.data.ops.cache_op import CacheDataset
from tensorflow.python.data.util import structure
from tensorflow.python.framework import op_def_registry

# Inspection of a `tf.data.Dataset`'s pipeline, without reading from it.

# The attributes in which sources have their tensors.
_TENSORS = ("_tensors", "_filenames", "_start", "_stop", "_step")
# How deeply nested functions are inspected.
_DEPTH = 6
# A pipeline with more stages was built by a loop: the rest isn't inspected.
_MOST_STAGES = 1000


@dataclass
class PipelineParts:
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


def inspect_pipeline(dataset: Any) -> PipelineParts:
    """Return the parts of a dataset's pipeline, as far as TensorFlow exposes them."""
    found = PipelineParts()
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


def _inspect(stage: Any, name: str, found: PipelineParts) -> None:
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


def _look_into(graph: Any, name: str, found: PipelineParts) -> None:
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


_BATCHES = (batch_op._BatchDataset, batch_op._ParallelBatchDataset)
_MAPS = (map_op._MapDataset, map_op._ParallelMapDataset)
_TRANSPARENT = (prefetch_op._PrefetchDataset, dataset_ops._OptionsDataset)
# Stages that are the same on elements, rows and batches.
_COUNTED: dict[type, Callable[[Any, Any], Any]] = {
    repeat_op._RepeatDataset: lambda dataset, count: dataset.repeat(count),
    take_op._TakeDataset: lambda dataset, count: dataset.take(count),
    skip_op._SkipDataset: lambda dataset, count: dataset.skip(count),
}
# Ops that are marked as stateful, and don't change what they read.
_READING = {
    *("Assert", "Case", "If", "While", "StatefulPartitionedCall"),
    *("LookupTableFind", "LookupTableFindV2"),
    *("LookupTableSize", "LookupTableSizeV2", "ReadVariableOp", "VariableShape"),
}
_PYTHON = {"PyFunc", "EagerPyFunc"}


@dataclass(frozen=True)
class RowPipeline:
    """A pipeline that has been taken apart.

    Attributes:
        windows: A dataset whose elements are, for each batch of the pipeline, a nest
            of datasets: each has one component of the elements that the batch's rows
            are made of.
        batch_size: Rows of a batch; the last one of a pass may have fewer.
        drop_remainder: Whether all have `batch_size` rows.
        options: The pipeline's options.
    """

    windows: Any
    batch_size: int
    drop_remainder: bool
    options: Any
    _maps: tuple[Any, ...]

    def make_rows(self, elements: Any) -> Any:
        """Call the maps with a dataset's elements.

        Args:
            elements: A dataset of pairs: anything, and an element of a window.

        Returns:
            A dataset of pairs: the same, and the row.
        """
        for stage in self._maps:
            elements = _call(stage, elements)
        return elements

    def batch_of(self, window: Any) -> Any:
        """Return the whole batch of a window."""
        elements = tf.data.Dataset.zip(
            (tf.data.Dataset.from_tensors(0).repeat(), tf.data.Dataset.zip(window))
        )
        rows = self.make_rows(elements).map(_second)
        rows = rows.batch(self.batch_size, drop_remainder=self.drop_remainder)
        return rows.get_single_element()

    def batches(self, windows: Any) -> Any:
        """Return a dataset of the whole batches of a dataset of windows."""

        @tf.autograph.experimental.do_not_convert
        def batch(*window: Any) -> Any:
            return self.batch_of(_packed(windows, window))

        made = windows.map(batch)
        return made.with_options(self.options)


def row_pipeline(dataset: Any) -> RowPipeline | str:
    """Take a pipeline apart, without reading from it.

    Returns:
        The pipeline; or why rows can't be made without the others, as a clause.
    """
    if dataset.options().deterministic is False:
        return "its options don't keep the order of elements"
    of_batches, stage = _counted(dataset)
    if isinstance(stage, _MAPS):
        return "`map` after `batch` needs whole batches"
    if not isinstance(stage, _BATCHES):
        return f"{_name(stage)} stands after `batch`, or in its place"
    size = tf.get_static_value(stage._batch_size)
    drop = tf.get_static_value(stage._drop_remainder)
    if size is None or drop is None or _is_unordered(stage):
        return "`batch` doesn't keep the order of elements, or has a variable size"
    between, source = _maps_before(stage._input_dataset)
    maps = [each for each in between if isinstance(each, _MAPS)]
    if not maps:
        why = _why_not(source)
        return why or f"no `map` stands between {_name(source)} and `batch`"
    elements = maps[-1]._input_dataset
    for each in reversed(between[: between.index(maps[-1])]):
        elements = _again(each, elements)
    if not all(
        isinstance(spec, tf.TensorSpec)
        for spec in tf.nest.flatten(elements.element_spec)
    ):
        return "elements before `map` aren't dense tensors"
    windows = elements.window(int(size), drop_remainder=bool(drop))
    for each in reversed(of_batches):
        windows = _again(each, windows)
    chosen = dataset.options()
    return RowPipeline(
        windows=windows.with_options(chosen),
        batch_size=int(size),
        drop_remainder=bool(drop),
        options=chosen,
        _maps=tuple(reversed(maps)),
    )


def _counted(dataset: Any) -> tuple[list[Any], Any]:
    """Return the last stages that can be made again, last first, and the one before."""
    found, stage = [], dataset
    while True:
        if isinstance(stage, tuple(_COUNTED)):
            found.append(stage)
        elif not isinstance(stage, _TRANSPARENT):
            return found, stage
        stage = stage._input_dataset


def _maps_before(dataset: Any) -> tuple[list[Any], Any]:
    """Return the stages that can follow a choice of rows, and the one before them."""
    every: list[Any] = []
    stage = dataset
    while True:
        found, stage = _counted(stage)
        every += found
        if not isinstance(stage, _MAPS) or _why_not(stage):
            return every, stage
        every.append(stage)
        stage = stage._input_dataset


def _again(stage: Any, dataset: Any) -> Any:
    """Put a stage behind another dataset; maps come later."""
    make = _COUNTED.get(type(stage))
    return dataset if make is None else make(dataset, stage._count)


def _why_not(stage: Any) -> str:
    """Return why a map can't be called for some rows only; empty: it can."""
    if not isinstance(stage, _MAPS):
        return ""
    if _is_unordered(stage) or not stage._preserve_cardinality:
        return "`map` doesn't keep the order of elements"
    function = stage._map_func.function
    if not hasattr(function, "structured_outputs"):
        return "the function of `map` can't be inspected"
    for op in _ops_of(function.graph.as_graph_def()):
        if op in _PYTHON:
            return "the function of `map` calls Python"
        known = op_def_registry.get(op)
        if known is not None and known.is_stateful and op not in _READING:
            return f"the function of `map` has a state, or random numbers ({op})"
    return ""


def _is_unordered(stage: Any) -> bool:
    return getattr(stage, "_deterministic", "default") == "false"


def _ops_of(graph: Any) -> Iterator[str]:
    for nodes in (graph.node, *(each.node_def for each in graph.library.function)):
        for node in nodes:
            yield node.op


def _call(stage: Any, elements: Any) -> Any:
    """Map the second components of a dataset's elements as a stage does."""
    wrapper, spec = stage._map_func, stage._input_dataset.element_spec

    @tf.autograph.experimental.do_not_convert
    def call(other: Any, element: Any) -> Any:
        flat = wrapper.function(*structure.to_tensor_list(spec, element))
        made = structure.from_compatible_tensor_list(wrapper.output_structure, flat)
        return other, made

    calls = getattr(stage, "_num_parallel_calls", None)
    if calls is None:
        return elements.map(call)
    return elements.map(call, calls, deterministic=True)


@tf.autograph.experimental.do_not_convert
def _second(other: Any, row: Any) -> Any:
    del other
    return row


def _packed(dataset: Any, arguments: tuple[Any, ...]) -> Any:
    """Return an element from the arguments with which a function is called."""
    return arguments if type(dataset.element_spec) is tuple else arguments[0]


def _name(stage: Any) -> str:
    name = type(stage).__name__.strip("_").removesuffix("V2")
    return f"`{name.removesuffix('Dataset').lower() or 'dataset'}`"
