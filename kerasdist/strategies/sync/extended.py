"""The `tf.distribute` extended object of the data-parallel strategies.

TensorFlow's `MirroredExtended` keeps one copy of each variable per local replica
and runs the replicas. This class adds the other workers: reductions and gathers over
the local replicas are continued over the workers.

`_use_merge_call` is False: updates run directly in the replica, so that they can be
inside `tf.cond` (gradient accumulation, loss scaling). Only a reduction over several
local replicas synchronizes them with a merge call.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from kerasdist import _keras, _tf
from kerasdist._keras.context import current
from kerasdist._keras.protocols import GradientHooks, KerasHooks, StateHooks
from kerasdist._keras.tracebacks import OnceLogger
from kerasdist._keras.unscoped_models import in_use
from kerasdist._tf import patches
from kerasdist._tf.variables import COMPILED, StrategyExtensions, distribute_copies
from kerasdist.cluster import Cluster
from kerasdist.collectives import Communicator
from kerasdist.errors import CollectiveMismatch
from kerasdist.strategies.cluster_resolver import (
    BlockStrategy,
    local_ranks,
    resolver_of,
)
from kerasdist.strategies.measure.step_clock import StepClock
from kerasdist.strategies.options import Options, StrategyJob, close_at_exit, forget
from kerasdist.strategies.reduce.compressed import check_optimizer, load_kept, save_kept
from kerasdist.strategies.reduce.consensus import Consensus, check_state
from kerasdist.strategies.reduce.gradients import (
    GradientNormMeter,
    end_window,
    reduce_gradients,
)
from kerasdist.strategies.reduce.graph_ops import CollectiveOps, make_ops
from kerasdist.strategies.reduce.initial_state import give_state, share_state
from kerasdist.strategies.reduce.workers import (
    Workers,
    finish,
    local_sum,
    over_workers,
    reduce_in_replicas,
    sum_over_replicas,
)
from kerasdist.strategies.sync.data import SharingExtended, SynchronousData
from kerasdist.transport.deadline import daemon


class SynchronousExtended(SharingExtended):
    """Replicas of this worker, synchronous with those of all other workers.

    Args:
        container: The strategy.
        devices: Canonical names of this worker's devices, one per replica.
        job: The connected workers.
        options: The strategy's options.
        make_ops: Makes the workers' collectives on tensors.

    Attributes:
        data: The division of the data that models are given.
    """

    # The classes of `workers` and of `data`.
    workers_class: type[Workers] = Workers
    data_class: type[SynchronousData] = SynchronousData
    # Whether a step updates by the mean gradient of all replicas.
    updates_by_mean = True

    def __init__(
        self,
        container: Any,
        devices: Sequence[str],
        job: StrategyJob,
        options: Options,
        make_ops: Callable[..., CollectiveOps] = make_ops,
    ) -> None:
        ops = make_ops(job, devices)
        super().__init__(container, self.workers_class(job, devices, ops, options))
        workers = self.workers
        # The initial value of the variable that is being created, in a function.
        self._initial_value: Any = None
        # With servers, waiting is first of all for the servers.
        timer = StepClock(
            workers.devices,
            workers.communicator,
            in_turn=not workers.job.has_servers,
            rank=lambda: workers.rank,
        )
        self.kerasdist = StrategyExtensions(
            hooks=self._make_hooks(options, timer),
            timer=timer,
            in_lockstep=lambda: current.reduced,
        )

    def _make_hooks(self, options: Options, timer: StepClock) -> KerasHooks:
        workers = self.workers
        log_once = OnceLogger(lambda: workers.rank)
        broadcast = options.initial_state == "broadcast"
        has_memory = getattr(options.compression, "has_memory", False)
        self.data = self.data_class(self, timer, options, log_once)
        reduce = partial(reduce_gradients, workers, log_once)
        norms = None
        if self.updates_by_mean and not has_memory:
            norms = GradientNormMeter(workers, timer, workers.host, reduce)
        return KerasHooks(
            workers=workers,
            timer=timer,
            log_once=log_once,
            consensus=Consensus(workers),
            state=StateHooks(
                adopt=self.adopt,
                check=partial(
                    check_state, workers, log_once=log_once, broadcast=broadcast
                ),
                share=partial(share_state, workers),
                give=partial(give_state, workers),
                # `ops` is another object while this worker acts alone.
                sum_over_workers=lambda tensors: workers.ops.all_reduce(tensors),
            ),
            gradients=GradientHooks(
                reduce=reduce if norms is None else norms.reduce,
                end_window=partial(end_window, workers),
                sum_over_replicas=partial(sum_over_replicas, workers),
                memories=workers.memories,
                check=partial(check_optimizer, options.compression),
                save=partial(save_kept, workers) if has_memory else None,
                load=partial(load_kept, workers) if has_memory else None,
                words=self._gradients_in_words(options),
            ),
            data=self.data,
            local=self._make_local(),
            norms=norms,
            tune=self._make_tuner(options, log_once),
        )

    def _gradients_in_words(self, options: Options) -> str:
        """Return how gradients are summed, for the start-up line; empty: whole."""
        given = options.compression
        return "" if given is None else f"gradients sent by {given!r}"

    def _make_tuner(self, options: Options, log_once: OnceLogger) -> Any:
        """Return the tuner of steps; None: nothing is tuned."""
        if not options.tune or self.workers.size == 1:
            return None
        # Other jobs save the time of this import.
        from kerasdist.strategies.tuning import Tuner

        return Tuner(self.workers, log_once, options.compressors)

    def _make_local(self) -> Any:
        """Return the hooks of local steps; None: gradients are reduced."""
        return None

    @property
    def workers_in_sync(self) -> int:
        """The number of workers that the script sees."""
        return self.workers.communicator.size

    def common_seed(self) -> int:
        """Return a random seed that all workers agree on."""
        return Consensus(self.workers).common_seed()

    @property
    def should_checkpoint(self) -> bool:
        """Whether this worker writes checkpoints: only the chief does."""
        return self.workers.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this worker writes summaries: only the chief does."""
        return self.workers.rank == 0

    def _use_merge_call(self) -> bool:
        return False

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        first = self.workers.layout.first
        with _tf.own_seed(self.workers.current_replica()):
            if len(self._devices) > 1:
                return super()._call_for_each_replica(fn, args, kwargs)
            return _tf.call_replica(
                self._container_strategy(), first, fn, args, kwargs, self._devices[0]
            )

    # Values.

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Any:
        """Create a variable with the chief's value, whatever the workers' seeds."""
        value = super()._get_variable_creator_initial_value(
            replica_id, device, primary_var, **kwargs
        )
        if replica_id > 0:
            # TensorFlow reads the first copy, which has no value yet in a function
            # that creates it.
            known = self._initial_value
            return value if known is None else lambda: _tf.as_operation(known)
        self._initial_value = None

        alone = self.workers.communicator.size == 1
        if alone and (len(self._devices) == 1 or tf.executing_eagerly()):
            return value

        def from_chief() -> Any:
            mine = _tf.initial_tensor(value, kwargs.get("dtype"))
            if alone:
                return mine
            try:
                return self.first_value(mine)
            except CollectiveMismatch as error:
                raise CollectiveMismatch(
                    f"{error} Here the variable {kwargs.get('name')!r} of shape "
                    f"{tuple(mine.shape)} was being created. If a tuner or random "
                    "numbers choose a model's sizes, give them the same seed on all "
                    "ranks."
                ) from error

        def now() -> Any:
            # In a function that creates variables: otherwise initial values couldn't be
            # lifted out of its graph, and its first step would run before they exist.
            inside = (AttributeError, NotImplementedError, TypeError, ValueError)
            found = None
            with contextlib.suppress(*inside), tf.init_scope():
                if tf.executing_eagerly():
                    found = from_chief()
            if found is not None:
                self._initial_value = found
                return _tf.as_operation(found)
            return from_chief()  # it's computed from tensors inside of the function

        return from_chief if tf.executing_eagerly() else now

    def first_value(self, value: Any) -> Any:
        """Return the value that a new variable begins with on all workers."""
        return self.workers.ops.broadcast(value)

    def adopt(self, keras_variable: Any, variable: Any) -> Any:
        """Wrap a variable of this process in a distributed one; return that.

        All workers call it alike; the chief's value counts, also for variables that are
        summed over the replicas.

        Args:
            keras_variable: Determines how replicas' writes are combined.
            variable: TensorFlow's variable, which becomes the first replica's copy if
                it's on that device.
        """
        added = (
            variable.synchronization == tf.VariableSynchronization.ON_READ
            and variable.aggregation == tf.VariableAggregation.SUM
        )
        copies: list[Any] = []
        with tf.init_scope():
            value = variable.read_value()
            if self.workers.communicator.size > 1:
                value = self.workers.ops.broadcast(value)
            for index, device in enumerate(self._devices):
                own = value
                if added and self.workers.layout.first + index > 0:
                    own = tf.zeros_like(value)
                if variable.device == device and not copies:
                    variable.assign(own)
                    copies.append(variable)
                else:
                    copies.append(
                        _tf.own_variable(
                            own, value.dtype, device, trainable=variable.trainable
                        )
                    )
            return distribute_copies(self._container_strategy(), copies, keras_variable)

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        layout = self.workers.layout
        made = [
            value_fn(
                tf.distribute.experimental.ValueContext(
                    layout.first + index, layout.total
                )
            )
            for index in range(len(self._devices))
        ]
        return _tf.regroup(made)

    # Reductions, in cross-replica context.

    def _reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: Any
    ) -> Any:
        del options
        if _tf.is_mirrored(value) and reduce_op == _tf.ReduceOp.MEAN:
            return value
        workers = self.workers

        def reduce(leaf: Any) -> Any:
            if not isinstance(leaf, _tf.DistributedValues) and (
                len(self._devices) > 1 or workers.size == 1
            ):
                return _tf.reduce_undistributed(
                    reduce_op, leaf, destinations, workers.replicas
                )
            return self._batch_reduce_to(reduce_op, [(leaf, destinations)], None)[0]

        return tf.nest.map_structure(reduce, value)

    def _batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> Any:
        del options
        workers = self.workers
        local = [workers.local(value) for value, _ in value_destination_pairs]
        sums = [local_sum(workers, values) for values in local]
        return [
            _tf.broadcast_to_devices(
                finish(workers, reduce_op, total), _tf.devices_of(destinations)
            )
            for total, (_, destinations) in zip(
                over_workers(workers, sums), value_destination_pairs, strict=True
            )
        ]

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        del options
        local = self._container_strategy().experimental_local_results(value)
        with tf.device(self.workers.host):
            tensor = tf.concat([tf.convert_to_tensor(v) for v in local], axis)
        if self.workers.size > 1:
            tensor = self.workers.ops.all_gather(tensor, axis)
        return _tf.broadcast_to_devices(tensor, _tf.devices_of(destinations))

    def _batch_gather_to(
        self, value_destination_pairs: Any, axis: int, options: Any = None
    ) -> Any:
        """Gather in a merge call, because replicas may have the same tensor."""
        pairs = [
            (_tf.regroup(self.workers.local(v)), to)
            for v, to in value_destination_pairs
        ]
        return super()._batch_gather_to(pairs, axis, options)

    # Reductions, in replica context.

    def _replica_ctx_all_reduce(
        self, reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
        del options
        flat = tf.nest.flatten(value)
        reduced = reduce_in_replicas(self.workers, reduce_op, flat)
        return tf.nest.pack_sequence_as(value, reduced)


# The base of the data-parallel strategies: one job of several workers.


def _leave_in_thread(leave: Callable[[BaseException | None], None]) -> None:
    """Leave the job of a strategy that is collected as garbage.

    Any thread collects garbage, at any allocation: also the one that watches the job,
    while it holds a lock that the end of the job needs.
    """
    with contextlib.suppress(RuntimeError):  # the interpreter ends: the job has ended
        daemon("kerasdist-leave", leave, None).start()


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
            in_use.add(self.extended.kerasdist.hooks)
            if job.communicator.size > 1:
                _tf.set_global_seed_if_none(self.extended.common_seed)
        except BaseException as error:
            job.close(error)
            raise
        # Without a reference to the strategy, so that it can be collected.
        self._leave_job = leave or job.close
        self._shares_job = leave is not None
        self._finalizer = weakref.finalize(self, _leave_in_thread, self._leave_job)
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
        if not COMPILED.get(fn) or tf.executing_eagerly():
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
        in_use.discard(self.extended.kerasdist.hooks)
        if self._finalizer.detach() is not None:
            self._leave_job(error)
        if error is not None or not self._shares_job:
            forget(self._job)
