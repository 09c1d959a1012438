"""Datasets of a worker that is alone in its job: counted, and otherwise unchanged.

No other layout of the replicas follows, so the iterators are those of any other job.
Only what continues a preempted pass reads up to its place first.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras import BatchIterator, CountedData, RepeatableIterator
from kerasdist._tf.graph.dataset_pipelines import iterator_dataset
from kerasdist.strategies.data.batch_check import CHECKSUM, checksum_of_batch
from kerasdist.strategies.data.batch_split import slice_rows, split_part
from kerasdist.strategies.elastic_data.datasets import DatasetPass

# Of data that several workers would divide, and of data that are each worker's own.
SHARED_PASS = DatasetPass.__name__
OWN_PASS = "OwnPass"


class CountedDataset(CountedData):
    """The iterable over this worker's data; each iteration is a pass.

    Args:
        dataset: A dataset, or one that is distributed among this worker's replicas.
        kind: See `RepeatableIterator.kind`.
    """

    def __init__(self, dataset: Any, kind: str) -> None:
        self.dataset = dataset
        self.kind = kind

    def __iter__(self) -> CountedPass:
        return CountedPass(self, self.next_pass())


class CountedPass(RepeatableIterator):
    """One pass over a dataset.

    Args:
        data: The iterable.
        number: See `RepeatableIterator.number`.
    """

    def __init__(self, data: CountedDataset, number: int) -> None:
        self._data = data
        self._number = number
        self._taken = 0
        self._inner = iter(data.dataset)

    @property
    def kind(self) -> str:
        """See `RepeatableIterator.kind`."""
        return self._data.kind

    @property
    def inner(self) -> Any:
        """See `RepeatableIterator.inner`."""
        return self._inner

    @property
    def number(self) -> int:
        """See `RepeatableIterator.number`."""
        return self._number

    @property
    def taken(self) -> int:
        """See `RepeatableIterator.taken`."""
        return self._taken

    def commit(self) -> None:
        """See `RepeatableIterator.commit`."""
        self._taken += 1

    def renew(self) -> None:
        """See `RepeatableIterator.renew`: no step is repeated."""

    def skip(self, batches: int) -> None:
        """See `RepeatableIterator.skip`: they are read."""
        while self._taken < batches and next(self._inner, None) is not None:
            self._taken += 1

    def next_checksum(self) -> int:
        """See `RepeatableIterator.next_checksum`."""
        first = next(self._inner, None)
        if first is None:
            return 0
        rest = self._inner
        if isinstance(self._data.dataset, tf.data.Dataset):
            # In a graph several steps may be one execution.
            following = iterator_dataset(rest, self._data.dataset)
            whole = tf.data.Dataset.from_tensors(first).concatenate(following)
            options = tf.data.Options()
            options.experimental_optimization.apply_default_optimizations = False
            options.autotune.enabled = False
            self._inner = iter(whole.with_options(options))
        else:
            self._inner = _WithFirst(first, rest)
        return checksum_of_batch(_global_batch(first))


class _WithFirst(BatchIterator):
    """An iterator of which a batch was read.

    Args:
        first: The batch.
        rest: The iterator.
    """

    def __init__(self, first: Any, rest: Any) -> None:
        self._waiting = [first]
        self._rest = rest
        self.element_spec = rest.element_spec

    def __next__(self) -> Any:
        return self._waiting.pop() if self._waiting else next(self._rest)

    def at_least_one(self) -> BatchIterator:
        """See `BatchIterator.at_least_one`."""
        if not self._waiting:
            self._waiting.append(next(self._rest))
        return self


def _global_batch(element: Any) -> Any:
    """Return the batch of which the replicas have parts."""
    if isinstance(element, dict) and CHECKSUM in element:
        element = element["batch"]
    local = [_tf.local_results(each) for each in tf.nest.flatten(element)]
    parts = []
    for index in range(max(map(len, local))):
        # What isn't a tensor is the same on all replicas.
        flat = [each[index if len(each) > 1 else 0] for each in local]
        part = tf.nest.pack_sequence_as(element, flat)
        batch, rows, _ = split_part(part)
        parts.append(batch if rows is None else slice_rows(batch, 0, rows))
    return parts[0] if len(parts) == 1 else tf.nest.map_structure(_joined, *parts)


def _joined(*parts: Any) -> Any:
    first = parts[0]
    if isinstance(first, tf.SparseTensor):
        return tf.sparse.concat(0, parts)
    if isinstance(first, tf.RaggedTensor) or (first is not None and first.shape.rank):
        return tf.concat(parts, 0)
    return first
