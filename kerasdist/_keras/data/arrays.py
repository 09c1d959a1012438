"""Arrays that were given to `fit`, `evaluate` or `predict`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.trainers.data_adapters import (
    array_slicing,
)
from keras.src.utils import rng_utils

from kerasdist._keras.data.uses import DataUse

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
        """Whether workers may join before the next batch; alike on all workers."""
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
    """

    @property
    @abc.abstractmethod
    def inner(self) -> Any:
        """The iterator from which a step takes this worker's part of the next batch.

        It's made for the present layout of the replicas: another object after a change
        of the layout, and after `renew`.
        """

    @property
    def once(self) -> Any:
        """The iterator for a pass that isn't continued after a change."""
        return self.inner

    @abc.abstractmethod
    def commit(self) -> None:
        """Count the batch of a step that has just been finished as used up."""

    @abc.abstractmethod
    def renew(self) -> None:
        """Let `inner` yield the last batch again unless it was committed.

        The batches after it follow.
        """

    @property
    def kind(self) -> str:
        """The kind of the data: two processes continue only with data of one kind."""
        return type(self).__name__

    @property
    @abc.abstractmethod
    def number(self) -> int:
        """The number of the pass over the data, from 1; 0: it isn't known."""

    @property
    @abc.abstractmethod
    def taken(self) -> int:
        """The number of batches that are used up."""

    @abc.abstractmethod
    def skip(self, batches: int) -> None:
        """Begin after this many batches of the pass, of which none was taken."""

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
        return _pipeline(self._taken(), parts, rows, finish)

    def pipelines(self) -> Callable[[Any, Any, Any], Any]:
        """Return a function like `take` that can be called more than once."""
        return partial(_pipeline, tree.map_structure(_as_tensor, self._taken()))


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


def _pipeline(
    inputs: Any,
    parts: Any,
    rows: Callable[[Any], Any],
    finish: Callable[[Any, Any], Any],
) -> Any:
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


def _as_tensor(array: Any) -> Any:
    return tf.convert_to_tensor(array) if isinstance(array, np.ndarray) else array


def random_seed() -> int | None:
    """Return the seed of `keras.utils.set_random_seed`, or None."""
    seed = rng_utils.get_random_seed()
    return None if seed is None else int(seed)
