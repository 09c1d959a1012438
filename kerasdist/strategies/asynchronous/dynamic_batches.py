"""Dynamic batches: each batch of an epoch goes to the first worker that is free.

    w: a worker, its reading thread     s: server 0 (parameter_server/server/handler.py)

    1. w -> s   a claim: dataset, epoch
    2. s -> w   the number of a batch that no other worker gets; or none, at the end
    3. w        reads that batch, while the step on the previous one runs
    4. w        trains on it, and claims the next one

So an epoch has the batches of one process, each trained on by one worker: a slow worker
takes fewer. Each worker has claimed one batch ahead; those of a lost worker are missing
from that epoch.
"""

from __future__ import annotations

import abc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.data.arrays import ArrayData, BatchIterable
from kerasdist._keras.data.pydataset import ItemData
from kerasdist.parameter_server import END
from kerasdist.strategies.data.batch_split import (
    FetchedBatches,
    count_rows,
    for_replicas,
    order_of_arrays,
    order_of_items,
    part_of_batch,
    split_part,
)
from kerasdist.strategies.data.choice import checksum_of_batch
from kerasdist.strategies.reduce.consensus import Consensus
from kerasdist.strategies.reduce.workers import ReplicaLayout

# Sources from which dynamic batches are read by their numbers.
#
# arrays               number n is the n-th batch in the order of the pass, which all
#                      workers agree on
# PyDataset            the n-th item in that order: one worker reads it
# tf.data.Dataset      the n-th element: every worker reads all elements before it
# each worker's own    the next one, whatever its number
#
# The thread that reads ahead calls `read`, Keras's loop calls the other methods.

# How many batches of a pass are compared over the workers.
_CHECKED = 2


class Source(abc.ABC):
    """A source of batches; `read` is called from another thread than the rest.

    Attributes:
        length: Number of batches in a pass; None: not known.
        is_distributed: Whether a batch is divided over this worker's replicas already.
        is_shared: Whether all workers have the same batches, each for one of them.
        seed: The seed of the orders of passes, the same on all workers; None if unused.
        evidence: A checksum of each of the first batches of this pass that this worker
            has read, by number, if all workers should read the same.
    """

    is_distributed = False
    is_shared = True

    def __init__(self, length: int | None, seed: int | None = None) -> None:
        self.length = length
        self.seed = seed
        self.evidence: dict[int, int] = {}

    @abc.abstractmethod
    def example(self) -> Any:
        """Return a batch, for its shapes and dtypes."""

    @abc.abstractmethod
    def begin(self, number: int) -> None:
        """Begin a pass over the data.

        Args:
            number: The pass's number; the same on all workers.
        """

    def skip(self, passes: int) -> None:
        """Skip passes that the others have made before this worker started."""
        del passes

    @abc.abstractmethod
    def read(self, number: int) -> tuple[Any] | None:
        """Read a batch of this pass, alone in a tuple; None if there is none.

        Args:
            number: The batch's number; larger than in any call before.
        """


class ArraySource(Source):
    """Batches of arrays.

    Args:
        data: The arrays.
        seed: The seed of the orders; the same on all workers.
    """

    def __init__(self, data: ArrayData, seed: int) -> None:
        super().__init__(-(-data.samples // data.batch_size), seed)
        self._data = data
        self._rows = data.rows()
        self._order = np.zeros(0, np.int64)

    def example(self) -> Any:
        """See `Source.example`."""
        size = min(self._data.samples, self._data.batch_size)
        return self._rows.take(np.arange(size))

    def begin(self, number: int) -> None:
        """See `Source.begin`."""
        self._order = order_of_arrays(self._data, self.seed or 0, number)

    def read(self, number: int) -> tuple[Any] | None:
        """See `Source.read`."""
        start = number * self._data.batch_size
        rows = self._order[start : start + self._data.batch_size]
        return (self._rows.take(rows),) if rows.size else None


class ItemSource(Source):
    """The items of a PyDataset.

    Args:
        data: The PyDataset.
        seed: The seed of the orders; the same on all workers.
    """

    def __init__(self, data: ItemData, seed: int) -> None:
        super().__init__(data.length, seed)
        self._data = data
        self._order: Any = None

    def example(self) -> Any:
        """See `Source.example`."""
        return _without_nones(self._data.read(0))

    def begin(self, number: int) -> None:
        """See `Source.begin`."""
        self.length = self._data.length
        self._order = order_of_items(
            self.length, self._data.shuffle, self.seed or 0, number
        )

    def read(self, number: int) -> tuple[Any] | None:
        """See `Source.read`."""
        if self.length is not None and number >= self.length:
            return None
        index = number if self._order is None else int(self._order[number])
        return (_without_nones(self._data.read(index)),)


class OwnSource(Source):
    """Data that are this worker's own.

    Args:
        dataset: The iterable of its batches.
        length: Number of batches; None: not known.
    """

    is_shared = False

    def __init__(self, dataset: Any, length: int | None) -> None:
        super().__init__(length)
        self.is_distributed = isinstance(dataset, tf.distribute.DistributedDataset)
        self._dataset = dataset
        self._elements: Iterator[Any] = iter(())

    def example(self) -> Any:
        """See `Source.example`."""
        return next(iter(self._dataset))

    def begin(self, number: int) -> None:
        """See `Source.begin`."""
        self.evidence = {}
        self._elements = enumerate(self._dataset)

    def read(self, number: int) -> tuple[Any] | None:
        """See `Source.read`."""
        for _, element in self._elements:
            return (element,)
        return None


class DatasetSource(OwnSource):
    """A `tf.data.Dataset` of batches, the same on all workers.

    Args: See `OwnSource`.
    """

    is_shared = True

    def skip(self, passes: int) -> None:
        """Skip passes, see `Source.skip`: a shuffled dataset counts its passes."""
        for _ in range(passes):
            iter(self._dataset)

    def read(self, number: int) -> tuple[Any] | None:
        """See `Source.read`."""
        for place, element in self._elements:
            if place < _CHECKED:
                self.evidence[place] = checksum_of_batch(element)
            if place == number:
                return (element,)
        return None


def _without_nones(batch: Any) -> Any:
    """Drop the missing values at the end of (x, y, sample_weight)."""
    if not isinstance(batch, tuple):
        return batch
    while len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]
    return batch


class AsyncDataset(BatchIterable):
    """The data that `fit` trains on, over epochs; all workers create theirs alike.

    Args:
        data: The `AsyncData` that makes it.
        source: Reads batches.
        number: The index of this dataset, the same on all workers.

    Attributes:
        workers, weights, timer: Those of the data.
        length: Number of batches in a pass over the data; None: not known.
        steps: Number of batches that this worker has taken in this epoch.
    """

    def __init__(self, data: Any, source: Source, number: int) -> None:
        self.workers, self.weights, self.timer = data.workers, data.weights, data.timer
        self._data = data
        self.source = source
        self.steps = 0
        self._number = number
        self._epoch = 0
        self._pass = 0
        # Batches of this pass that earlier epochs have used; 0: a new pass begins.
        self._used = 0
        self._last = -1
        self._limit: int | None = None
        self._batches: AsyncBatches | None = None

    def __str__(self) -> str:
        """Return its name in messages."""
        return f"dataset {self._number}"

    @property
    def length(self) -> int | None:
        """The number of batches in a pass over the data; None if not known."""
        return self.source.length

    def example(self) -> Any:
        """See `BatchIterable.example`; the batch isn't claimed."""
        return split_part(self.source.example())[0]

    def begin_epoch(self, steps: int | None = None) -> AsyncBatches:
        """Begin the next epoch, at the same point on all workers.

        Args:
            steps: Number of batches over all workers; None: to the end of the data.
        """
        self.workers.check_joined()
        self.close()
        # A joining worker has no batches yet but still takes part in this collective.
        if self._epoch:
            exhausted = self._batches is not None and self._batches.exhausted
            place = f"begins pass {self._epoch + 1} of {self}"
            if Consensus(self.workers).any_at(place, exhausted):
                self._used = 0
        self.weights.rebase()
        self.weights.count.begin_epoch()
        self._data.present = self
        self._epoch += 1
        self._last = -1
        self.steps = 0
        if steps is None or self._used == 0:
            self._used = 0
            self._pass += 1
            self.source.begin(self._pass)
        length = self.length
        self._limit = steps
        if length is not None:
            left = length - self._used
            self._limit = left if steps is None else min(steps, left)
        gated = steps is not None or self.source.is_shared
        used = self._used
        local = itertools.count()

        def claim() -> int | None:
            return self._claim(self._last) if gated else next(local)

        if self._limit is not None and gated:
            self._used += self._limit
        if length is not None and self._used >= length:
            self._used = 0
        self._batches = AsyncBatches(self, claim, used)
        return self._batches

    def facts(self) -> dict[str, Any]:
        """Return the state between two epochs, for joining workers."""
        return {
            "dataset": self._number,
            "length": self.length,
            "seed": self.source.seed,
            "begun": self._epoch,
            "passes": self._pass,
            "used": self._used,
        }

    def join(self, facts: dict[str, Any]) -> None:
        """Take over the others' state, which is `facts`.

        Raises:
            ValueError: This worker was given different data.
        """
        theirs = facts["length"], facts["dataset"]
        if theirs != (self.length, self._number):
            raise ValueError(
                "A worker that joins must be given the others' data. Received: "
                f"{self.length} batches, dataset {self._number}; the others have "
                f"{theirs[0]}, dataset {theirs[1]}. All workers must run the same "
                "script."
            )
        source = self.source
        source.seed = facts["seed"]
        self._epoch, self._pass = int(facts["begun"]), int(facts["passes"])
        self._used = int(facts["used"])
        source.skip(self._pass - bool(self._used))
        if self._used:
            source.begin(self._pass)

    def end_for_all(self) -> None:
        """Let the epoch of all workers end with the batches that they have claimed."""
        self._claim(END)

    def close(self) -> None:
        """End the reading thread."""
        if self._batches is not None:
            self._batches.close()

    def _claim(self, last: int) -> int | None:
        # An argument, not `_last`, which the reading thread sets, too.
        number = self.workers.client.claim(
            self._number, self._epoch, limit=self._limit, last=last
        )
        if number is not None:
            self._last = number
        return number


class AsyncBatches(FetchedBatches):
    """This worker's batches of one epoch; read ahead by a thread.

    Args:
        dynamic: The dataset.
        claim: Returns the number of a batch in its pass, or None.
        used: Number of batches of the pass that earlier epochs have used.

    Attributes:
        number: Number of the next batch in the epoch.
        exhausted: Whether the data have ended before the claims.
    """

    def __init__(
        self, dynamic: AsyncDataset, claim: Callable[[], int | None], used: int
    ) -> None:
        super().__init__()
        self.number = 0
        self.exhausted = False
        self._dynamic = dynamic
        self._claim = claim
        self._used = used
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kerasdist-reader")
        self._closed = False
        self._ahead: Future[tuple[int, Any] | None] | None = None

    def ready(self) -> bool:
        """Return whether there is another batch; wait until it is read."""
        try:
            self.at_least_one()
        except StopIteration:
            return False
        return True

    def _fetch(self) -> list[Any]:
        if self._closed:
            raise StopIteration
        ahead = self._ahead or self._pool.submit(self._read)
        begin = time.time()
        found = ahead.result()
        self._dynamic.timer.waited(time.time() - begin, between=True)
        if found is None:
            self.close()
            raise StopIteration
        self.number = found[0]
        self._ahead = self._pool.submit(self._read)
        return [found[1]]

    def __next__(self) -> Any:
        batch = super().__next__()
        self._dynamic.steps += 1
        return batch

    def close(self, wait: bool = True) -> None:
        """End the reading thread, which may still read a batch without `wait`."""
        self._closed = True
        self._pool.shutdown(wait=wait, cancel_futures=True)

    def _read(self) -> tuple[int, Any] | None:
        number = self._claim()
        if number is None:
            return None
        with tf.device(_tf.host_of(self._dynamic.workers.devices[0])):
            found = self._dynamic.source.read(self._used + number)
        if found is None:
            self.exhausted = True
            return None
        if self._dynamic.source.is_distributed:
            return number, found[0]
        return number, _for_replicas(self._dynamic.workers.devices, found[0])


def _for_replicas(devices: Sequence[str], batch: Any) -> Any:
    """Put a batch on this worker's device, or divide it over its devices."""
    host = _tf.host_of(devices[0])
    layout = ReplicaLayout(0, len(devices), len(devices))
    rows = count_rows(batch) if len(devices) > 1 else None

    def part(replica: int) -> Any:
        def put(leaf: Any) -> Any:
            kept = tf.experimental.Optional, tf.RaggedTensor, tf.SparseTensor
            if leaf is None or isinstance(leaf, kept):
                return leaf
            tensor = tf.convert_to_tensor(leaf)
            return tensor if devices[replica] == host else tf.identity(tensor)

        mine = batch
        if rows is not None:
            with tf.device(host):
                mine = part_of_batch(batch, rows, replica, layout)
        return tf.nest.map_structure(put, mine)

    return for_replicas(devices, part)
