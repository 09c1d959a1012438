"""PyDatasets: each worker reads its share of the items, and rows are exchanged.

An item of a PyDataset is a global batch, and only its author knows how to read a part
of one. So the workers divide whole items among them, and then send each other the rows
that each trains on. With 3 workers, items in the order of the epoch:

    1. group     0 1 2 | 3 4 5 | 6        as many items as there are workers
    2. read      rank r reads item r of each group, ahead, in the background
    3. exchange  every rank gets the group's items, and keeps its replicas' rows
    4. steps     one for each item of the group, in their order

So the global batches are those of one process, and each item is read once per epoch
over all workers. The exchange runs between two steps, on the thread that runs
Keras's loop, where all workers' collectives are in one order.

No worker reads all items, so the check that all workers' datasets are the same is a
sample: all read item 0 and compare it when a dataset is given, and again before each
epoch if the dataset changes between epochs. Arrays that differ from one reading to the
next on the same worker (random augmentation) aren't compared. If the datasets differ
the chief may read all items: see `strategies.data.chief_data`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from kerasdist._keras.data.pydataset import ItemData
from kerasdist._keras.protocols import StepTimer
from kerasdist.collectives import Communicator, gather_json
from kerasdist.strategies.data.batch_split import order_of_items
from kerasdist.strategies.data.chief_data import (
    ChiefFeed,
    ExchangedBatches,
    own_rows_of,
)
from kerasdist.strategies.data.choice import REMEDIES, DataChoice
from kerasdist.strategies.data.comparison import (
    Content,
    batch_of,
    digest_of,
    origin_of,
)
from kerasdist.strategies.data.encoding import (
    chiefs_facts,
    encode,
    pack,
    unpack,
)
from kerasdist.strategies.reduce.workers import Workers


class ItemForm:
    """The common form of all items, which is that of item 0.

    Args:
        item: A nest of arrays and None.

    Attributes:
        text: The form as text; equal for equal forms, in every process.
        exchangeable: Whether such items can be sent: all leaves are arrays of
            numbers with at least one dimension, and there is one.
        example: The nest, with zeros in its arrays, which take no memory.
        rows: Number of rows of the item.
    """

    def __init__(self, item: Any) -> None:
        self.text = str(tf.nest.map_structure(_kind, item))
        arrays = _arrays(item)
        self.exchangeable = bool(arrays) and all(map(_is_exchangeable, arrays))
        if self.exchangeable:
            self.example = tf.nest.map_structure(_zeros, item)
            self.rows = len(arrays[0])

    def pack(self, index: int, item: Any) -> npt.NDArray[Any]:
        """Encode an item and its index as bytes.

        Raises:
            ValueError: The item has another form. Dtypes may differ: arrays are
                converted, as TensorFlow converts a generator's values.
        """
        other = ItemForm(item)
        if not other.exchangeable or _dimensions(item) != _dimensions(self.example):
            raise ValueError(
                "All items of a PyDataset must have the same structure and numbers of "
                f"dimensions. Received: item {index} with {other.text}; item 0 has "
                f"{self.text}."
            )
        alike = zip(tf.nest.flatten(item), tf.nest.flatten(self.example), strict=True)
        leaves = [
            leaf if leaf is None else np.asarray(leaf, like.dtype.name)
            for leaf, like in alike
        ]
        return pack({"index": index}, list(map(encode, leaves)))


def _arrays(item: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(item) if leaf is not None]


def _dimensions(item: Any) -> list[int | None]:
    return [leaf if leaf is None else leaf.ndim for leaf in tf.nest.flatten(item)]


def _checksums(item: Any) -> list[str]:
    """Return one number for each array, from its shape and contents."""
    return [digest_of([encode(array)]) for array in _arrays(item)]


def _zeros(leaf: Any) -> Any:
    if leaf is None:
        return None
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _kind(leaf: Any) -> str | None:
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype.name}[{leaf.ndim}]"
    return None if leaf is None else type(leaf).__name__


def _is_exchangeable(leaf: Any) -> bool:
    if not isinstance(leaf, np.ndarray) or leaf.ndim == 0:
        return False
    try:
        dtype = tf.as_dtype(leaf.dtype)
    except TypeError:
        return False
    return bool(
        dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex
    )


class DifferentItems(ValueError):
    """The workers' PyDatasets differ. All workers raise it."""


def compare_items(communicator: Communicator, data: ItemData) -> ItemForm | None:
    """Compare the workers' PyDatasets.

    Args:
        communicator: The communicator of all workers, which call this together.
        data: This worker's PyDataset.

    Returns:
        The form of all items; None, on all workers, if there are no items or they can't
        be exchanged (ragged or sparse tensors, strings).

    Raises:
        DifferentItems: They differ. All workers raise it.
    """
    facts: dict[str, Any] = {"length": data.length, "shuffle": data.shuffle}
    form, checksums = None, None
    if facts["length"] != 0:
        item = data.read(0)
        form = ItemForm(item)
        facts |= {"item": form.text, "exchangeable": form.exchangeable}
        checksums = _checksums(item) if form.exchangeable else None
    every = gather_json(communicator, [facts, checksums])
    ranks = communicator.ranks
    for rank, (other, _) in zip(ranks, every, strict=True):
        if other != every[0][0]:
            raise DifferentItems(
                "All workers must be given the same PyDataset: its items are "
                "global batches, of which each worker reads its share. Received: "
                f"rank {ranks[0]}: {_text(every[0][0])}; rank {rank}: {_text(other)}. "
                f"{REMEDIES}"
            )
    if form is None or checksums is None:
        return None
    if any(theirs != every[0][1] for _, theirs in every):
        _read_again(communicator, data, form, [theirs for _, theirs in every])
    return form


def _read_again(
    communicator: Communicator,
    data: ItemData,
    form: ItemForm,
    checksums: list[list[str]],
) -> None:
    """Check whether item 0, which differs between workers, varies on one, too.

    Raises:
        DifferentItems: It doesn't: the workers hold different datasets.
    """
    mine = checksums[communicator.rank]
    item = data.read(0)
    alike = ItemForm(item).text == form.text
    now = _checksums(item) if alike else [""] * len(mine)
    flags = np.array([a == b for a, b in zip(now, mine, strict=True)])
    steady = communicator.all_reduce([flags], "min")[0]
    ranks = communicator.ranks
    others = [
        rank
        for rank, theirs in zip(ranks, checksums, strict=True)
        if any(
            s and a != b for s, a, b in zip(steady, theirs, checksums[0], strict=True)
        )
    ]
    if others:
        raise DifferentItems(
            "The workers' PyDatasets hold different items: each is a global batch, "
            "the same on all workers, of which each worker reads its share. "
            f"Received: item 0 of ranks {others} differs from rank {ranks[0]}'s. "
            f"{REMEDIES}"
        )


def _text(facts: dict[str, Any]) -> str:
    return ", ".join(
        f"{name}={facts[name]!r}"
        for name in ("length", "shuffle", "item")
        if name in facts
    )


@dataclass(eq=False, repr=False)
class SharedItems:
    """The iterable for Keras in place of a PyDataset; each iteration is an epoch.

    Args:
        workers: The connected workers.
        timer: Measures steps, and the time of waiting.
        choice: Decides whose data are used if they differ.
        data: This worker's PyDataset.
        draw_seed: Returns a seed that all workers agree on.

    Attributes:
        seed: The seed of the orders of epochs; common to all workers.
        form: The items' form.
        length: Number of items, None if it is infinite.
        feed: The feed of the chief's items; None while all workers have the same.
    """

    workers: Workers
    timer: StepTimer
    choice: DataChoice
    data: ItemData
    draw_seed: Callable[[], int]
    seed: int = 0
    form: Any = None
    length: int | None = None
    feed: ChiefFeed | None = None
    _epoch: int = 0

    def __iter__(self) -> SharedItemsIterator:
        return SharedItemsIterator(self)

    @property
    def rows(self) -> int:
        """The number of rows of an item."""
        return int(self.form.rows)

    def begin_epoch(self) -> Any:
        """Return the order of the next epoch, or None for ascending indices.

        Items are the chief's from the first epoch on in which the workers' differ.
        """
        self._epoch += 1
        if self.data.varies and self.feed is None:
            found = self.verify_or_adopt()
            if isinstance(found, ChiefFeed):
                self.feed = found
        return order_of_items(self.length, self.data.shuffle, self.seed, self._epoch)

    def verify_or_adopt(self) -> SharedItems | ChiefFeed | None:
        """Compare the workers' datasets.

        Returns:
            This iterable; the feed of the chief's items, if the workers' differ; or
            None if they don't, and can't be exchanged.

        Raises:
            ValueError: They differ, and the chief's can't be used; on all workers.
        """
        if self.choice.mode == "chief":
            return self._chiefs(None)
        form, different = None, None
        try:
            form = compare_items(self.workers.communicator, self.data)
        except DifferentItems as error:
            different = error
        if form is None:
            return self._chiefs(different)
        self.form, self.length = form, self.data.length
        return self

    def _chiefs(self, different: ValueError | None) -> ChiefFeed | None:
        """Return the feed of the chief's items; None if all workers have the same.

        Args:
            different: The error that describes how the workers' datasets differ, if
                that's known.

        Raises:
            ValueError: They differ, and the chief's can't be used; on all workers.
        """
        data, choice = self.data, self.choice
        item = data.read(0) if data.length != 0 else None
        content = Content([] if item is None else [batch_of(item)])

        why = choice.of_chief(
            self.workers.communicator,
            "PyDatasets",
            content,
            length=data.length,
            settings=f"shuffle={data.shuffle}",
            origin=lambda: origin_of(data.dataset),
            different=different or "The workers' PyDatasets hold different items",
        )
        if not why:
            if different is not None:
                raise choice.explain(different)
            return None
        seeded, epochs = self.draw_seed(), itertools.count(1)

        def read_all() -> Iterator[Any]:
            """Read all items, in the order of the next epoch."""
            length = data.length
            reader = data.reader(
                0, 1, order_of_items(length, data.shuffle, seeded, next(epochs))
            )
            try:
                for _ in itertools.count() if length is None else range(length):
                    yield reader.read()[1]
            finally:
                reader.close()

        feed = ChiefFeed(self.workers, self.timer, read_all, item, item)
        known = chiefs_facts(self.workers.communicator, {"length": data.length})
        feed.length, feed.rows = known["length"], content.rows
        choice.tell("PyDatasets", why, content.leaves)
        return feed


class SharedItemsIterator(ExchangedBatches):
    """The iterator of one epoch."""

    def __init__(self, items: SharedItems) -> None:
        super().__init__(items.workers, items.timer)
        self.example = items.form.example
        self._items = items

    def _read(self) -> Iterator[list[Any]]:
        # An epoch begins when its first batch is needed: Keras makes more iterators
        # than it uses.
        items = self._items
        communicator = items.workers.communicator
        rank, size = communicator.rank, communicator.size
        order = items.begin_epoch()
        if items.feed is not None:
            # Batches are requested as they're needed.
            for batch in items.feed:
                yield [batch]
            return
        length, form = items.length, items.form
        reader = items.data.reader(rank, size, order)
        try:
            for start in itertools.count(0, size):
                count = size if length is None else min(size, length - start)
                if count <= 0:
                    return
                begin = time.time()
                packed = np.zeros(0, np.uint8)
                if rank < count:
                    packed = form.pack(*reader.read())
                if length is not None and start + size >= length:
                    reader.close()
                every = self._exchange(packed, begin)
                yield [
                    self._own_part(every[other], start + other, order)
                    for other in range(count)
                ]
        finally:
            reader.close()

    def _own_part(self, packed: Any, number: int, order: Any) -> Any:
        """Return this worker's part of an item: per replica, if it has several."""
        facts, leaves = unpack(packed)
        index = facts["index"]
        expected = number if order is None else int(order[number])
        if index != expected:
            raise RuntimeError(
                "A worker has read another item than that of the epoch's order. "
                f"Received: item {index}; expected item {expected}. Please report it."
            )
        return own_rows_of(self._workers, self._items.form.example, leaves)
