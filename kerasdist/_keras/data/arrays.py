"""Arrays that were given to `fit`, `evaluate` or `predict`."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.trainers.data_adapters import (
    array_slicing,
    py_dataset_adapter,
)
from keras.src.utils import rng_utils

from kerasdist._keras.protocols import KerasHooks
from kerasdist._tf.row_pipelines import has_cache
from kerasdist._tf.variables import WHOLE_DATA

# The uses of a script's data by Keras, with which another process catches up.
#
# The order of a shuffled `tf.data.Dataset` depends on how often it was iterated over,
# in whichever calls of Keras, and a `PyDataset` may change in `on_epoch_begin` and
# `on_epoch_end`. A worker that joins a job hasn't done that as often as the others.


class DataUse:
    """The uses of one dataset.

    Args:
        data: A `tf.data.Dataset` or a `PyDataset`; not kept.

    Attributes:
        passes: How often it was iterated over.
        begun: How often an epoch of it was begun.
        ended: How often one was ended.
    """

    def __init__(self, data: Any) -> None:
        self.passes = self.begun = self.ended = 0
        self._data = weakref.ref(data)

    def is_of(self, data: Any) -> bool:
        """Return whether these are the uses of a dataset."""
        return self._data() is data

    def counts(self) -> list[int]:
        """Return the numbers of uses, for `catch_up`."""
        return [self.passes, self.begun, self.ended]

    def catch_up(self, counts: Sequence[int]) -> None:
        """Use the dataset until the counts are at least these.

        Passes are begun, but not read: that draws the seed of their order. Only of a
        dataset with a cache one is read, because it fills the cache.
        """
        passes, begun, ended = counts
        data: Any = self._data()
        is_dataset = isinstance(data, tf.data.Dataset)
        fills = is_dataset and self.passes < passes and has_cache(data)
        while self.passes < passes:
            self.passes += 1
            iterator = iter(data) if is_dataset else iter(())
            if fills:
                fills = False
                for _ in iterator:
                    pass
        while self.begun < begun:
            self.begun += 1
            if data is not None:
                data.on_epoch_begin()
        while self.ended < ended:
            self.ended += 1
            if data is not None:
                data.on_epoch_end()

    def count_epochs(self, adapter: Any) -> None:
        """Count the epochs of Keras's adapter of a `PyDataset`."""
        begin: Callable[[], None] = adapter.on_epoch_begin
        end: Callable[[], None] = adapter.on_epoch_end

        def on_epoch_begin() -> None:
            self.begun += 1
            begin()

        def on_epoch_end() -> None:
            self.ended += 1
            end()

        adapter.on_epoch_begin, adapter.on_epoch_end = on_epoch_begin, on_epoch_end


_uses: weakref.WeakKeyDictionary[KerasHooks, DataUses] = weakref.WeakKeyDictionary()


def uses_of(hooks: KerasHooks) -> DataUses:
    """Return the uses of the data that the models of a strategy were given."""
    return _uses.setdefault(hooks, DataUses())


class DataUses:
    """The uses of all datasets that one strategy's models were given, in that order."""

    def __init__(self) -> None:
        self._known: list[DataUse] = []

    def of(self, data: Any) -> DataUse | None:
        """Return the uses of data, which are added if they aren't known.

        None: of such data all uses are the same.
        """
        # A dataset that the script has distributed is divided again, and read itself.
        whole = WHOLE_DATA.get(data)
        data = data if whole is None else whole
        if not isinstance(data, (tf.data.Dataset, py_dataset_adapter.PyDataset)):
            return None
        for use in self._known:
            if use.is_of(data):
                return use
        self._known.append(DataUse(data))
        return self._known[-1]

    def index(self, use: DataUse | None) -> int | None:
        """Return the place of some uses among all."""
        return None if use is None else self._known.index(use)

    def counts(self) -> list[list[int]]:
        """Return the numbers of uses of all."""
        return [use.counts() for use in self._known]

    def catch_up(self, counts: Sequence[Sequence[int]]) -> None:
        """Use each dataset until its counts are at least these."""
        for use, each in zip(self._known, counts, strict=False):
            use.catch_up(each)


# The iterables that a strategy gives Keras in the place of distributed datasets.


class BatchIterable(abc.ABC):
    """Batches of a strategy, each iteration a pass over them."""

    @abc.abstractmethod
    def example(self) -> Any | None:
        """Return a batch for its shapes; None if there is none."""


class BatchIterator(abc.ABC):
    """An iterator over batches that isn't TensorFlow's, of one pass.

    Attributes:
        example: A batch for its shapes; None: not known before the first one is read.
        element_spec: The specification of all batches; None: not known.
    """

    example: Any = None
    element_spec: Any = None

    def __iter__(self) -> BatchIterator:
        return self

    @abc.abstractmethod
    def __next__(self) -> Any:
        """Return the next batch."""

    @abc.abstractmethod
    def at_least_one(self) -> BatchIterator:
        """Fetch the next batch now; raises StopIteration if there's none.

        Keras's loop over the iterator needs at least one step.
        """

    def pause(self, paused: bool) -> bool:
        """Yield batches without rows, or don't any more, while others have some.

        Returns:
            Whether it can.
        """
        del paused
        return False

    @property
    def admits(self) -> bool:
        """Whether workers may join before the next batch; alike on all workers.

        Not at the end, where no step follows. The batch is fetched now.
        """
        try:
            self.at_least_one()
        except StopIteration:
            return False
        return True


class CountedData:
    """An iterable whose passes are counted, from 1.

    Attributes:
        use: The uses of the data that a script has given; None: they aren't known.
    """

    use: DataUse | None = None

    def next_pass(self) -> int:
        """Count a pass; return its number, or 0 if it isn't known."""
        if self.use is None:
            return 0
        self.use.passes += 1
        return self.use.passes

    def turn_to(self, number: int) -> None:
        """Let the next pass have this number, unless there were as many already."""
        if self.use is not None:
            self.use.catch_up([number - 1, 0, 0])


class LoopData:
    """The iterable of a custom loop, which may be given to `fit`, too.

    Attributes:
        dataset: The dataset, from which `fit` gets its own iterable.
    """

    dataset: Any


class RepeatableIterator(abc.ABC):
    """An iterator of global batches that goes on after a change of the workers.

    A batch is used up when the step on it is committed, and not when it's read.

    Attributes:
        kind: The kind of the data: two processes continue only with data of one kind.
        number: The number of the pass over the data, from 1; 0: it isn't known.
        taken: The number of batches that are used up.
    """

    kind: str
    number = 0
    taken = 0
    # What reads the dataset.
    _source: Any = None

    @property
    @abc.abstractmethod
    def inner(self) -> Any:
        """The iterator from which a step takes this worker's part of the next batch.

        It's for the present layout of the replicas: after a change of it, and after
        `renew`, it must be asked for again.
        """

    @property
    def once(self) -> Any:
        """The iterator for a pass that isn't continued after a change."""
        return self.inner

    def commit(self) -> None:
        """Count the batch of a step that has just been finished as used up."""
        self.taken += 1

    @abc.abstractmethod
    def renew(self) -> None:
        """Let `inner` yield the last batch again unless it was committed.

        The batches after it follow.
        """

    def skip(self, batches: int) -> None:
        """Begin after this many batches of the pass, of which none was taken.

        By default they are read.
        """
        while self.taken < batches and next(self._source, None) is not None:
            self.taken += 1

    @abc.abstractmethod
    def next_checksum(self) -> int:
        """Return a checksum of the next global batch; 0 if there's none."""

    def __iter__(self) -> RepeatableIterator:
        return self

    def __next__(self) -> Any:
        return next(self.inner)


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
        parts, following = self._sliceable(), iter(leaves)
        flat = [x if x is None else next(following) for x in tree.flatten(parts)]
        self._parts = tree.pack_sequence_as(parts, flat)
        self.samples = int(leaves[0].shape[0])
        self.batch_size = batch_size

    def rows(self) -> ArrayRows:
        """Return the rows of the data, which are given up here: they may be a copy."""
        parts, self._parts = self._sliceable(), None
        self._inputs = None
        return ArrayRows(tree.map_structure(_as_tensor, parts))

    def _sliceable(self) -> Any:
        if self._parts is None:
            parts = array_slicing.convert_to_sliceable(
                self._inputs, target_backend="tensorflow"
            )
            self._parts = tree.traverse(_unwrapped, tree.lists_to_tuples(parts))
        return self._parts


def _leaves(parts: Any) -> list[Any]:
    return [leaf for leaf in tree.flatten(parts) if leaf is not None]


def _unwrapped(array: Any) -> Any:
    """Return the sparse tensor that Keras has wrapped; None: go on with its parts."""
    is_wrapper = isinstance(array, array_slicing.TensorflowSparseWrapper)
    return array.sparse if is_wrapper else None


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


class ArrayRows:
    """The rows of arrays.

    Args:
        inputs: A nest of the arrays, as tensors.
    """

    def __init__(self, inputs: Any) -> None:
        self._inputs = inputs

    def take(self, rows: Any) -> Any:
        """Return a batch at once, given its index vector."""
        return _take_rows(self._inputs, rows)

    def pipeline(
        self,
        parts: Any,
        rows: Callable[[Any], Any],
        finish: Callable[[Any, Any], Any],
    ) -> Any:
        """Return a dataset of batches, which reads their rows only.

        Args:
            parts: A dataset of numbers, one for each batch.
            rows: Returns a batch's index vector, given its number. AutoGraph converts
                neither this nor `finish`.
            finish: Makes the dataset's element from the batch and its number.
        """

        # No Python here depends on a tensor, and converting all called functions takes
        # as long as a small model's first steps.
        @tf.autograph.experimental.do_not_convert
        def gather(part: Any, data: Any) -> Any:
            return finish(_take_rows(data, rows(part)), part)

        whole = tf.data.Dataset.from_tensors(self._inputs).repeat()
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


def _as_tensor(array: Any) -> Any:
    if isinstance(array, tf.SparseTensor):
        return array_slicing.to_tensorflow_sparse_wrapper(array)
    return tf.convert_to_tensor(array) if isinstance(array, np.ndarray) else array


def random_seed() -> int | None:
    """Return the seed of `keras.utils.set_random_seed`, or None."""
    seed = rng_utils.get_random_seed()
    return None if seed is None else int(seed)
