"""The division of Keras's data among workers that may be lost, or join."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kerasdist._keras import ArrayData, ItemData, StepTimer
from kerasdist._tf.marks import OWN_DATA, WHOLE_DATA
from kerasdist.strategies.data.auto_shard import has_own_policy, is_by_file
from kerasdist.strategies.data.messages import in_elastic_job
from kerasdist.strategies.elastic_data.arrays import ElasticArrays
from kerasdist.strategies.elastic_data.batch_check import ElasticBatches
from kerasdist.strategies.elastic_data.datasets import ElasticDataset
from kerasdist.strategies.elastic_data.per_worker import ElasticOwnData
from kerasdist.strategies.options import Options
from kerasdist.strategies.reduce.consensus import Consensus
from kerasdist.strategies.sync.data import SynchronousData, known_of
from kerasdist.strategies.sync.data_sharing import SharingExtended


class ElasticData(SynchronousData):
    """Iterables that go on, in the midst of an epoch, for other workers.

    They yield `_keras.RepeatableIterator`s, except for each worker's own data. All
    other data must be the same on all workers, also with data="auto": the chief's can't
    be used in their place, because the chief may be lost.

    Args: See `SynchronousData`.
    """

    array_epochs = ElasticArrays
    per_worker = ElasticOwnData
    makes_own_rows = False  # which are its own may change at any step

    def __init__(
        self,
        extended: SharingExtended,
        timer: StepTimer,
        options: Options,
        log_once: Callable[[str, str], None],
    ) -> None:
        options = dataclasses.replace(options, data="same")
        super().__init__(extended, timer, options, log_once)
        self._same = ElasticBatches(self._workers, in_elastic_job)

    def settle_batch(self, batch: Any) -> Any:
        """See `SynchronousData.settle_batch`."""
        with _explaining():
            return super().settle_batch(batch)

    def agree(self, data: ArrayData) -> int:
        """See `SynchronousData.agree`."""
        with _explaining():
            return super().agree(data)

    def distribute_items(self, data: ItemData) -> None:
        """Compare the items of all workers; each reads all of them, see `DataHooks`.

        Raises:
            ValueError: The workers were given different data.
        """
        orders = self.orders
        with _explaining():
            super().distribute_items(data)
        # The order is drawn next, also by a worker that is alone and compares nothing.
        self.orders = orders

    def distribute_dataset(
        self,
        dataset: Any,
        length: int | None,
        generator: Any = None,
        *,
        is_items: bool = False,
    ) -> tuple[Any, int | None]:
        """See `SynchronousData.distribute_dataset`."""
        # It is divided again when the workers change.
        whole = WHOLE_DATA.get(dataset)
        dataset = dataset if whole is None else whole
        made = isinstance(dataset, tf.distribute.DistributedDataset)
        if made or self._workers.communicator.size > 1:
            own, length = super().distribute_dataset(
                dataset, length, generator, is_items=is_items
            )
        elif not self.shards:
            own, length = self._divide_own(dataset, length)
        elif has_own_policy(dataset):
            # As when there are others, which may join.
            self._given = known_of(dataset, length)
            part = self._extended.distribute_parts(
                dataset.prefetch(tf.data.AUTOTUNE), complete=False
            )
            OWN_DATA.set(part, is_by_file(dataset))
            own, length = self._in_step(part, length)
        else:
            self._given = known_of(dataset, length)
            return self._divide(dataset), length
        if isinstance(own, ElasticOwnData):
            own.tell = self._log_once
            if self.shards and not made:
                own.divide = lambda: self._own_part(dataset)
        return own, length

    def _in_step(self, dataset: Any, length: int | None) -> tuple[Any, int | None]:
        """See `SynchronousData._in_step`; also of a worker that is alone."""
        if OWN_DATA.get(dataset) is None:
            return dataset, length
        own = self.per_worker(self._workers, self._timer, dataset)
        return own, Consensus(self._workers).longest(length)

    def _divide(self, dataset: Any) -> Any:
        return ElasticDataset(self._workers, dataset, self._same.wrap)

    def _own_part(self, dataset: Any) -> Any:
        """Return this worker's part of a dataset that is divided by file."""
        own = self._extended.distribute_own(dataset)
        if own is not None:
            return own
        return self._extended.distribute_parts(dataset, complete=False)


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
    """Raise errors about data that differ with the remedies of an elastic job."""
    try:
        yield
    except ValueError as error:
        raise in_elastic_job(error) from error.__cause__
