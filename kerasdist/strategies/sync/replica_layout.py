"""Which of a job's replicas are this worker's, and which data they get.

rank          0          1           the job
replicas      0  1       2  3        places: first, number here, number in all
rows          |...|...|  |...|...|   of each global batch, in this order
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kerasdist import _tf
from kerasdist.strategies.data.auto_shard import is_by_file, own_part
from kerasdist.strategies.data.batch_split import slice_dataset
from kerasdist.strategies.sync.job import StrategyJob

__all__ = ["SharingExtended"]


class SharingExtended(_tf.MirroredExtended):
    """TensorFlow's strategy of local replicas, which share data with other workers.

    Args:
        container: The strategy.
        devices: Canonical names of this worker's devices, one per replica.
        job: The connected workers.
        shards: Whether Keras's data are the same on all workers, each to take its
            part, or each worker's own.

    Attributes:
        job: The connected workers.
        shards: See above.
        excluding: Whether this worker acts without the others.
    """

    def __init__(
        self, container: Any, devices: Sequence[str], job: StrategyJob, *, shards: bool
    ) -> None:
        super().__init__(container, devices=list(devices))
        self.job = job
        self.shards = shards
        self.excluding = False
        self._host = _tf.host_of(devices[0])

    # How many, and which.

    @property
    def _num_replicas_in_sync(self) -> int:
        return self.places[2]

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self.places[0] + int(replica_id)

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return int(replica_id_in_sync_group) - self.places[0]

    @property
    def places(self) -> tuple[int, int, int]:
        """This worker's first replica, number of its replicas, number of all."""
        if self.excluding:
            return 0, len(self._devices), len(self._devices)
        job = self.job
        first = sum(job.replicas[: job.communicator.rank])
        return first, len(self._devices), sum(job.replicas)

    @property
    def workers(self) -> int:
        """Number of workers that reduce and gather together."""
        return 1 if self.excluding else self.job.communicator.size

    @property
    def data_places(self) -> tuple[int, int, int]:
        """The same among those that share a global batch that Keras is given."""
        local = len(self._devices)
        return self.places if self.shards else (0, local, local)

    @property
    def is_alone(self) -> bool:
        """Whether there's only one replica in all."""
        return self.places[2] == 1

    @contextlib.contextmanager
    def without_peers(self) -> Iterator[None]:
        """What stands inside, this worker does without the others, who wait for it."""
        before, self.excluding = self.excluding, True
        try:
            yield
        finally:
            self.excluding = before

    # Data: the elements of a dataset are global batches.

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        if self.is_alone:
            return self._from_function(lambda _: dataset, options)
        own = self.distribute_own(dataset, options)
        if own is not None:
            return own
        part = slice_dataset(dataset, *self.places)
        return self._from_function(lambda _: part, options)

    def distribute_parts(self, dataset: Any) -> Any:
        """Distribute a dataset of parts: one element per local replica in turn.

        One replica in host memory needs no distribution. TensorFlow's distributed
        iterator would cost it more than the time that it takes: it makes a
        GeneratorDataset, which sets glibc's M_TRIM_THRESHOLD, and malloc then gives
        the pages of each step back to the system and faults them in again.
        """
        if self.worker_devices == (self._host,):
            return dataset
        return self._from_function(lambda _: dataset, None)

    def distribute_own(self, dataset: Any, options: Any = None) -> Any | None:
        """Distribute this worker's part of a dataset whose policy is FILE or OFF.

        None with another policy, or if there's no other worker.
        """
        own = None if self.job.communicator.size == 1 else own_part(self, dataset)
        if own is None:
            return None
        made = self._from_function(lambda _: own, options)
        made.kerasdist_own = True
        made.kerasdist_by_file = is_by_file(dataset)
        return made

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        made = self._from_function(dataset_fn, options)
        # What a function makes is the worker's own, see `own_data`.
        made.kerasdist_own = True
        return made

    def _make_dataset_iterator(self, dataset: Any) -> Any:
        part = slice_dataset(dataset, *self.places)
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
        communicator = self.job.communicator
        return _tf.input_context(communicator.size, communicator.rank, self.places[2])

    def _from_function(self, dataset_fn: Callable[[Any], Any], options: Any) -> Any:
        return _tf.distribute_from_function(
            dataset_fn,
            self._input_workers_with_options(options),
            self._input_place(),
            self._container_strategy(),
            options,
        )
