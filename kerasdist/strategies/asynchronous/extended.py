"""The `tf.distribute` extended object of asynchronous workers.

It has two views of the same workers:

    local       in a step: this worker's replicas only. A step consumes a whole batch,
                reduces over local replicas, and ends with an exchange of the weights
                (`strategies.asynchronous.weights`)
    collective  in `evaluate` and `predict`, and everywhere outside of a step: all live
                workers, synchronously, as with the synchronous strategies

    `strategy.run` is a step, and so is a graph that isn't an evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from kerasdist import _tf
from kerasdist.ps import ServerClient
from kerasdist.strategies.asynchronous.dynamic_batches import DynamicLoop
from kerasdist.strategies.asynchronous.hooks import AsyncHooks
from kerasdist.strategies.asynchronous.live_group import LiveJob
from kerasdist.strategies.asynchronous.weights import SharedTables
from kerasdist.strategies.sync.extended import SynchronousExtended

__all__ = ["AsyncExtended"]


class AsyncExtended(SynchronousExtended):
    """Replicas of this worker, which shares weights with all other workers.

    Args:
        container: The strategy.
        devices: Canonical names of this worker's devices, one per replica.
        job: This worker's connection to the servers.
        options: See `SynchronousExtended`.
    """

    job: LiveJob
    keras_hooks: AsyncHooks
    _evaluating = 0
    _stepping = 0

    def __init__(
        self, container: Any, devices: Sequence[str], job: ServerClient, **options: Any
    ) -> None:
        super().__init__(container, devices, LiveJob(job), **options)
        self.shared = SharedTables(self)
        self.keras_hooks = AsyncHooks(self)

    def common_seed(self) -> int:
        """See `SynchronousExtended.common_seed`; server 0 keeps it for joiners."""
        client = self.job.client
        if not client.joining:
            # A worker whose script sets a seed itself isn't here: the others notice.
            client.communicator.barrier()
        return client.seed

    @property
    def is_apart(self) -> bool:
        """Whether the code that is run or traced now is this worker's own step."""
        if self._evaluating:
            return False
        return self._stepping > 0 or not _tf.executing_eagerly()

    @contextlib.contextmanager
    def local_step(self) -> Iterator[None]:
        """Treat the block as this worker's own step."""
        self._stepping += 1
        try:
            yield
        finally:
            self._stepping -= 1

    @contextlib.contextmanager
    def collective_scope(self) -> Iterator[None]:
        """Run the block on all workers, synchronously."""
        self._evaluating += 1
        try:
            yield
        finally:
            self._evaluating -= 1

    @property
    def places(self) -> tuple[int, int, int]:
        """See `SynchronousExtended.places`; apart, of this worker alone."""
        local = len(self._devices)
        return (0, local, local) if self.is_apart else super().places

    @property
    def workers(self) -> int:
        """The number of workers that reduce and gather together."""
        return 1 if self.is_apart else super().workers

    @property
    def first_replica(self) -> int:
        """The number of this worker's first replica over all workers of the job."""
        client = self.job.client
        return sum(client.replicas[: client.rank])

    @property
    def should_checkpoint(self) -> bool:
        """Whether this worker writes checkpoints: only the chief does."""
        return self.job.client.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this worker writes summaries: only the chief does."""
        return self.job.client.rank == 0

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        if self._evaluating:
            return super()._call_for_each_replica(fn, args, kwargs)
        with self.local_step():
            return super()._call_for_each_replica(fn, args, kwargs)

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        if self._evaluating:
            return super()._experimental_distribute_dataset(dataset, options)
        return DynamicLoop(self.keras_hooks.deal_dataset(dataset, None), dataset)
