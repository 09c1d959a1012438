"""Dynamic batches of the data that asynchronous workers train on."""

from __future__ import annotations

from typing import Any

from kerasdist._keras import ArrayData, ItemData, StepTimer
from kerasdist._tf.marks import OWN_DATA
from kerasdist.placement.advice import counted
from kerasdist.strategies.asynchronous.dynamic_batches import (
    ArraySource,
    DatasetSource,
    DynamicDataset,
    ItemSource,
    OwnSource,
    Source,
)
from kerasdist.strategies.asynchronous.live_group import AsyncWorkers
from kerasdist.strategies.asynchronous.tables import SharedTables
from kerasdist.strategies.data.auto_shard import own_part
from kerasdist.strategies.data.pydataset_exchange import SharedItems
from kerasdist.strategies.reduce.workers import ReplicaLayout
from kerasdist.strategies.sync.data import SynchronousData, static_batch_size


class DynamicData:
    """Makes dynamic batches; see `_keras.protocols.DynamicDataHooks`.

    Args:
        workers: The workers that the batches are for.
        weights: The weights that they train.
        timer: Measures steps, and the time of waiting.
        data: The division of data that aren't trained on.

    Attributes:
        present: The dataset that the current epoch takes its batches from.
        newest: The dataset that was made last.
        datasets: The number of datasets that were made.
    """

    def __init__(
        self,
        workers: AsyncWorkers,
        weights: SharedTables,
        timer: StepTimer,
        data: SynchronousData,
    ) -> None:
        self._workers = workers
        self._weights = weights
        self._timer = timer
        self._data = data
        self.present: DynamicDataset | None = None
        self.newest: DynamicDataset | None = None
        self.datasets = 0
        self._words = "no data"

    def distribute_arrays(self, data: ArrayData) -> DynamicDataset:
        """Return dynamic batches of arrays: see `DynamicDataset`."""
        return self._make(ArraySource(data, self._data.agree(data)), data.batch_size)

    def distribute_items(self, data: ItemData) -> DynamicDataset:
        """Return dynamic batches of a PyDataset."""
        items = SharedItems(self._workers, self._timer, data)
        items.agree()
        return self._make(ItemSource(data, self._data.seed()), items.rows or None)

    def distribute_dataset(self, dataset: Any, length: int | None) -> DynamicDataset:
        """Return dynamic batches of a `tf.data.Dataset`."""
        if OWN_DATA.get(dataset) is not None:
            return self._make(OwnSource(dataset, length), None)
        if length is None:
            known = int(dataset.cardinality())
            length = known if known >= 0 else None
        batch_size = static_batch_size(dataset)
        if not self._data.shards:
            return self._make(OwnSource(dataset, length), batch_size)
        own = own_part(self._workers, dataset, ReplicaLayout(0, 1, 1))
        if own is not None:
            return self._make(OwnSource(own, None), batch_size)
        return self._make(DatasetSource(dataset, length), batch_size)

    def _make(self, source: Source, batch_size: int | None) -> DynamicDataset:
        parts = [f"batches of {batch_size or 'unknown size'}"]
        if source.length is not None:
            parts.append(f"{source.length} in an epoch")
        if source.is_shared:
            parts.append("dealt out to whichever worker is free")
        else:
            parts.append("each worker's own")
        self._words = ", ".join(parts)
        self.datasets += 1
        client = self._workers.client
        client.datasets += 1
        self.newest = DynamicDataset(
            self._workers,
            self._weights,
            self._timer,
            source,
            client.datasets,
            self._begin,
        )
        return self.newest

    def _begin(self, dataset: DynamicDataset) -> None:
        self.present = dataset

    def describe(self) -> str:
        """Describe the workers and their data, for the start-up line."""
        job = self._workers.job
        workers = counted(len(job.replicas), "asynchronous worker")
        replicas = counted(sum(job.replicas), "replica")
        return f"{workers} with {replicas} in all, {self._words}"

    def end_batches(self) -> None:
        """End the epoch for all workers, because one of them wants to stop."""
        if self.present is not None:
            self.present.end_for_all()
