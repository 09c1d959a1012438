"""A `PyDataset` that was given to `fit`, the reader and the order of its items."""

from __future__ import annotations

import contextlib
import inspect
import queue
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.trainers.data_adapters import py_dataset_adapter

from kerasdist._keras.context import current, setting
from kerasdist._keras.protocols import KerasHooks
from kerasdist.transport.deadline import Deadline

# The variables that a generator's code can access: the origin of its batches.


class GeneratorFacts:
    """The variables and names that a function, or a running generator, can access.

    A generator that has ended exposes nothing: inspect it before it is read.

    Args:
        function: A function, a method, or a generator.

    Attributes:
        variables: The arguments (for a function the default values), free variables and
            globals that its code names, each with its name.
        names: All names in its code, including attributes.
    """

    def __init__(self, function: Any) -> None:
        self.variables: list[tuple[str, Any]] = list(_variables(function))
        code = _code_of(function)
        self.names: frozenset[str] = frozenset(() if code is None else code.co_names)


def _code_of(function: Any) -> types.CodeType | None:
    if isinstance(function, types.GeneratorType):
        return function.gi_code
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    code = _code_of(function)
    if code is None:
        return
    if isinstance(function, types.GeneratorType):
        frame = function.gi_frame
        if frame is None:
            return
        known: Mapping[str, Any] = frame.f_locals
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name in (*given, *code.co_freevars):
            # The argument of a generator expression is its iterator.
            if name in known and name != ".0":
                yield name, known[name]
        everywhere = frame.f_globals
    else:
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            yield "self", owner
        function = getattr(function, "__func__", function)
        cells = function.__closure__ or ()
        for name, cell in zip(code.co_freevars, cells, strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:
                continue  # it is empty
        defaults = function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount]
        yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
        everywhere = function.__globals__
    for name in code.co_names:
        if name in everywhere:
            yield name, everywhere[name]


# Arguments of `OrderedEnqueuer.start`: from 3.16 on the epoch, with which it shuffles.
# The items that are read here are in their order already.
_EPOCH = (0,) * (
    len(inspect.signature(py_dataset_adapter.OrderedEnqueuer.start).parameters) - 1
)
# How many items a dataset without threads or processes of its own is read ahead.
_AHEAD = 2
# Polling interval, in seconds, while waiting for the reader thread to exit.
_POLL = 0.02
# How long it may take to exit; after that it is abandoned (it is a daemon).
CLOSE_SECONDS = 10.0


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
        """The number of items; None if it is infinite. It may change."""
        length = self._adapter.num_batches
        return None if length is None else int(length)

    def read(self, index: int) -> Any:
        """Read an item at once; return a nest of arrays, see `ItemReader.read`."""
        return self._arrays(self._adapter.py_dataset[index])

    def reader(self, first: int, step: int, order: Sequence[int] | None) -> ItemReader:
        """Start reading every `step`-th item from `first` on.

        Args:
            first: Position of the first item in the order.
            step: Distance from one item to the next.
            order: Indices of all items in the order of the epoch; None: ascending.
        """
        return ItemReader(self, _Part(self._adapter.py_dataset, first, step, order))

    def _arrays(self, item: Any) -> Any:
        return tree.map_structure(_array, self._adapter._standardize_batch(item))


class ItemReader:
    """A reader of a part of a PyDataset, which uses the dataset's threads or processes.

    It isn't a context manager, which would have to span steps of Keras's loop. Its
    owner calls `close`, and `closing_readers` does so at the end of `fit` and the like.
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

        The item is a nest of numpy arrays and None; leaves that aren't arrays (ragged,
        sparse) stay unchanged.

        Raises:
            Exception: The error of the dataset's `__getitem__`.
        """
        index, item = next(self._items)
        return index, self._data._arrays(item)

    def close(self) -> None:
        """End the reading thread. Items that are being read are abandoned."""
        enqueuer = self._enqueuer
        with enqueuer.start_stop_lock:
            enqueuer.running = False
            thread, enqueuer.run_thread = enqueuer.run_thread, None
        deadline = Deadline(CLOSE_SECONDS)
        while thread is not None and thread.is_alive() and not deadline.expired:
            with contextlib.suppress(queue.Empty):
                # The thread may be waiting for room in the queue.
                enqueuer.future_queue.get(timeout=_POLL)
        py_dataset_adapter._SHARED_SEQUENCES.pop(enqueuer.uid, None)
        close_at_end(self, keep=False)


class _Chosen(py_dataset_adapter.PyDataset):
    """Items of a PyDataset, which are read in its threads or processes.

    Attributes:
        dataset: The PyDataset.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self.dataset = dataset


class _Part(_Chosen):
    """Some of a PyDataset's items, each with its index."""

    def __init__(
        self, dataset: Any, first: int, step: int, order: Sequence[int] | None
    ) -> None:
        super().__init__(dataset)
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
        return index, self.dataset[index]


def close_at_end(reader: Any, *, keep: bool = True) -> None:
    """Close a reader when `fit` or the like ends; with `keep=False` no longer."""
    if current.readers is None:
        return
    if keep:
        current.readers.add(reader)
    else:
        current.readers.discard(reader)


@contextlib.contextmanager
def closing_readers() -> Iterator[None]:
    """Close readers at the end of `fit`, `evaluate` or `predict`.

    An `evaluate` inside `fit` leaves that to `fit`, which may go on with its dataset.
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


class ItemsInOrder(_Chosen):
    """A PyDataset whose items are in an order that all workers agree on.

    The order changes only at the end of an epoch, when nothing fetches items.
    """

    def __init__(self, dataset: Any, draw: Callable[[int, int], Any]) -> None:
        super().__init__(dataset)
        self._draw = draw
        self._epoch = 0
        self.order = self._next_order()

    def _next_order(self) -> Any:
        self._epoch += 1
        return self._draw(self.dataset.num_batches, self._epoch)

    @property
    def number(self) -> int:
        """The number of the present order, from 1."""
        return self._epoch

    def turn_to(self, number: int) -> None:
        """Take the order of this number."""
        self._epoch = number - 1
        self.order = self._next_order()

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


def discard_read(adapter: Any) -> None:
    """Discard what was read for an epoch that has ended early.

    Keras would yield it first in the next epoch.
    """
    enqueuer = getattr(adapter, "enqueuer", None)
    if enqueuer is not None:
        enqueuer.ready_queue = queue.Queue()


def agree_on_order(adapter: Any, hooks: KerasHooks) -> None:
    """Shuffle items alike on all workers; Keras's order differs between workers.

    In an elastic job also if there is one, which others may join.
    """
    if (
        (hooks.workers.replicas == 1 and hooks.elastic is None)
        or not adapter.shuffle
        or adapter.num_batches is None
    ):
        return
    items = ItemsInOrder(adapter.py_dataset, hooks.data.order_of_epochs())
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
