"""The base of the data-parallel strategies: one job of several workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from kerasdist import _keras, _tf
from kerasdist._tf import patches
from kerasdist.cluster import Cluster
from kerasdist.collectives import Communicator
from kerasdist.strategies.cluster_resolver import resolver_of
from kerasdist.strategies.job import StrategyJob, close_at_exit, forget
from kerasdist.strategies.options import Options
from kerasdist.strategies.sync.extended import SynchronousExtended

__all__ = ["DataParallelStrategy"]

_Self = TypeVar("_Self", bound="DataParallelStrategy")


class DataParallelStrategy(tf.distribute.Strategy):
    """A strategy whose workers train copies of one model on parts of the data.

    Subclasses connect the workers, and call this constructor with the result. It owns
    the job from then on, even if it raises.

    Args:
        place: This task's place in the cluster, by the settings.
        devices: Canonical names of this worker's devices, one replica each.
        job: The connected workers.
        options: The strategy's options.
        extended: The class of the strategy's extended object.
    """

    # TensorFlow's MirroredExtended reads it from its strategy.
    _collective_key_base = 0

    def __init__(
        self,
        place: Cluster,
        devices: Sequence[str],
        job: StrategyJob,
        options: Options,
        extended: Callable[..., Any] = SynchronousExtended,
    ) -> None:
        self._job = job
        self._place = place
        try:
            super().__init__(extended(self, devices, job, options))
            _keras.install()
            patches.install("core")
            _keras.begin_use(self.extended.kerasdist.hooks)
            if job.communicator.size > 1:
                _tf.set_global_seed_if_none(self.extended.common_seed)
        except BaseException as error:
            job.close(error)
            raise
        # Without a reference to the strategy, so that it can be collected.
        self._finalizer = weakref.finalize(self, job.close)
        self._finalizer.atexit = False
        close_at_exit(job)

    @property
    def rank(self) -> int:
        """This worker's index, 0..size-1; the chief is 0."""
        return self._job.communicator.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.extended.workers_in_sync

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the chief, which writes files for all."""
        return self.rank == 0

    @property
    def cluster_resolver(self) -> Any:
        """The tasks of the job: `task_type`, `task_id`, `cluster_spec()`.

        A `tf.distribute.cluster_resolver.ClusterResolver`, from which scripts written
        for `MultiWorkerMirroredStrategy` read their role.
        """
        # By the rank at the start, if it's known: a task stays the same.
        rank = self.rank if self._place.rank is None else self._place.rank
        return resolver_of(self._place, rank, self.size)

    @property
    def communicator(self) -> Communicator:
        """The communicator of the workers, for numpy arrays."""
        return self._job.communicator

    def close(self) -> None:
        """Leave the job: release sockets, threads and memory. Can be called twice.

        The model keeps its weights and can be used without the strategy. Workers
        that still wait for this one get `WorkerLost`.
        """
        _keras.end_use(self.extended.kerasdist.hooks)
        self._finalizer()
        forget(self._job)

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        # Keras copies models' attributes, but there must be only one strategy.
        del memo
        return self
