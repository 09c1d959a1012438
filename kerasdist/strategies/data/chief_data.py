"""The comparison of the workers' data, and the chief's on all workers if they differ.

The chief's batches are read ahead:

1. chief   a thread reads batches ahead
2. all     between two steps: the chief sends all batches that are ready, at least
           one, to all workers in one collective
3. all     each worker keeps its replicas' rows of a batch, and takes a step

The end of the data is sent like a batch, and so is an exception of the chief's
data: all workers raise it. Collectives run on the thread of Keras's loop, where
those of all workers are in the same order.
"""

from __future__ import annotations

import abc
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist._keras.data.arrays import ArrayData, BatchIterable
from kerasdist._keras.data.pydataset import GeneratorFacts, close_at_end
from kerasdist._keras.protocols import StepTimer
from kerasdist._tf.row_pipelines import RowPipeline, iterator_dataset
from kerasdist.collectives import Communicator
from kerasdist.strategies.data.batch_split import (
    FetchedBatches,
    bounds_of_replica,
    for_replicas,
    slice_rows,
    with_own_facts,
)
from kerasdist.strategies.data.choice import (
    DIFFERENT_BATCHES,
    DataChoice,
)
from kerasdist.strategies.data.comparison import (
    Batch,
    Content,
    batch_of,
    hash_text,
    origin_of,
)
from kerasdist.strategies.data.encoding import (
    Encoded,
    chiefs_facts,
    chiefs_leaves,
    decode,
    encode,
    pack,
    size_of,
    unpack,
)
from kerasdist.strategies.reduce.workers import ReplicaLayout, Workers
from kerasdist.transport.deadline import daemon

# Batches that are kept ready.
_AHEAD = 8
# After this many bytes no further batch is added to a collective.
_AT_ONCE = 8 << 20
# Seconds between two checks for the end of a thread, and until it is abandoned.
_POLL, _PATIENCE = 0.1, 5.0


@dataclass(eq=False, repr=False)
class ChiefFeed(BatchIterable):
    """The iterable for Keras in place of the chief's data; each iteration is a pass.

    Args:
        workers: The connected workers.
        timer: Measures steps, and what they wait for.
        passes: Returns an iterable over the batches of the next pass, and reads none
            of them yet; only the chief reads.
        structure: A nest like a batch.
        first: A batch for its shapes; None if there is none.

    Attributes:
        length: Number of batches of a pass; None: unknown.
        rows: Number of rows of a batch; 0: unknown.
    """

    workers: Workers
    timer: StepTimer
    passes: Callable[[], Iterable[Any]]
    structure: Any
    first: Any
    length: int | None = None
    rows: int = 0
    reader: _Reader | None = None

    def __iter__(self) -> FeedIterator:
        return FeedIterator(self)

    def example(self) -> Any | None:
        """See `BatchIterable.example`."""
        return self.first

    def close(self) -> None:
        """End the thread that reads ahead."""
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()


class ExchangedBatches(FetchedBatches):
    """One pass over batches that workers send each other.

    Args:
        workers: The connected workers.
        timer: Measures steps, and what they wait for.
    """

    def __init__(self, workers: Workers, timer: StepTimer) -> None:
        super().__init__()
        self._workers, self._timer = workers, timer
        self._groups = self._read()

    @abc.abstractmethod
    def _read(self) -> Iterator[list[Any]]:
        """Yield this worker's parts of the batches of each exchange."""

    def _fetch(self) -> list[Any]:
        return next(self._groups)

    def _exchange(self, packed: Any, since: float) -> list[Any]:
        """Return what all workers send.

        Args:
            packed: The bytes that this one sends.
            since: The time at which it has begun to read for them.
        """
        begin = time.time()
        every = self._workers.communicator.all_gather(packed)
        self._timer.waited(begin - since)
        self._timer.waited(time.time() - begin, others=True)
        return every


class FeedIterator(ExchangedBatches):
    """One pass over the chief's data."""

    def __init__(self, feed: ChiefFeed) -> None:
        super().__init__(feed.workers, feed.timer)
        self._feed = feed
        # A dataset that is shuffled again in each pass counts its iterators.
        self._batches = feed.passes()

    def _read(self) -> Iterator[list[Any]]:
        feed, reader = self._feed, None
        if feed.workers.communicator.rank == 0:
            # Read only when the first batch is needed: Keras makes more iterators
            # than it uses.
            feed.close()
            reader = feed.reader = _Reader(self._batches)
        end = None
        while end is None:
            begin = time.time()
            packed = np.zeros(0, np.uint8) if reader is None else reader.ready()
            facts, leaves = unpack(self._exchange(packed, begin)[0])
            following, end = iter(leaves), facts["end"]
            batches = [list(islice(following, count)) for count in facts["counts"]]
            yield [
                own_rows_of(feed.workers, feed.structure, batch) for batch in batches
            ]
        feed.close()
        if reader is not None and reader.error is not None:
            raise reader.error
        if end:
            raise RuntimeError(
                "The chief's data, which are used on all workers, have ended with an "
                f"error. Received: {end}. Rank 0 shows where it was raised."
            )


class _Reader:
    """A thread that reads batches ahead.

    Args:
        batches: The iterable of batches.

    Attributes:
        error: The error that it raised.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.error: BaseException | None = None
        self._batches = batches
        # Batches; after the last one text: the error that has ended them, or none.
        self._ready: queue.Queue[list[Encoded] | str] = queue.Queue(_AHEAD)
        self._closed = threading.Event()
        self._thread = daemon("kerasdist-chief-data", self._read)
        self._thread.start()
        close_at_end(self)

    def ready(self) -> Any:
        """Wait for a batch, or the end; return it with all that follows, packed."""
        batches: list[list[Encoded]] = []
        end, size = None, 0
        while end is None and size < _AT_ONCE:
            try:
                found = self._ready.get(block=not batches)
            except queue.Empty:
                break
            if isinstance(found, str):
                end = found
            else:
                batches.append(found)
                size += size_of(found)
        facts = {"counts": [len(batch) for batch in batches], "end": end}
        return pack(facts, [leaf for batch in batches for leaf in batch])

    def close(self) -> None:
        """End the thread; one that waits for a batch is abandoned after a while."""
        self._closed.set()
        self._thread.join(_PATIENCE)
        close_at_end(self, keep=False)

    def _read(self) -> None:
        try:
            for batch in self._batches:
                leaves = [encode(leaf) for leaf in tf.nest.flatten(batch)]
                if not self._put(leaves):
                    return
        except Exception as error:
            self.error = error
            text = str(error).strip() or "no message"
            self._put(f"{type(error).__name__}: {text.splitlines()[0]}")
        else:
            self._put("")
        finally:
            end = getattr(self._batches, "close", None)
            if end is not None:
                end()

    def _put(self, record: list[Encoded] | str) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(record, timeout=_POLL)
            except queue.Full:
                continue
            return True
        return False


def own_rows_of(workers: Workers, structure: Any, leaves: list[Encoded]) -> Any:
    """Return this worker's part of a batch: per replica, if it has several."""
    layout = workers.layout
    total = next(leaf.rows for leaf in leaves if leaf.rows is not None)

    def part(local: int) -> Any:
        replica = layout.first + local
        own = [_part(leaf, replica, layout) for leaf in leaves]
        nest = tf.nest.pack_sequence_as(structure, own)
        return with_own_facts(nest, total, replica, layout)

    return for_replicas(workers.devices, part)


def _part(leaf: Encoded, replica: int, layout: ReplicaLayout) -> Any:
    if leaf.kind == "none":
        return None
    if leaf.rows is None:
        return tf.convert_to_tensor(decode(leaf))
    rows = slice(*bounds_of_replica(leaf.rows, replica, layout))
    if rows.start == rows.stop:  # see `strategies.data.batch_split`
        rows = slice(max(leaf.rows - 1, 0), leaf.rows)
    if leaf.kind == "dense":
        # A copy, so that the rest of the batch can be freed.
        return tf.convert_to_tensor(leaf.arrays[0][rows].copy())
    return slice_rows(decode(leaf), rows.start, rows.stop)


# Datasets and generators given to Keras: the same on all workers, or the chief's.
#
# The first batches are read and compared through the iterator of the first pass:
# nothing is read twice, and nothing is lost of a source that can be read only once.

# Another order shows in the first batches, or almost never.
_COMPARED = 2


class Passes(BatchIterable):
    """This worker's parts of a dataset, for the layout at the beginning of each pass.

    Args:
        workers: The connected workers.
        divide: Returns an iterable over this worker's parts of a dataset, given that
            and whether its first batches have been compared.
        dataset: The dataset.

    Attributes:
        workers, divide: See above.
    """

    def __init__(
        self, workers: Workers, divide: Callable[[Any, bool], Any], dataset: Any
    ) -> None:
        self.workers, self.divide = workers, divide
        self._dataset = dataset
        self._layout: ReplicaLayout | None = None
        self._parts: Any = None  # for that layout

    def example(self) -> Any | None:
        """See `BatchIterable.example`."""
        return None

    def __iter__(self) -> Iterator[Any]:
        # Batches are read ahead, so that they are for one layout between two passes.
        if self._layout != self.workers.layout:
            self._layout = self.workers.layout
            self._parts = self.divide(self._dataset, False)
        return iter(self._parts)


class PeekedDataset(Passes):
    """A dataset whose first pass has begun.

    Where its rows are made one by one, what is read, and given to `divide`, are the
    windows of elements before the maps: each worker can still call these for its own
    rows.

    Args:
        workers, divide: See `Passes`.
        dataset: The dataset.
        pipeline: Its pipeline, if its rows are made one by one.

    Attributes:
        dataset: The dataset.
        head: The first batches of it.
        seconds: The time that the last element took that was read.
    """

    def __init__(
        self,
        workers: Workers,
        divide: Callable[[Any, bool], Any],
        dataset: Any,
        pipeline: RowPipeline | None = None,
    ) -> None:
        elements = dataset if pipeline is None else pipeline.windows
        super().__init__(workers, divide, elements)
        self.dataset = dataset
        self._pipeline = pipeline
        self.seconds = 0.0
        self._iterator: Any = iter(_untuned(elements))
        self._read: list[Any] = []
        for _ in range(_COMPARED):
            begin = time.perf_counter()
            self._read += islice(self._iterator, 1)
            self.seconds = time.perf_counter() - begin
        self.head = self._read
        if pipeline is not None and self._read:
            windows = map(tf.data.Dataset.from_tensors, self._read)
            read = functools.reduce(lambda one, other: one.concatenate(other), windows)
            self.head = list(pipeline.batches(_untuned(read)))
        self._is_first = True

    def example(self) -> Any | None:
        """See `BatchIterable.example`."""
        return self.head[0] if self.head else None

    def __iter__(self) -> Iterator[Any]:
        if not self._is_first:
            self._iterator = None  # until now its pass was read
            # Making a pipeline takes long, and one epoch needs only the first pass.
            return super().__iter__()
        self._is_first = False
        first = iterator_dataset(self._iterator, self._dataset)
        for element in reversed(self._read):
            first = tf.data.Dataset.from_tensors(element).concatenate(first)
        self._read, self.head = [], self.head[:1]
        return iter(self.divide(first.with_options(self._dataset.options()), True))

    def whole(self, elements: Any, compared: bool) -> Any:
        """Return the whole batches, in the place of `divide`."""
        del compared
        pipeline = self._pipeline
        return _untuned(elements if pipeline is None else pipeline.batches(elements))


def _untuned(dataset: Any) -> Any:
    """Return a dataset that isn't tuned.

    When an iterator is released, TensorFlow waits for its tuning thread, which may
    sleep for a minute; see `ArrayRows.pipeline`. Without tuning AUTOTUNE means as many
    calls at once as there are threads.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def verify_or_adopt_dataset(
    peeked: PeekedDataset,
    timer: StepTimer,
    choice: DataChoice,
    length: int | None,
    generator: GeneratorFacts | None = None,
) -> tuple[PeekedDataset | ChiefFeed, int | None]:
    """Let all workers use the chief's batches, if theirs differ.

    Args:
        peeked: This worker's dataset of global batches.
        timer: Measures steps, and what they wait for.
        choice: Decides whose data are used.
        length: Number of its batches; None: unknown.
        generator: The facts of the plain generator that the dataset reads, if any.

    Returns:
        The dataset, or the feed of the chief's batches; and the number of batches that
        counts.

    Raises:
        ValueError: They differ, and the chief's can't be used. All workers raise it.
    """
    communicator = peeked.workers.communicator
    name = "datasets" if generator is None else "generators"
    source = peeked.dataset if generator is None else generator
    content = Content([batch_of(batch) for batch in peeked.head])
    why = choice.of_chief(
        communicator,
        name,
        content,
        length=length,
        origin=lambda: origin_of(source),
        different=DIFFERENT_BATCHES,
        strange=generator is not None,
    )
    if not why and generator is not None and choice.mode == "auto":
        why = "a generator isn't known to be the same on all workers"
    if not why:
        return peeked, length
    known = chiefs_facts(communicator, {"length": length})["length"]
    structure, example = peeked.dataset.element_spec, peeked.example()
    passes: Callable[[], Iterable[Any]] = tuple
    if communicator.rank == 0:
        peeked.divide = peeked.whole
        passes = peeked.__iter__
    choice.tell(name, why, content.leaves)
    return ChiefFeed(peeked.workers, timer, passes, structure, example), known


# Batches of `train_on_batch` and the like: the same on all, or the chief's.


def verify_or_adopt_batch(
    communicator: Communicator,
    choice: DataChoice,
    data: Any,
) -> Any:
    """Return a global batch that all workers hold: if theirs differ, the chief's.

    Args:
        communicator: The communicator of all workers, which call this together.
        choice: Decides whose data are used.
        data: This worker's batch, a nest of arrays, or of values that
            NumPy converts to arrays.

    Raises:
        ValueError: They differ, and the chief's can't be used. All workers raise it.
    """
    content = Content([batch_of(data)])
    if choice.mode != "chief" and _is_same(communicator, content):
        return data
    why = choice.of_chief(
        communicator,
        "batches",
        content,
        different="All workers must be given the same global batch, of which each "
        "takes its rows",
    )
    if not why:
        return data
    leaves = [encode(leaf) for leaf in tf.nest.flatten(data)]
    packed = pack({}, leaves) if communicator.rank == 0 else np.zeros(0, np.uint8)
    _, chiefs = unpack(communicator.all_gather(packed)[0])
    cost = "rank 0 sends {:.3g} MB in each step"
    choice.tell("batches", why, chiefs, cost)
    return tf.nest.pack_sequence_as(data, [decode(leaf) for leaf in chiefs])


def _is_same(communicator: Communicator, content: Content) -> bool:
    """Return whether all workers hold the same; one small collective."""
    mine = hash_text("".join([content.form, *content.digests()]).encode()) >> 1
    most = communicator.all_reduce([np.array([mine, -mine], np.int64)], "max")[0]
    return bool(most[0] == -most[1])


# Arrays given to Keras: the same on all workers, or replaced by the chief's.


def verify_or_adopt_arrays(
    communicator: Communicator,
    choice: DataChoice,
    data: ArrayData,
) -> None:
    """Make all workers hold the same arrays: if theirs differ, the chief's.

    Args:
        communicator: The communicator of all workers, which call this together.
        choice: Decides whose data are used.
        data: This worker's arrays; the chief's afterwards.

    Raises:
        ValueError: They differ, and the chief's can't be used. All workers raise it.
    """
    if communicator.size == 1:
        return
    x, rest = (tuple(encode(leaf) for leaf in leaves) for leaves in data.leaves())
    content = Content([Batch(x, rest)])
    why = choice.of_chief(
        *(communicator, "arrays", content),
        settings=f"shuffle={data.shuffle}, batch_size={data.batch_size}, "
        f"samples={data.samples}",
        different="All workers must be given the same data: each takes its own part of "
        "every global batch",
    )
    if not why:
        return
    facts = chiefs_facts(communicator, {"batch_size": data.batch_size})
    leaves = content.leaves
    data.replace(chiefs_leaves(communicator, leaves), int(facts["batch_size"]))
    choice.tell("arrays", why, leaves, "{:.3g} MB are sent once")
