"""The `tf.distribute` extended object of asynchronous workers.

It has two views of the same workers, see `strategies.asynchronous.workers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kerasdist._keras import KerasHooks
from kerasdist.ps import ServerClient
from kerasdist.strategies.asynchronous.data import DynamicData
from kerasdist.strategies.asynchronous.epochs import AsyncEpochs
from kerasdist.strategies.asynchronous.live_group import LiveJob
from kerasdist.strategies.asynchronous.loop import DynamicLoop
from kerasdist.strategies.asynchronous.tables import SharedTables
from kerasdist.strategies.asynchronous.workers import AsyncWorkers
from kerasdist.strategies.measure.step_clock import StepClock
from kerasdist.strategies.options import Options
from kerasdist.strategies.sync.extended import SynchronousExtended


class AsyncExtended(SynchronousExtended):
    """Replicas of this worker, which shares weights with all other workers.

    Args:
        container: The strategy.
        devices: Canonical names of this worker's devices, one per replica.
        job: This worker's connection to the servers.
        options: What the strategy was asked for.

    Attributes:
        shared: The weights that all workers train.
        dynamic_data: The batches that they train on.
    """

    workers_class = AsyncWorkers
    workers: AsyncWorkers
    shared: SharedTables

    def __init__(
        self,
        container: Any,
        devices: Sequence[str],
        job: ServerClient,
        options: Options,
    ) -> None:
        super().__init__(container, devices, LiveJob(job), options)

    def _make_hooks(self, options: Options, timer: StepClock) -> KerasHooks:
        hooks = super()._make_hooks(options, timer)
        workers, self.shared = self.workers, SharedTables(self.workers)
        self.dynamic_data = DynamicData(workers, self.shared, timer, self.data)
        epochs = AsyncEpochs(workers, self.shared, self.dynamic_data)
        return dataclasses.replace(hooks, dynamic=epochs)

    def common_seed(self) -> int:
        """See `SynchronousExtended.common_seed`; server 0 keeps it for joiners."""
        client = self.workers.client
        if not client.joining:
            # A worker whose script sets a seed itself isn't here: the others notice.
            client.communicator.barrier()
        return client.seed

    def first_value(self, value: Any) -> Any:
        """See `SynchronousExtended.first_value`; a step waits for no other worker."""
        workers = self.workers
        numeric = (
            value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool
        )
        if not workers.is_local or not numeric:
            return super().first_value(value)
        if workers.client.joining:
            return value

        def first(mine: Any) -> list[Any]:
            return [workers.client.first_value(mine)]

        return workers.ops.call(first, [value], [value.dtype], [value.shape])[0]

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        if self.workers.is_evaluating:
            return super()._call_for_each_replica(fn, args, kwargs)
        with self.workers.local_step():
            return super()._call_for_each_replica(fn, args, kwargs)

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        if self.workers.is_evaluating:
            return super()._experimental_distribute_dataset(dataset, options)
        return self._loop(dataset)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        made = super()._distribute_datasets_from_function(dataset_fn, options)
        return made if self.workers.is_evaluating else self._loop(made)

    def _loop(self, dataset: Any) -> DynamicLoop:
        return DynamicLoop(self.dynamic_data.distribute_dataset(dataset, None), dataset)
