"""Datasets in `tf.distribute`: this worker's parts of global batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist._tf.marks import OWN_DATA, WHOLE_DATA
from kerasdist.strategies.data.auto_shard import is_by_file, own_part
from kerasdist.strategies.data.batch_split import slice_dataset
from kerasdist.strategies.reduce.workers import Workers


class SharingExtended(_tf.MirroredExtended):
    """TensorFlow's strategy of local replicas, which share data with other workers.

    Args:
        container: The strategy.
        workers: The connected workers, and this worker's replicas.

    Attributes:
        workers: See above.
    """

    def __init__(self, container: Any, workers: Workers) -> None:
        super().__init__(container, devices=list(workers.devices))
        self.workers = workers

    # How many, and which.

    @property
    def _num_replicas_in_sync(self) -> int:
        return self.workers.replicas

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self.workers.layout.first + int(replica_id)

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return int(replica_id_in_sync_group) - self.workers.layout.first

    # Data: the elements of a dataset are global batches.

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        own = self.distribute_own(dataset, options)
        if own is not None:
            return own
        part = dataset
        if not self.workers.is_alone:
            part = slice_dataset(dataset, *self.workers.layout)
        made = self._from_function(lambda _: part, options)
        WHOLE_DATA.set(made, dataset)
        return made

    def distribute_parts(self, dataset: Any, *, complete: bool = True) -> Any:
        """Distribute a dataset of parts: one element per local replica in turn.

        Replicas in host memory need little. TensorFlow's distributed iterator would
        cost one of them more than its own time: it makes a GeneratorDataset, which
        sets glibc's M_TRIM_THRESHOLD, and malloc then returns the pages of each step to
        the system and faults them in again.

        Args:
            dataset: The dataset.
            complete: Whether its last element is for the last replica.
        """
        devices = self.worker_devices
        if devices == (self.workers.host,):
            return dataset
        kinds = {tf.DeviceSpec.from_string(device).device_type for device in devices}
        if complete and kinds == {"CPU"}:
            return _tf.PartsDataset(dataset, devices, self.workers.host)
        return self._from_function(lambda _: dataset, None)

    def distribute_own(self, dataset: Any, options: Any = None) -> Any | None:
        """Distribute this worker's part of a dataset whose policy is FILE or OFF.

        Returns None with another policy, or if there's no other worker.
        """
        own = (
            None
            if self.workers.communicator.size == 1
            else own_part(self.workers, dataset)
        )
        if own is None:
            return None
        made = self._from_function(lambda _: own, options)
        OWN_DATA.set(made, is_by_file(dataset))
        return made

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        made = self._from_function(dataset_fn, options)
        # A function's dataset is the worker's own, see `data.per_worker`.
        OWN_DATA.set(made, False)
        return made

    def _make_dataset_iterator(self, dataset: Any) -> Any:
        part = slice_dataset(dataset, *self.workers.layout)
        return self._make_input_fn_iterator(lambda _: part)

    def _make_input_fn_iterator(
        self, input_fn: Any, replication_mode: Any = None
    ) -> Any:
        del replication_mode  # there's one function per worker in any case
        return _tf.input_fn_iterator(
            input_fn,
            self._input_workers,
            self._input_place(),
            self._container_strategy(),
        )

    def _input_place(self) -> Any:
        communicator = self.workers.communicator
        return _tf.input_context(
            communicator.size, communicator.rank, self.workers.replicas
        )

    def _from_function(self, dataset_fn: Callable[[Any], Any], options: Any) -> Any:
        return _tf.distribute_from_function(
            dataset_fn,
            self._input_workers_with_options(options),
            self._input_place(),
            self._container_strategy(),
            options,
        )
