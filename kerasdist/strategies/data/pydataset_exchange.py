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
the chief may read all items: see `strategies.chief_data.items`.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras import BatchIterator, ItemData, StepTimer
from kerasdist.collectives.row_exchange import equal_part
from kerasdist.strategies.data.batch_split import epoch_order, with_facts
from kerasdist.strategies.data.item_codec import REMEDIES, ItemCodec
from kerasdist.strategies.reduce.workers import Workers


class DifferentItems(ValueError):
    """The workers' PyDatasets differ. All workers raise it."""


def share_items(
    workers: Workers,
    timer: StepTimer,
    data: ItemData,
    seed: Any,
    feed_if_different: Callable[[ValueError | None], Any],
) -> Any | None:
    """Return the iterable over this worker's parts of all items.

    Args:
        workers: The connected workers.
        timer: Measures steps, and the time of waiting.
        data: The PyDataset.
        seed: A function that returns a seed that all workers agree on.
        feed_if_different: Returns the feed of the chief's items, or None, given the
            error that describes how the workers' items differ, if that's known.

    Returns:
        None, on all workers, if there are no items or they can't be exchanged (ragged
        or sparse tensors, strings).

    Raises:
        ValueError: The workers were given different data. All workers raise it.
    """
    items = SharedItems(workers, timer, data, feed_if_different)
    try:
        exchangeable = items.agree()
    except DifferentItems as error:
        return feed_if_different(error)
    if not exchangeable:
        return feed_if_different(None)
    if data.shuffle:
        items.seed = seed()
    return items


class SharedItems:
    """The iterable for Keras in place of a PyDataset; each iteration is an epoch.

    Attributes:
        seed: The seed of the orders of epochs; common to all workers.
        form: The items' form.
        length: Number of items, None if it is infinite.
        example: Zeros in the shapes of item 0.
        rows: Number of rows of item 0.
        feed: The feed of the chief's items; None while all workers have the same.
    """

    def __init__(
        self,
        workers: Workers,
        timer: StepTimer,
        data: ItemData,
        feed_if_different: Callable[[ValueError | None], Any] | None = None,
    ) -> None:
        self.workers, self.timer = workers, timer
        self.data = data
        self.feed: Any = None
        self._feed_if_different = feed_if_different
        self.seed = 0
        self.length: int | None = None
        self.form: ItemCodec | None = None
        self.example: Any = None
        self.rows = 0
        self._epoch = 0

    def __iter__(self) -> SharedItemsIterator:
        return SharedItemsIterator(self)

    def begin_epoch(self) -> Any:
        """Return the order of the next epoch, or None for ascending indices.

        Items are the chief's from the first epoch on in which the workers' differ.
        """
        self._epoch += 1
        if self.data.varies and self.feed is None:
            try:
                self.agree()
            except DifferentItems as error:
                if self._feed_if_different is None:
                    raise
                self.feed = self._feed_if_different(error)
        if not self.data.shuffle or self.length is None:
            return None
        return epoch_order(self.length, 1, True, self.seed, self._epoch)

    def agree(self) -> bool:
        """Compare the workers' datasets; return whether items can be exchanged.

        Raises:
            ValueError: They differ. All workers raise it.
        """
        self.length = self.data.length
        facts: dict[str, Any] = {"length": self.length, "shuffle": self.data.shuffle}
        item = form = None
        if self.length != 0:
            item = self.data.read(0)
            form = ItemCodec(item)
            facts["item"] = form.text
            facts["exchangeable"] = form.exchangeable
            if form.exchangeable:
                facts["checksums"] = form.checksums(item)
        every = self._all_facts(facts)
        if form is None or not form.exchangeable:
            return False
        self.form, self.example, self.rows = form, form.example(item), form.rows(item)
        if any(other != every[0] for other in every):
            self._read_again(form, every)
        return True

    def _all_facts(self, facts: dict[str, Any]) -> list[Any]:
        """Exchange facts; return all workers' checksums."""
        communicator = self.workers.communicator
        text = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        every = [json.loads(other.tobytes()) for other in communicator.all_gather(text)]
        checksums = [other.pop("checksums", None) for other in every]
        ranks = communicator.ranks
        for rank, other in zip(ranks, every, strict=True):
            if other != every[0]:
                raise DifferentItems(
                    "All workers must be given the same PyDataset: its items are "
                    "global batches, of which each worker reads its share. Received: "
                    f"rank {ranks[0]}: {_text(every[0])}; rank {rank}: {_text(other)}. "
                    f"{REMEDIES}"
                )
        return checksums

    def _read_again(self, form: ItemCodec, checksums: list[list[int]]) -> None:
        """Check whether item 0, which differs between workers, varies on one, too.

        Raises:
            ValueError: It doesn't: the workers hold different datasets.
        """
        communicator = self.workers.communicator
        mine = checksums[communicator.rank]
        item = self.data.read(0)
        if ItemCodec(item).text == form.text:
            now = form.checksums(item)
        else:
            now = [-1] * len(mine)
        flags = np.array([a == b for a, b in zip(now, mine, strict=True)])
        steady = communicator.all_reduce([flags], "min")[0]
        ranks = communicator.ranks
        others = [
            rank
            for rank, theirs in zip(ranks, checksums, strict=True)
            if any(
                s and a != b
                for s, a, b in zip(steady, theirs, checksums[0], strict=True)
            )
        ]
        if others:
            raise DifferentItems(
                "The workers' PyDatasets hold different items: each is a global batch, "
                "the same on all workers, of which each worker reads its share. "
                f"Received: item 0 of ranks {others} differs from rank {ranks[0]}'s. "
                f"{REMEDIES}"
            )


class SharedItemsIterator(BatchIterator):
    """The iterator of one epoch."""

    def __init__(self, items: SharedItems) -> None:
        self.example = items.example
        self._items = items
        self._groups: Iterator[list[Any]] | None = None
        self._waiting: deque[Any] = deque()
        self._met = 0.0  # seconds of the last exchange

    def at_least_one(self) -> SharedItemsIterator:
        """See `BatchIterator.at_least_one`."""
        if not self._waiting:
            # An epoch begins when its first batch is needed: Keras makes more iterators
            # than it uses.
            if self._groups is None:
                self._groups = self._read()
            timer = self._items.timer
            begin, self._met = time.time(), 0.0
            self._waiting.extend(next(self._groups))
            timer.waited(time.time() - begin - self._met)
            timer.waited(self._met, others=True)
        return self

    def __next__(self) -> Any:
        self.at_least_one()
        return self._waiting.popleft()

    def _read(self) -> Iterator[list[Any]]:
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
        if form is None:
            return
        reader = items.data.reader(rank, size, order)
        try:
            for start in itertools.count(0, size):
                count = size if length is None else min(size, length - start)
                if count <= 0:
                    return
                packed = np.zeros(0, np.uint8)
                if rank < count:
                    packed = form.pack(*reader.read())
                if length is not None and start + size >= length:
                    reader.close()
                begin = time.time()
                every = communicator.all_gather(packed)
                self._met = time.time() - begin
                yield [
                    self._own_rows(form, every[other], start + other, order)
                    for other in range(count)
                ]
        finally:
            reader.close()

    def _own_rows(self, form: ItemCodec, packed: Any, number: int, order: Any) -> Any:
        """Return this worker's part of an item: per replica, if it has several."""
        workers = self._items.workers
        index, arrays = form.unpack(packed)
        expected = number if order is None else int(order[number])
        if index != expected:
            raise RuntimeError(
                "A worker has read another item than that of the epoch's order. "
                f"Received: item {index}; expected item {expected}. Please report it."
            )
        first, local, replicas = workers.layout
        total = arrays[0].shape[0]
        parts = []
        for i, device in enumerate(workers.devices[:local]):
            rows = equal_part(total, replicas, first + i)
            with tf.device(device):
                leaves = [
                    tf.convert_to_tensor(_own_part(array, first + i, replicas))
                    for array in arrays
                ]
                facts = [tf.constant(total, tf.int64), None]
                if total < replicas:
                    facts[1] = tf.constant(rows.stop - rows.start, tf.int64)
            parts.append(with_facts(form.item(leaves), *facts))
        return parts[0] if local == 1 else _tf.regroup(parts)


def _own_part(array: Any, replica: int, replicas: int) -> Any:
    """Return a copy of a replica's rows, so that the rest of the item can be freed."""
    rows = equal_part(array.shape[0], replicas, replica)
    if rows.start == rows.stop:  # see `strategies.data.batch_split`
        rows = slice(array.shape[0] - 1, array.shape[0])
    return array[rows].copy()


def _text(facts: dict[str, Any]) -> str:
    return ", ".join(
        f"{name}={facts[name]!r}"
        for name in ("length", "shuffle", "item")
        if name in facts
    )
