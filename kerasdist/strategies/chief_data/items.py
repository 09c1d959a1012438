"""PyDatasets given to Keras: each worker reads its share, or the chief reads all."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist._keras import (
    ArrayData,
    BatchIterable,
    GeneratorFacts,
    ItemData,
    StepTimer,
)
from kerasdist._tf.row_pipelines import RowPipeline, iterator_dataset
from kerasdist.collectives import Communicator
from kerasdist.strategies.chief_data.choice import DataChoice
from kerasdist.strategies.chief_data.comparison import (
    Batch,
    Content,
    Origin,
    batch_of,
    hash_text,
    of_dataset,
    of_generator,
    of_object,
)
from kerasdist.strategies.chief_data.encoding import (
    chiefs_facts,
    chiefs_leaves,
    decode,
    encode,
    pack,
    size_of,
    unpack,
)
from kerasdist.strategies.chief_data.feed import ChiefFeed
from kerasdist.strategies.data.batch_split import (
    checksum_of_batch,
    different_batches,
    epoch_order,
)
from kerasdist.strategies.data.item_codec import used, with_remedies
from kerasdist.strategies.reduce.workers import Workers

# Datasets and generators given to Keras: the same on all workers, or the chief's.
#
# The first batches are read and compared through the iterator of the first pass:
# nothing is read twice, and nothing is lost of a source that can be read only once.

# Another order shows in the first batches, or almost never.
_COMPARED = 2


class PeekedDataset:
    """A dataset whose first pass has begun.

    Args:
        dataset: The dataset.

    Attributes:
        head: The first batches of it.
        seconds: The time that the last one of these took.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.seconds = 0.0
        # When an iterator is released, TensorFlow waits for its tuning thread, which
        # may sleep for a minute; see `ArrayData.take`. Without tuning AUTOTUNE means as
        # many calls at once as there are threads.
        options = tf.data.Options()
        options.autotune.enabled = False
        self._untuned = dataset.with_options(options)
        self._iterator: Any = iter(self._untuned)
        self.head: list[Any] = []
        for _ in range(_COMPARED):
            begin = time.perf_counter()
            self.head += itertools.islice(self._iterator, 1)
            self.seconds = time.perf_counter() - begin
        self._begun = True  # and nothing of that pass has been taken

    def passes(self) -> Iterable[Any]:
        """Return an iterable over the batches of the next pass."""
        if not self._begun:
            return iter(self._untuned)
        self._begun = False
        head, self.head = self.head, []
        iterator, self._iterator = self._iterator, None
        return itertools.chain(head, iterator)

    def drop(self) -> None:
        """Release the pass that has begun."""
        self._iterator, self.head = None, []

    def divided(self, divide: Callable[[Any], Any]) -> Passes:
        """Return the passes over this worker's parts, for Keras to iterate over.

        Args:
            divide: Returns an iterable over this worker's parts of a dataset.
        """
        first = self._following(self._dataset, self.head)
        example = self.head[0] if self.head else None
        return Passes(
            divide(first), lambda: divide(self._dataset), self._iterator, example
        )

    def _following(self, dataset: Any, head: list[Any]) -> Any:
        """Return a dataset of the first pass, with the options of another."""
        first = iterator_dataset(self._iterator, dataset)
        for element in reversed(head):
            first = tf.data.Dataset.from_tensors(element).concatenate(first)
        return first.with_options(dataset.options())


class PeekedRows(PeekedDataset):
    """A dataset whose rows are made one by one, and whose first pass has begun.

    What is read are the elements before the maps: each worker can still call these for
    its own rows.

    Args:
        pipeline: The dataset's pipeline.
    """

    def __init__(self, pipeline: RowPipeline) -> None:
        super().__init__(pipeline.windows)
        self._pipeline = pipeline
        self._windows = self.head
        self.head = []
        if self._windows:
            windows = map(tf.data.Dataset.from_tensors, self._windows)
            read = functools.reduce(lambda one, other: one.concatenate(other), windows)
            self.head = list(
                pipeline.batches(read.with_options(self._untuned.options()))
            )

    def passes(self) -> Iterable[Any]:
        """See `PeekedDataset.passes`."""
        windows = self._untuned
        if self._begun:
            self._begun = False
            windows = self._following(windows, self._windows)
            self.head, self._windows = [], []
        return iter(self._pipeline.batches(windows))

    def drop(self) -> None:
        """See `PeekedDataset.drop`."""
        super().drop()
        self._windows = []

    def divided_rows(self, divide: Callable[..., Any]) -> Passes:
        """Return the passes over this worker's parts, as `divided` does.

        Args:
            divide: Returns an iterable over this worker's parts of a dataset of
                windows, given the checksums of its first batches, or None.
        """
        every = self._pipeline.windows
        first = self._following(every, self._windows)
        known = [checksum_of_batch(batch) for batch in self.head]
        example = self.head[0] if self.head else None
        return Passes(
            divide(first, known), lambda: divide(every, None), self._iterator, example
        )


class Passes(BatchIterable):
    """This worker's parts of a dataset: of the first pass, which has begun, and others.

    Args:
        first: The rest of the first pass.
        every: Returns the parts of the whole dataset. Making a pipeline takes long,
            and one epoch needs only the first pass.
        iterator: The iterator that the first pass reads.
        example: A batch, for its shapes; None if there is none.
    """

    def __init__(
        self, first: Any, every: Callable[[], Any], iterator: Any, example: Any
    ) -> None:
        self._first = first
        self._make_every = every
        self._every: Any = None
        self._iterator = iterator
        self._example = example

    def example(self) -> Any | None:
        """See `BatchIterable.example`."""
        return self._example

    def __iter__(self) -> Iterator[Any]:
        first, self._first = self._first, None
        if first is not None:
            return iter(first)
        self._iterator = None
        if self._every is None:
            self._every = self._make_every()
        return iter(self._every)


def verify_or_adopt_dataset(
    workers: Workers,
    timer: StepTimer,
    choice: DataChoice,
    dataset: Any,
    length: int | None,
    log_once: Callable[[str, str], None],
    generator: GeneratorFacts | None = None,
    rows: RowPipeline | None = None,
) -> tuple[PeekedDataset, ChiefFeed | None, int | None]:
    """Begin to read a dataset; let all workers use the chief's, if theirs differ.

    Args:
        workers: The connected workers.
        timer: Measures steps, and what they wait for.
        choice: Decides whose data are used.
        dataset: This worker's dataset of global batches.
        length: Number of its batches; None: unknown.
        log_once: Logs a line on the chief, given the kind of data and a line.
        generator: The facts of the plain generator that the dataset reads, if any.
        rows: The dataset's pipeline, if its rows are made one by one.

    Returns:
        The dataset, `PeekedRows` with `rows`; the feed of the chief's batches, or None
        if each worker uses its own; and the number of batches that counts.

    Raises:
        ValueError: They differ, and the chief's can't be used. All workers raise it.
    """
    communicator = workers.communicator
    name = "datasets" if generator is None else "generators"
    peeked = PeekedDataset(dataset) if rows is None else PeekedRows(rows)
    content = Content([batch_of(batch) for batch in peeked.head])

    def origin() -> Origin:
        return of_dataset(dataset) if generator is None else of_generator(generator)

    why = choice.of_chief(
        communicator,
        name,
        content,
        length=length,
        origin=origin,
        different=lambda others, _: different_batches(others, communicator.ranks[0]),
        strange=generator is not None,
    )
    if not why and generator is not None and choice.mode == "auto":
        why = "a generator isn't known to be the same on all workers"
    if not why:
        return peeked, None, length
    known = chiefs_facts(communicator, {"length": length})["length"]
    example = peeked.head[0] if peeked.head else None
    if communicator.rank > 0:
        peeked.drop()
    feed = ChiefFeed(workers, timer, peeked.passes, dataset.element_spec, example)
    sizes = [size_of(batch.leaves) for batch in content.batches[:1]]
    megabytes = sum(sizes) / 1e6
    cost = f"rank 0 reads all and sends {megabytes:.3g} MB in each step"
    log_once(name, used(name, why, cost))
    return peeked, feed, known


# Batches of `train_on_batch` and the like: the same on all, or the chief's.


def verify_or_adopt_batch(
    communicator: Communicator,
    choice: DataChoice,
    data: Any,
    log_once: Callable[[str, str], None],
) -> Any:
    """Return a global batch that all workers hold: if theirs differ, the chief's.

    Args:
        communicator: The communicator of all workers, which call this together.
        choice: Decides whose data are used.
        data: This worker's batch, a nest of arrays, or of values that
            NumPy converts to arrays.
        log_once: Logs a line on the chief, given the kind of data and a line.

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
        different=lambda others, _: with_remedies(
            "All workers must be given the same global batch, of which each takes its "
            "rows",
            f"batches of ranks {others} differ from rank {communicator.ranks[0]}'s",
        ),
    )
    if not why:
        return data
    leaves = [encode(leaf) for leaf in tf.nest.flatten(data)]
    packed = pack({}, leaves) if communicator.rank == 0 else np.zeros(0, np.uint8)
    _, chiefs = unpack(communicator.all_gather(packed)[0])
    cost = f"rank 0 sends {size_of(chiefs) / 1e6:.3g} MB in each step"
    log_once("batches", used("batches", why, cost))
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
    log_once: Callable[[str, str], None],
) -> None:
    """Make all workers hold the same arrays: if theirs differ, the chief's.

    Args:
        communicator: The communicator of all workers, which call this together.
        choice: Decides whose data are used.
        data: This worker's arrays; the chief's afterwards.
        log_once: Logs a line on the chief, given the kind of data and a line.

    Raises:
        ValueError: They differ, and the chief's can't be used. All workers raise it.
    """
    if communicator.size == 1:
        return
    x, rest = (tuple(encode(leaf) for leaf in leaves) for leaves in data.leaves())
    settings = {"shuffle": str(data.shuffle), "batch_size": data.batch_size}

    def different(others: list[int], asked: list[Any]) -> ValueError:
        del others
        named = zip(communicator.ranks, asked, strict=True)
        every = "; ".join(f"rank {rank}: {_text(each)}" for rank, each in named)
        return with_remedies(
            "All workers must be given the same data: each takes its own part of every "
            "global batch",
            f"arrays that differ, here samples={data.samples}; {every}",
        )

    why = choice.of_chief(
        communicator,
        "arrays",
        Content([Batch(x, rest)]),
        settings=settings,
        different=different,
    )
    if not why:
        return
    facts = chiefs_facts(communicator, {"batch_size": data.batch_size})
    leaves = [*x, *rest]
    megabytes = size_of(leaves) / 1e6
    data.replace(chiefs_leaves(communicator, leaves), int(facts["batch_size"]))
    log_once("arrays", used("arrays", why, f"{megabytes:.3g} MB are sent once"))


def _text(asked: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in asked.items())


class ChiefItems:
    """The chief's items, for all workers, if theirs differ.

    Args:
        workers: The connected workers.
        timer: Measures steps, and what they wait for.
        choice: Decides whose data are used.
        data: This worker's PyDataset.
        seed: Returns a seed that all workers agree on.
        log_once: Logs a line on the chief, given the kind of data and a line.
    """

    def __init__(
        self,
        workers: Workers,
        timer: StepTimer,
        choice: DataChoice,
        data: ItemData,
        seed: Callable[[], int],
        log_once: Callable[[str, str], None],
    ) -> None:
        self._workers, self._timer = workers, timer
        self._choice = choice
        self._data = data
        self._seed = seed
        self._log_once = log_once
        self._epoch = 0

    def feed_if_different(self, different: ValueError | None) -> ChiefFeed | None:
        """Return the feed of the chief's items; None if all workers have the same.

        Args:
            different: The error that describes how the workers' datasets differ.

        Raises:
            ValueError: They differ, and the chief's can't be used; on all workers.
        """
        data, communicator = self._data, self._workers.communicator
        item = data.read(0) if data.length != 0 else None
        content = Content([] if item is None else [batch_of(item)])

        def error(others: list[int], _: Any) -> ValueError:
            return different or ValueError(
                "The workers' PyDatasets hold different items. Received: item 0 of "
                f"ranks {others} differs from rank 0's."
            )

        why = self._choice.of_chief(
            communicator,
            "PyDatasets",
            content,
            length=data.length,
            settings={"shuffle": data.shuffle},
            origin=lambda: of_object(data.dataset),
            different=error,
        )
        if not why:
            if different is not None:
                raise different
            return None
        self._seeded = self._seed()
        length = chiefs_facts(communicator, {"length": data.length})["length"]
        feed = ChiefFeed(self._workers, self._timer, self._pass, item, item)
        feed.length = length
        sizes = [size_of(batch.leaves) for batch in content.batches]
        feed.rows = content.rows
        cost = f"rank 0 reads all and sends {sum(sizes) / 1e6:.3g} MB in each step"
        self._log_once("PyDatasets", used("PyDatasets", why, cost))
        return feed

    def _pass(self) -> Iterator[Any]:
        """Read all items, in the order of the next epoch."""
        data, order = self._data, None
        self._epoch += 1
        if data.shuffle and data.length is not None:
            drawn = epoch_order(data.length, 1, True, self._seeded, self._epoch)
            order = drawn.tolist()
        reader = data.reader(0, 1, order)
        try:
            for _ in itertools.repeat(None, *_times(data.length)):
                yield reader.read()[1]
        finally:
            reader.close()


def _times(length: int | None) -> tuple[int, ...]:
    return () if length is None else (length,)
