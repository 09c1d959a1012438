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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from kerasdist import _keras, _tf
from kerasdist._keras import GradientHooks, KerasHooks, OnceLogger, StateHooks
from kerasdist._tf.marks import StrategyExtensions
from kerasdist._tf.variables import distribute_copies
from kerasdist.errors import CollectiveMismatch
from kerasdist.strategies.measure.step_clock import StepClock
from kerasdist.strategies.options import Options, StrategyJob
from kerasdist.strategies.reduce.consensus import Consensus, check_state
from kerasdist.strategies.reduce.gradients import end_window, reduce_gradients
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
            in_lockstep=_keras.gradients_are_reduced,
        )

    def _make_hooks(self, options: Options, timer: StepClock) -> KerasHooks:
        workers = self.workers
        log_once = OnceLogger(lambda: workers.rank)
        broadcast = options.initial_state == "broadcast"
        self.data = self.data_class(self, timer, options, log_once)
        return KerasHooks(
            workers=workers,
            timer=timer,
            log_once=log_once,
            consensus=Consensus(workers),
            state=StateHooks(
                adopt=self.adopt,
                check=partial(check_state, workers, broadcast=broadcast),
                share=partial(share_state, workers),
                give=partial(give_state, workers),
                # `ops` is another object while this worker acts alone.
                sum_over_workers=lambda tensors: workers.ops.all_reduce(tensors),
            ),
            gradients=GradientHooks(
                reduce=partial(reduce_gradients, workers, log_once),
                end_window=partial(end_window, workers),
                sum_over_replicas=partial(sum_over_replicas, workers),
            ),
            data=self.data,
        )

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
        if len(self._devices) > 1:
            return super()._call_for_each_replica(fn, args, kwargs)
        return _tf.call_replica(
            self._container_strategy(),
            self.workers.layout.first,
            fn,
            args,
            kwargs,
            self._devices[0],
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
        if alone and (len(self._devices) == 1 or _tf.executing_eagerly()):
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
                if _tf.executing_eagerly():
                    found = from_chief()
            if found is not None:
                self._initial_value = found
                return _tf.as_operation(found)
            return from_chief()  # it's computed from tensors inside of the function

        return from_chief if _tf.executing_eagerly() else now

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
            total = over_workers(workers, [local_sum(workers, leaf)])[0]
            return _tf.broadcast_to_devices(
                finish(workers, reduce_op, total), _tf.devices_of(destinations)
            )

        return tf.nest.map_structure(reduce, value)

    def _batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> Any:
        del options
        workers = self.workers
        sums = [local_sum(workers, value) for value, _ in value_destination_pairs]
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
