"""Arrays and other data of `fit`, `evaluate`, `predict`, and Keras's iteration."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.trainers import epoch_iterator
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    array_slicing,
    generator_data_adapter,
    py_dataset_adapter,
)
from keras.src.utils import rng_utils

from kerasdist import _tf
from kerasdist._keras.context import current
from kerasdist._keras.data.batches import LoopData
from kerasdist._keras.data.generators import GeneratorFacts
from kerasdist._keras.data.pydataset import ItemData
from kerasdist._keras.protocols import DynamicHooks, KerasHooks, dynamic_hooks, hooks_of

__all__ = [
    "ArrayData",
    "batch_size_of_fit",
    "batches_of_fit",
    "deal_batches",
    "first_item",
    "init_epoch_iterator",
    "random_seed",
]


# Batches that are taken from arrays at a time, and batches that are prefetched.
_AT_ONCE, _AHEAD = 4, 2


class ArrayData:
    """Arrays that were given to `fit`, `evaluate` or `predict`.

    Attributes:
        samples: Number of samples.
        batch_size: Rows of the global batch.
        shuffle: False, True, or "batch" (within each batch).
    """

    def __init__(self, adapter: Any) -> None:
        self.samples = int(adapter._num_samples)
        self.batch_size = int(adapter._batch_size)
        self.shuffle: bool | str = adapter._shuffle
        self._inputs = adapter._inputs
        self._parts: Any = None

    def leaves(self) -> tuple[list[Any], list[Any]]:
        """Return the arrays and tensors of x, and those of targets and weights.

        They are as TensorFlow takes them: floats in Keras's precision, text as a
        tensor, sparse data as a `tf.SparseTensor`.
        """
        parts = self._sliceable()
        if isinstance(parts, tuple) and len(parts) > 1:
            return _leaves(parts[0]), _leaves(parts[1:])
        return _leaves(parts), []

    def replace(self, leaves: Sequence[Any], batch_size: int) -> None:
        """Replace the data by other data of the same structure.

        Args:
            leaves: In the order and form of `leaves`.
            batch_size: Rows of the global batch.
        """
        parts = self._sliceable()
        following = iter(leaves)

        def one(array: Any) -> Any:
            if isinstance(array, array_slicing.TensorflowSparseWrapper):
                return array_slicing.to_tensorflow_sparse_wrapper(next(following))
            if array is None or isinstance(array, (list, tuple, dict)):
                return None
            return next(following)

        self._parts = tree.traverse(one, parts)
        self.samples = int(leaves[0].shape[0])
        self.batch_size = batch_size

    def reader(self) -> Callable[[Any], Any]:
        """Return a function that reads a batch at once, given its index vector."""
        inputs = tree.map_structure(_as_tensor, self._taken())
        return lambda rows: _take_rows(inputs, rows)

    def _sliceable(self) -> Any:
        if self._parts is None:
            self._parts = tree.lists_to_tuples(
                array_slicing.convert_to_sliceable(
                    self._inputs, target_backend="tensorflow"
                )
            )
        return self._parts

    def _taken(self) -> Any:
        """Return the leaves and give them up: they may be a copy of all data."""
        parts, self._parts = self._sliceable(), None
        self._inputs = None
        return parts

    def take(
        self,
        parts: Any,
        rows: Callable[[Any], Any],
        finish: Callable[[Any, Any], Any],
    ) -> Any:
        """Return a dataset of batches, of which only their own rows are read.

        Args:
            parts: A dataset of numbers, one for each batch.
            rows: Returns a batch's index vector, given its number. AutoGraph converts
                neither this nor `finish`.
            finish: Makes the dataset's element from the batch and its number.
        """
        inputs = self._taken()

        # No Python here depends on a tensor, and converting all called functions takes
        # as long as a small model's first steps.
        @tf.autograph.experimental.do_not_convert
        def gather(part: Any, data: Any) -> Any:
            return finish(_take_rows(data, rows(part)), part)

        whole = tf.data.Dataset.from_tensors(inputs).repeat()
        # TensorFlow's graph optimizations serialize the pipeline with all its data, and
        # parse it again, in each epoch. Keras disables them, too.
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False
        # Autotuning is off, too. Its thread may miss that an iterator was released and
        # sleep on: 10 ms at first, then twice as long each time, at most a minute
        # (`Model::OptimizeLoop` in tensorflow/core/framework/model.cc), while the next
        # epoch waits.
        options.autotune.enabled = False
        return (
            tf.data.Dataset.zip((parts, whole))
            .map(gather, num_parallel_calls=_AT_ONCE, deterministic=True)
            .prefetch(_AHEAD)
            .with_options(options)
        )


def _leaves(parts: Any) -> list[Any]:
    found: list[Any] = []

    def one(array: Any) -> Any:
        if array is None or isinstance(array, (list, tuple, dict)):
            if not isinstance(array, array_slicing.TensorflowSparseWrapper):
                return None
            found.append(array.sparse)
            return array
        found.append(array)
        return array

    tree.traverse(one, parts)
    return found


def _take_rows(inputs: Any, rows: Any) -> Any:
    """Return the given rows of all arrays in a nest; other leaves stay unchanged."""

    def one(array: Any) -> Any:
        if isinstance(array, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(array, rows)
        if isinstance(array, (list, tuple, dict)):
            return None
        if not tf.is_tensor(array):
            return array
        return tf.gather(array, rows, axis=0)

    return tree.traverse(one, inputs)


def _as_tensor(array: Any) -> Any:
    return tf.convert_to_tensor(array) if isinstance(array, np.ndarray) else array


def random_seed() -> int | None:
    """Return the seed of `keras.utils.set_random_seed`, or None."""
    seed = rng_utils.get_random_seed()
    return None if seed is None else int(seed)


def init_epoch_iterator(
    original: Callable[..., Any],
    self: Any,
    distribute_strategy: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Replace `TFEpochIterator.__init__`.

    Keras shuffles arrays with an unseeded operation, in another order on each worker.
    """
    if not current.evaluating:
        current.iterator = weakref.ref(self)
    hooks = hooks_of(distribute_strategy)
    if hooks is None:
        original(self, distribute_strategy, *args, **kwargs)
        return
    if isinstance(kwargs.get("x"), LoopData):
        kwargs["x"] = kwargs["x"].dataset  # its batches are claimed below
    given = kwargs["x"] if "x" in kwargs else next(iter(args), None)
    # Keras reads two batches of it, which may be all there are.
    generator = (
        GeneratorFacts(given) if isinstance(given, types.GeneratorType) else None
    )
    epoch_iterator.EpochIterator.__init__(self, *args, **kwargs)
    self._distribute_strategy = distribute_strategy
    adapter = self.data_adapter
    if current.data_pending:
        current.data_pending = False
        dynamic = dynamic_hooks(distribute_strategy)
        if dynamic is not None:
            deal_batches(self, dynamic)
            return
    if hooks.shards and isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        self._distributed_dataset = hooks.distribute_arrays(ArrayData(adapter))
        return
    if hooks.shards and isinstance(adapter, py_dataset_adapter.PyDatasetAdapter):
        self._distributed_dataset = hooks.distribute_items(ItemData(adapter))
        if self._distributed_dataset is not None:
            adapter.enqueuer = None  # it would read all items
            length = self._distributed_dataset.length
            if length != adapter.num_batches:
                self.data_adapter = _WithLength(adapter, length)
                self._num_batches = length
            return
        _agree_on_order(adapter, hooks)
    self._distributed_dataset, length = hooks.distribute_dataset(
        adapter.get_tf_dataset(),
        adapter.num_batches,
        generator,
        is_items=isinstance(adapter, py_dataset_adapter.PyDatasetAdapter),
    )
    if length != adapter.num_batches:
        # The largest number of any worker, because Keras's loop counts batches.
        self.data_adapter = _WithLength(adapter, length)
        self._num_batches = length


def first_item(iterator: Any) -> Any:
    """Return a batch of the PyDataset that Keras prefetches for an iterator, or None.

    Keras reads a batch before it trains, and abandons that iterator. The items that
    were prefetched for it would be the first of the epoch, and as many would be missing
    at the epoch's end.
    """
    adapter = _adapter_of(iterator)
    if getattr(adapter, "enqueuer", None) is None:
        return None
    return adapter._standardize_batch(adapter.py_dataset[0])


def batch_size_of_fit() -> int | None:
    """Return the rows of a batch of `fit`, at its beginning; None if not known.

    The last one of an epoch may have fewer.
    """
    iterator = None if current.iterator is None else current.iterator()
    if iterator is None:
        return None
    adapter = _adapter_of(iterator)
    if isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        return int(adapter._batch_size)
    if isinstance(adapter, py_dataset_adapter.PyDatasetAdapter):
        items = adapter.py_dataset
        if isinstance(items, _InOrder):
            items = (
                items.dataset
            )  # the first in the shuffled order may be the short one
        first = tree.flatten(adapter._standardize_batch(items[0]))
        return int(first[0].shape[0]) if first else None
    try:
        return _tf.static_batch_size(adapter.get_tf_dataset())
    except (AttributeError, IndexError, TypeError, ValueError, tf.errors.OpError):
        return None  # it was distributed already, or its elements aren't batches


def batches_of_fit() -> int | None:
    """Return the batches of an epoch of `fit`, at its start; None: not known."""
    iterator = None if current.iterator is None else current.iterator()
    count = None if iterator is None else iterator.num_batches
    return None if count is None else int(count)


def deal_batches(iterator: Any, hooks: DynamicHooks) -> None:
    """Let an epoch iterator yield the batches that this worker claims.

    Its step numbers are those of the batches in the whole epoch.
    """
    adapter = iterator.data_adapter
    if hooks.shards and isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        dealt = hooks.deal_arrays(ArrayData(adapter))
    elif hooks.shards and isinstance(adapter, py_dataset_adapter.PyDatasetAdapter):
        dealt = hooks.deal_items(ItemData(adapter))
        adapter.enqueuer = None  # it would read all items
    else:
        if hooks.shards and isinstance(
            adapter, generator_data_adapter.GeneratorDataAdapter
        ):
            _refuse_generator(hooks.workers.replicas)
        dealt = hooks.deal_dataset(adapter.get_tf_dataset(), adapter.num_batches)
    if dealt.length != adapter.num_batches:
        iterator.data_adapter = adapter = _WithLength(adapter, dealt.length)
        iterator._num_batches = dealt.length
    iterator._distributed_dataset = dealt

    def enumerate_batches() -> Any:
        adapter.on_epoch_begin()
        batches = dealt.begin_epoch(iterator.steps_per_epoch)
        if current.readers is not None:
            current.readers.add(dealt)
        while batches.ready():
            first = batches.number
            yield first, first + iterator.steps_per_execution - 1, batches
        adapter.on_epoch_end()

    iterator._enumerate_iterator = enumerate_batches


class _WithLength:
    """A data adapter with another number of batches."""

    def __init__(self, adapter: Any, num_batches: int | None) -> None:
        self.adapter = adapter
        self.num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)


def _adapter_of(iterator: Any) -> Any:
    """Return the adapter that Keras made for an epoch iterator."""
    adapter = iterator.data_adapter
    return adapter.adapter if isinstance(adapter, _WithLength) else adapter


class _InOrder(py_dataset_adapter.PyDataset):
    """A PyDataset whose items are in an order that all workers agree on.

    The order changes only at the end of an epoch, when nothing fetches items.
    """

    def __init__(self, dataset: Any, draw: Callable[[int, int], Any]) -> None:
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self.dataset = dataset
        self._draw = draw
        self._epoch = 0
        self.order = self._next_order()

    def _next_order(self) -> Any:
        self._epoch += 1
        return self._draw(self.dataset.num_batches, self._epoch)

    @property
    def num_batches(self) -> int | None:
        return self.dataset.num_batches

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.order[index])]

    def __getstate__(self) -> dict[str, Any]:
        # Only what other processes need to read items.
        return {**self.__dict__, "_draw": None}

    def on_epoch_begin(self) -> None:
        self.dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.dataset.on_epoch_end()
        self.order = self._next_order()


def _agree_on_order(adapter: Any, hooks: KerasHooks) -> None:
    """Shuffle items alike on all workers; Keras's order differs between workers."""
    if (
        hooks.workers.replicas == 1
        or not adapter.shuffle
        or adapter.num_batches is None
    ):
        return
    items = _InOrder(adapter.py_dataset, hooks.order_of_epochs())
    adapter.shuffle = False
    adapter.py_dataset = items
    if adapter.enqueuer is not None:
        adapter.enqueuer.shuffle = False
        adapter.enqueuer.py_dataset = items
        return

    def iterate() -> Any:
        # An iterator keeps the order with which it began.
        for index in list(items.order):
            yield adapter._standardize_batch(items.dataset[int(index)])

    adapter._get_iterator = iterate


def _refuse_generator(replicas: int) -> None:
    if replicas == 1:
        return
    raise ValueError(
        "A plain Python generator can't be divided over several replicas: it isn't "
        "known whether each worker's generator yields the same batches or its own part "
        f"of them. Received: a generator, with {replicas} replicas. Use arrays, a "
        "`keras.utils.PyDataset`, or a `tf.data.Dataset` "
        "(`tf.data.Dataset.from_generator`) of global batches, the same on all "
        "workers; or, if each worker's generator yields its own part, pass shard='off' "
        "to the strategy."
    )
