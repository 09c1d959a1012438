"""Keras's epoch iterators over the data that a strategy distributes."""

from __future__ import annotations

import contextlib
import gc
import traceback
import types
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras.src import tree
from keras.src.trainers import epoch_iterator
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    py_dataset_adapter,
)

from kerasdist import _tf
from kerasdist._keras.context import current
from kerasdist._keras.data.arrays import ArrayData, CountedData, LoopData, uses_of
from kerasdist._keras.data.pydataset import (
    GeneratorFacts,
    ItemData,
    ItemsInOrder,
    agree_on_order,
)
from kerasdist._keras.protocols import DataDivision, KerasHooks, hooks_of
from kerasdist._tf.patching import Original
from kerasdist.transport.liveness.failure_protocol import final_exception

# Files of `Dataset.cache(filename)`: each rank its own.
#
# Ranks of one folder would write to the same file, which TensorFlow refuses.

_ranks: list[int] = []


def note_rank(rank: int) -> None:
    """Note this process's rank in the job that it has joined last."""
    _ranks[:] = [rank]


def cache(
    original: Original, dataset: Any, filename: Any = "", name: Any = None
) -> Any:
    """Replace `Dataset.cache`: append the rank to the file's name, but rank 0's."""
    rank = _ranks[0] if _ranks else 0
    if rank and not (isinstance(filename, str) and not filename):
        filename = tf.strings.join([filename, f".rank-{rank}"])
    return original(dataset, filename, name)


# The end of the threads that read data, before the interpreter's own end.
#
# The destructor of a dataset's iterator waits for the iterator's threads, and one of
# these may be in a Python function (`from_generator`, `numpy_function`), which needs
# the interpreter's lock to return. While the interpreter ends, no other thread gets the
# lock: the process waits for ever (plain Keras does, too). What keeps an iterator so
# long is an error that left `fit`: its traceback holds the frames of the call.

_failed = False


@contextlib.contextmanager
def ending_threads_after_error() -> Iterator[None]:
    """End the threads at the process's exit if the block raises."""
    global _failed
    try:
        yield
    except BaseException:
        _failed = True
        raise


def destroy_iterators() -> None:
    """Destroy the iterators that an error keeps, if a block above has raised.

    Called at the process's exit. It waits for functions that read data.
    """
    if not _failed:
        return
    error = final_exception()
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            # Keras leaves its own frames out of the traceback, not out of these.
            for caller, _ in traceback.walk_stack(frame):
                with contextlib.suppress(RuntimeError):  # it runs
                    caller.clear()
        error = error.__cause__ or error.__context__
    # An error that was caught is perhaps part of a cycle.
    gc.collect()


def init_epoch_iterator(
    original: Original,
    self: Any,
    distribute_strategy: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Replace `TFEpochIterator.__init__`: give each worker its part of one order.

    Keras shuffles arrays with an unseeded operation, in another order on each worker.
    """
    # The first one in `fit`: it makes those of its evaluations outside of `evaluate`.
    if not current.evaluating and not (current.fitting and current.iterator):
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
    _distribute(self, hooks, generator)
    if hooks.elastic is not None:
        _count_uses(self, hooks, given)


def _distribute(self: Any, hooks: KerasHooks, generator: GeneratorFacts | None) -> None:
    """Give an epoch iterator its distributed data."""
    dynamic = hooks.dynamic if current.data_pending else None
    current.data_pending = False
    data = hooks.data if dynamic is None else dynamic.data
    made, length = _divided(self.data_adapter, hooks, data, generator)
    self._distributed_dataset = made
    if length != self.data_adapter.num_batches:
        # The largest number of any worker, because Keras's loop counts batches.
        self.data_adapter = _WithLength(self.data_adapter, length)
        self._num_batches = length
    if dynamic is not None:
        _claim_batches(self)
    elif draws_order(self) and hooks.data.shards and hooks.elastic is None:
        _begin_epochs_once(self)


def _divided(
    adapter: Any,
    hooks: KerasHooks,
    data: DataDivision,
    generator: GeneratorFacts | None,
) -> tuple[Any, int | None]:
    """Return a strategy's iterable over the data of an adapter, and its length."""
    source: Any = generator
    if hooks.data.shards and isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        arrays = data.distribute_arrays(ArrayData(adapter))
        return arrays, arrays.length
    if isinstance(adapter, py_dataset_adapter.PyDatasetAdapter):
        source = ItemData(adapter)
        items = data.distribute_items(source) if hooks.data.shards else None
        if items is not None:
            adapter.enqueuer = None  # it would read all items
            return items, items.length
        if hooks.data.shards:
            agree_on_order(adapter, hooks)
    return data.distribute_dataset(
        adapter.get_tf_dataset(), adapter.num_batches, source
    )


def _begin_epochs_once(self: Any) -> None:
    """Spare the iterator that Keras makes at the end of each epoch.

    It is for `steps_per_epoch`: otherwise the next epoch drops it and makes another.
    """
    if self.steps_per_epoch is not None:
        return
    adapter, data = self.data_adapter, self._distributed_dataset

    def enumerate_batches() -> Any:
        adapter.on_epoch_begin()
        batches, steps = iter(data), self.steps_per_execution
        for step in range(0, self._num_batches, steps):
            yield step, step + steps - 1, batches
        data.next_pass()  # the one that Keras would have begun
        adapter.on_epoch_end()

    self._enumerate_iterator = enumerate_batches


def _count_uses(self: Any, hooks: KerasHooks, given: Any) -> None:
    """Count the uses of the data that an epoch iterator was given."""
    use = uses_of(hooks).of(given)
    if use is None:
        return
    adapter = adapter_of(self)
    if isinstance(adapter, py_dataset_adapter.PyDatasetAdapter):
        use.count_epochs(adapter)
    if isinstance(self._distributed_dataset, CountedData):
        self._distributed_dataset.use = use


def first_item(iterator: Any) -> Any:
    """Return a batch of the PyDataset that Keras prefetches for an iterator, or None.

    Keras reads a batch before it trains, and abandons that iterator. The items that
    were prefetched for it would be the first of the epoch, and as many would be missing
    at the epoch's end.
    """
    adapter = adapter_of(iterator)
    if getattr(adapter, "enqueuer", None) is None:
        return None
    return adapter._standardize_batch(adapter.py_dataset[0])


def iterator_of_fit() -> Any:
    """Return the epoch iterator of the present `fit`, or None."""
    return None if current.iterator is None else current.iterator()


def batch_size_of_fit() -> int | None:
    """Return the rows of a batch of `fit`, at its beginning; None if not known.

    The last one of an epoch may have fewer.
    """
    iterator = iterator_of_fit()
    if iterator is None:
        return None
    adapter = adapter_of(iterator)
    if isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        return int(adapter._batch_size)
    if isinstance(adapter, py_dataset_adapter.PyDatasetAdapter):
        items = adapter.py_dataset
        if isinstance(items, ItemsInOrder):
            items = items.dataset  # the first of a shuffled order may be the short one
        first = tree.flatten(adapter._standardize_batch(items[0]))
        return int(first[0].shape[0]) if first else None
    return _tf.static_batch_size(adapter.get_tf_dataset())


def batches_of_fit() -> int | None:
    """Return the batches of an epoch of `fit`, at its start; None: not known."""
    iterator = iterator_of_fit()
    count = None if iterator is None else iterator.num_batches
    return None if count is None else int(count)


def draws_order(iterator: Any) -> bool:
    """Return whether the seed of an order was drawn for an epoch iterator's arrays."""
    adapter = adapter_of(iterator)
    return isinstance(adapter, array_data_adapter.ArrayDataAdapter)


def fits_arrays() -> bool:
    """Return whether `fit` was given arrays, and neither a dataset nor items."""
    iterator = iterator_of_fit()
    return iterator is not None and draws_order(iterator)


def _claim_batches(self: Any) -> None:
    """Let an epoch iterator yield the batches that this worker claims.

    Its step numbers are those of the batches in the whole epoch.
    """
    adapter, dynamic = self.data_adapter, self._distributed_dataset

    def enumerate_batches() -> Any:
        adapter.on_epoch_begin()
        batches = dynamic.begin_epoch(self.steps_per_epoch)
        if current.readers is not None:
            current.readers.add(dynamic)
        while batches.ready():
            first = batches.number
            yield first, first + self.steps_per_execution - 1, batches
        adapter.on_epoch_end()

    self._enumerate_iterator = enumerate_batches


class _WithLength:
    """A data adapter with another number of batches."""

    def __init__(self, adapter: Any, num_batches: int | None) -> None:
        self.adapter = adapter
        self.num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)


def adapter_of(iterator: Any) -> Any:
    """Return the adapter that Keras made for an epoch iterator."""
    adapter = iterator.data_adapter
    return adapter.adapter if isinstance(adapter, _WithLength) else adapter
