"""A `PyDataset` that was given to `fit`, and what reads its items ahead."""

from __future__ import annotations

import contextlib
import inspect
import queue
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.trainers.data_adapters import py_dataset_adapter

from kerasdist._keras.context import current, setting
from kerasdist.transport.deadline import Deadline

__all__ = [
    "ItemData",
    "ItemReader",
    "close_at_end",
    "closing_readers",
]

# What `OrderedEnqueuer.start` is given: from 3.16 on the epoch, which it shuffles by.
# The items that are read here have their order already.
_EPOCH = (0,) * (
    len(inspect.signature(py_dataset_adapter.OrderedEnqueuer.start).parameters) - 1
)
# Without threads or processes of its own a dataset is read a little ahead.
_AHEAD = 2
# How often a thread that shall end is looked after, in seconds.
_POLL = 0.02
# How long it may take to end; after that it is left to itself (it is a daemon).
_CLOSE_SECONDS = 10.0


class ItemData:
    """A PyDataset that was given to `fit`, `evaluate` or `predict`.

    Attributes:
        shuffle: Whether its items are to be shuffled.
        varies: Whether it may change between epochs: it has an `on_epoch_begin` or
            `on_epoch_end` of its own.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self.shuffle = bool(adapter.shuffle)
        kind = type(adapter.py_dataset)
        self.varies = any(
            getattr(kind, name) is not getattr(py_dataset_adapter.PyDataset, name)
            for name in ("on_epoch_begin", "on_epoch_end")
        )

    @property
    def dataset(self) -> Any:
        """The PyDataset."""
        return self._adapter.py_dataset

    @property
    def length(self) -> int | None:
        """Number of items; None if there's no end of them. It may change."""
        length = self._adapter.num_batches
        return None if length is None else int(length)

    def read(self, index: int) -> Any:
        """Read an item here and now; a nest of arrays, see `ItemReader.read`."""
        return self._arrays(self._adapter.py_dataset[index])

    def reader(self, first: int, step: int, order: Sequence[int] | None) -> ItemReader:
        """Begin to read every `step`-th item from `first` on.

        Args:
            first: Number of the first item, counted in the order.
            step: How many to go on each time.
            order: Indices of all items in the order of the epoch; None: as they are.
        """
        return ItemReader(self, _Part(self._adapter.py_dataset, first, step, order))

    def _arrays(self, item: Any) -> Any:
        return tree.map_structure(_array, self._adapter._standardize_batch(item))


class ItemReader:
    """Reads a part of a PyDataset ahead, by the threads or processes it asks for.

    A context manager would have to span steps of Keras's loop: whoever has it calls
    `close`, and `closing_readers` does at the end of `fit` and the like.
    """

    def __init__(self, data: ItemData, part: _Part) -> None:
        self._data = data
        workers, processes = part.workers, part.use_multiprocessing
        parallel = workers > 1 or (workers > 0 and processes)
        self._enqueuer = py_dataset_adapter.OrderedEnqueuer(
            part,
            workers=max(1, workers),
            use_multiprocessing=parallel and processes,
            max_queue_size=part.max_queue_size if parallel else _AHEAD,
        )
        self._enqueuer.start(*_EPOCH)
        self._items = self._enqueuer.get()
        close_at_end(self)

    def read(self) -> tuple[int, Any]:
        """Return the next item's index and the item, with class weights applied.

        The item is a nest of numpy arrays and None; anything that isn't an array in
        it (ragged, sparse) stays as it is.

        Raises:
            Exception: What the dataset's `__getitem__` raised.
        """
        index, item = next(self._items)
        return index, self._data._arrays(item)

    def close(self) -> None:
        """End the reading thread. Items that are being read are left to themselves."""
        enqueuer = self._enqueuer
        with enqueuer.start_stop_lock:
            enqueuer.running = False
            thread, enqueuer.run_thread = enqueuer.run_thread, None
        deadline = Deadline(_CLOSE_SECONDS)
        while thread is not None and thread.is_alive() and not deadline.expired:
            with contextlib.suppress(queue.Empty):
                # The thread may wait for room in the queue.
                enqueuer.future_queue.get(timeout=_POLL)
        py_dataset_adapter._SHARED_SEQUENCES.pop(enqueuer.uid, None)
        close_at_end(self, keep=False)


class _Part(py_dataset_adapter.PyDataset):
    """Some of a PyDataset's items, each with its index."""

    def __init__(
        self, dataset: Any, first: int, step: int, order: Sequence[int] | None
    ) -> None:
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._first, self._step, self._order = first, step, order
        length = dataset.num_batches
        self._length = None if length is None else len(range(first, length, step))

    @property
    def num_batches(self) -> int | None:
        return self._length

    def __getitem__(self, number: int) -> tuple[int, Any]:
        index = self._first + number * self._step
        if self._order is not None:
            index = int(self._order[index])
        return index, self._dataset[index]


def close_at_end(reader: Any, *, keep: bool = True) -> None:
    """Close what reads ahead when `fit` or the like ends; no longer if not `keep`."""
    if current.readers is None:
        return
    if keep:
        current.readers.add(reader)
    else:
        current.readers.discard(reader)


@contextlib.contextmanager
def closing_readers() -> Iterator[None]:
    """Close what reads ahead at the end of `fit`, `evaluate` or `predict`.

    An `evaluate` inside `fit` leaves it to `fit`: its dataset may be gone on with.
    """
    if current.readers is not None:
        yield
        return
    readers: set[Any] = set()
    with setting(readers=readers):
        try:
            yield
        finally:
            for reader in list(readers):
                reader.close()


def _array(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    return np.asarray(leaf)
