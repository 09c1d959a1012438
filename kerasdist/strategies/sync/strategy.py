"""The base of the data-parallel strategies: one job of several workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kerasdist import _keras, _tf
from kerasdist._tf import patches
from kerasdist._tf.marks import COMPILED
from kerasdist.cluster import Cluster
from kerasdist.collectives import Communicator
from kerasdist.strategies.cluster_resolver import (
    BlockStrategy,
    local_ranks,
    resolver_of,
)
from kerasdist.strategies.options import Options, StrategyJob, close_at_exit, forget
from kerasdist.strategies.sync.extended import SynchronousExtended

_Self = TypeVar("_Self", bound="DataParallelStrategy")


class DataParallelStrategy(BlockStrategy):
    """A strategy whose workers train copies of one model on parts of the data.

    Subclasses connect the workers, and call this constructor with the result. It owns
    the job from then on, even if it raises.

    Args:
        place: This task's place in the cluster, by the settings.
        devices: Canonical names of this worker's devices, one replica each.
        job: The connected workers.
        options: The strategy's options.
        extended: The class of the strategy's extended object.
        leave: Ends this strategy's use of a job that others of this process may use,
            too; it's given the error that ended it, or None. By default the strategy
            closes its job.
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
        leave: Callable[[BaseException | None], None] | None = None,
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
        self._leave_job = leave or job.close
        self._shares_job = leave is not None
        self._finalizer = weakref.finalize(self, self._leave_job, None)
        self._finalizer.atexit = False
        close_at_exit(job)

    @_tf.not_converted
    def run(
        self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Run a function in this worker's replicas; see `tf.distribute.Strategy.run`.

        Args:
            fn: The function.
            args: Its arguments; a replica gets its part of those that are per replica.
            kwargs: Its keyword arguments, likewise.
            options: Those of `tf.distribute.RunOptions`, or None.

        Returns:
            The function's results, merged over this worker's replicas.
        """
        run = super().run
        if not COMPILED.get(fn) or _tf.executing_eagerly():
            return run(fn, args, kwargs, options)
        devices = self.extended.workers.devices
        return _tf.compiled_in_parts(lambda: run(fn, args, kwargs, options), devices)

    @property
    def rank(self) -> int:
        """This worker's index, 0..size-1; the chief is 0.

        Servers have none. In an elastic job it changes when workers are lost.
        """
        return self._job.communicator.rank

    @property
    def size(self) -> int:
        """The number of workers, without servers.

        In an elastic job that of the present ones, which changes with them. A worker
        has one replica on each of its devices: `num_replicas_in_sync` is the number of
        all replicas.
        """
        return self.extended.workers_in_sync

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the chief, which writes files for all."""
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        """This worker's index among those on its host, 0..local_size-1.

        In the order of ranks. Known from the workers' addresses in the cluster; servers
        and other jobs don't count. In an elastic job it changes with the present
        workers, to which one that is to join doesn't belong yet: it's alone.
        """
        local = self._local_ranks()
        return local.index(self.rank) if len(local) > 1 else 0

    @property
    def local_size(self) -> int:
        """The number of this job's workers on this worker's host, see `local_rank`."""
        return len(self._local_ranks())

    def _local_ranks(self) -> list[int]:
        communicator = self._job.communicator
        addresses = [peer.address for peer in communicator.peers]
        rank = communicator.rank
        # A worker that is to join has a rank for the script, but no peers yet.
        return local_ranks(addresses, rank) if rank < len(addresses) else [rank]

    @property
    def cluster_resolver(self) -> Any:
        """The tasks of the job: `task_type`, `task_id`, `cluster_spec()`.

        A `tf.distribute.cluster_resolver.ClusterResolver`, from which scripts written
        for `MultiWorkerMirroredStrategy` read their role. In an elastic job it has the
        tasks of the start, while `is_chief` follows the present workers.
        """
        # By the rank at the start, unless only MPI knows it: a task stays the same.
        known = self._place.rank is not None and self._place.size > 1
        rank = (self._place.rank or 0) if known else self.rank
        return resolver_of(self._place, rank, self.size)

    @property
    def communicator(self) -> Communicator:
        """The communicator of the workers, for numpy arrays."""
        return self._job.communicator

    def close(self) -> None:
        """Leave the job: release sockets, threads and memory. Can be called twice.

        The model keeps its weights and can be used without the strategy. Workers
        that still wait for this one get `WorkerLost`. The end of a `with` block of the
        strategy calls it, too; after an exception in the block the others get the
        exception's text, as at the end of a script that raises. The block isn't the
        scope, in which models are created:

            with kerasdist.RingStrategy() as strategy:
                with strategy.scope():
                    model = build_model()
                    model.compile("adam", "mse")
                model.fit(x, y, batch_size=256)
        """
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        _keras.end_use(self.extended.kerasdist.hooks)
        if self._finalizer.detach() is not None:
            self._leave_job(error)
        if error is not None or not self._shares_job:
            forget(self._job)

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        # Keras copies models' attributes, but there must be only one strategy.
        del memo
        return self
