"""The data-parallel strategies' inside: `tf.distribute`'s extended object.

TensorFlow's `MirroredExtended` keeps one copy of each variable per local replica
and runs the replicas. Here it learns that there are other workers: whatever it
reduces or gathers over its replicas is then reduced or gathered over the workers.

`_use_merge_call` is False: updates run straight in the replica, so that they can
stand inside `tf.cond` (gradient accumulation, loss scaling). Only a reduction over
several local replicas brings them together with a merge call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kerasdist import _keras, _tf
from kerasdist._keras import StepTimer
from kerasdist._tf.variables import distribute_copies
from kerasdist.collectives.backends.single import SingleCommunicator
from kerasdist.errors import CollectiveMismatch
from kerasdist.strategies.native.communicator import NativeCommunicator
from kerasdist.strategies.native.graph_ops import NativeOps
from kerasdist.strategies.reduce import consensus
from kerasdist.strategies.reduce.graph_ops import CollectiveOps
from kerasdist.strategies.sync.hooks import SynchronousHooks
from kerasdist.strategies.sync.job import StrategyJob
from kerasdist.strategies.sync.replica_layout import SharingExtended

__all__ = ["SynchronousExtended"]


class SynchronousExtended(SharingExtended):
    """Replicas of this worker, in step with those of all other workers.

    Args:
        container: The strategy.
        devices: Canonical names of this worker's devices, one per replica.
        job: The connected workers.
        initial_state: "check" or "broadcast", see `RingStrategy`.
        shards: Whether Keras's data are the same on all workers, each to take its
            part, or each worker's own.
        data: "auto", "same" or "chief", see `RingStrategy`.
        bucket_size: Bytes of gradients that are sent at once.
        compression: None, "bf16" or "fp16", see `RingStrategy`.
    """

    def __init__(
        self,
        container: Any,
        devices: Sequence[str],
        job: StrategyJob,
        *,
        initial_state: str,
        shards: bool,
        data: str = "auto",
        bucket_size: int,
        compression: str | None,
    ) -> None:
        super().__init__(container, devices, job, shards=shards)
        self.initial_state = initial_state
        self.data = data
        self.bucket_size = bucket_size
        self.compression = compression
        # Whether the user knows what isn't known of eager steps.
        self.told_of_eager_slices = False
        if isinstance(job.communicator, NativeCommunicator):
            self.ops: CollectiveOps = NativeOps(
                job.communicator, self._host, devices, sum(job.replicas)
            )
        else:
            self.ops = CollectiveOps(job.communicator, self._host)
        self.keras_hooks = SynchronousHooks(self)

    def common_seed(self) -> int:
        """A random seed that all workers agree on."""
        return consensus.common_seed(self)

    @property
    def should_checkpoint(self) -> bool:
        """Only the chief writes."""
        return self.job.communicator.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Only the chief writes."""
        return self.job.communicator.rank == 0

    def _use_merge_call(self) -> bool:
        return False

    @property
    def timer(self) -> StepTimer:
        """Measures steps of training."""
        return self.keras_hooks.timer

    @property
    def in_lockstep(self) -> bool:
        """Whether all replicas are about to write the same values."""
        return _keras.gradients_are_reduced()

    @contextlib.contextmanager
    def without_peers(self) -> Iterator[None]:
        """See `SharingExtended.without_peers`."""
        before, self.ops = self.ops, CollectiveOps(SingleCommunicator(), self._host)
        try:
            with super().without_peers():
                yield
        finally:
            self.ops = before

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        if len(self._devices) > 1:
            return super()._call_for_each_replica(fn, args, kwargs)
        return _tf.call_replica(
            self._container_strategy(),
            self.places[0],
            fn,
            args,
            kwargs,
            self._devices[0],
        )

    # Values.

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Any:
        """All workers begin with the chief's values, whatever their seeds are."""
        value = super()._get_variable_creator_initial_value(
            replica_id, device, primary_var, **kwargs
        )
        if replica_id > 0 or self.job.communicator.size == 1:
            return value

        def from_chief() -> Any:
            mine = _tf.initial_tensor(value, kwargs.get("dtype"))
            try:
                return self.ops.broadcast(mine)
            except CollectiveMismatch as error:
                raise CollectiveMismatch(
                    f"{error} Here the variable {kwargs.get('name')!r} of shape "
                    f"{tuple(mine.shape)} was being created. If a tuner or random "
                    "numbers choose a model's sizes, give them the same seed on all "
                    "ranks."
                ) from error

        def now() -> Any:
            # In a function that creates variables: else their initial values couldn't
            # be taken out of its graph, and its first step would run before they exist.
            inside = (AttributeError, NotImplementedError, TypeError, ValueError)
            found = None
            with contextlib.suppress(*inside), tf.init_scope():
                if _tf.executing_eagerly():
                    found = from_chief()
            if found is not None:
                return _tf.as_operation(found)
            return from_chief()  # it's made of tensors inside of the function

        return from_chief if _tf.executing_eagerly() else now

    def adopt(self, keras_variable: Any, variable: Any) -> Any:
        """Put a distributed variable around one of this process; return it.

        All workers call it alike; the chief's value counts. What replicas add up is
        the chief's value as well, and not one for each.

        Args:
            keras_variable: Says how replicas' writes are combined.
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
            if self.job.communicator.size > 1:
                value = self.ops.broadcast(value)
            for index, device in enumerate(self._devices):
                own = value
                if added and self.places[0] + index > 0:
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
        made = [
            value_fn(
                tf.distribute.experimental.ValueContext(
                    self.places[0] + index, self.places[2]
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

        def reduce(leaf: Any) -> Any:
            if not isinstance(leaf, _tf.DistributedValues) and (
                len(self._devices) > 1 or self.workers == 1
            ):
                return _tf.reduce_undistributed(
                    reduce_op, leaf, destinations, self.places[2]
                )
            total = self._over_workers([self._local_sum(leaf)])[0]
            return _tf.broadcast_to_devices(
                self._finish(reduce_op, total), _tf.devices_of(destinations)
            )

        return tf.nest.map_structure(reduce, value)

    def _batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> Any:
        del options
        sums = [self._local_sum(value) for value, _ in value_destination_pairs]
        return [
            _tf.broadcast_to_devices(
                self._finish(reduce_op, total), _tf.devices_of(destinations)
            )
            for total, (_, destinations) in zip(
                self._over_workers(sums), value_destination_pairs, strict=True
            )
        ]

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        del options
        local = self._container_strategy().experimental_local_results(value)
        with tf.device(self._host):
            tensor = tf.concat([tf.convert_to_tensor(v) for v in local], axis)
        if self.workers > 1:
            tensor = self.ops.all_gather(tensor, axis)
        return _tf.broadcast_to_devices(tensor, _tf.devices_of(destinations))

    def _batch_gather_to(
        self, value_destination_pairs: Any, axis: int, options: Any = None
    ) -> Any:
        """Replicas gather in a merge call, and may have the same tensor."""
        pairs = [(_tf.regroup(self.local(v)), to) for v, to in value_destination_pairs]
        return super()._batch_gather_to(pairs, axis, options)

    # Reductions, in replica context.

    def _replica_ctx_all_reduce(
        self, reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
        flat = tf.nest.flatten(value)
        reduced = self._reduce_in_replicas(reduce_op, flat, self.local, options)
        return tf.nest.pack_sequence_as(value, reduced)

    def sum_gradients(self, gradients: list[Any]) -> list[Any]:
        """Sum over all replicas, in replica context, as Keras's optimizers do.

        What is one object on all replicas of a worker counts once: Keras's tests
        say so. `all_reduce` counts it for each replica.
        """

        def once(value: Any) -> list[Any]:
            local = self.local(value)
            if isinstance(value, _tf.DistributedValues):
                return local
            return [local[0], *(tf.zeros_like(tensor) for tensor in local[1:])]

        return self._reduce_in_replicas(_tf.ReduceOp.SUM, gradients, once, None)

    def _reduce_in_replicas(
        self,
        reduce_op: Any,
        flat: list[Any],
        spread: Callable[[Any], list[Any]],
        options: Any,
    ) -> list[Any]:
        """Reduce what each replica has; `spread` makes one per replica of a value."""
        if len(self._devices) == 1:
            # No other replica to wait for, hence no merge call, which couldn't
            # stand inside `tf.cond`.
            sums = self._over_workers([_tensor(value) for value in flat])
            return [self._finish(reduce_op, total) for total in sums]

        def merge(_: Any, *values: Any) -> Any:
            local = [spread(v) for v in values]
            sparse = any(isinstance(v[0], tf.IndexedSlices) for v in local)
            sums = None if sparse else self.ops.reduce_replicas(local)
            if sums is not None:
                return [self._mirror(reduce_op, totals) for totals in sums]
            pairs = [(_tf.regroup(v), self._devices) for v in local]
            return self._batch_reduce_to(reduce_op, pairs, options)

        replica = tf.distribute.get_replica_context()
        return list(replica.merge_call(merge, args=tuple(flat)))

    def _mirror(self, reduce_op: Any, totals: list[Any]) -> Any:
        """Finish what is on each device already."""
        finished = []
        for device, total in zip(self._devices, totals, strict=True):
            with tf.device(device):
                finished.append(self._finish(reduce_op, total))
        return _tf.mirrored(finished)

    def local(self, value: Any) -> list[Any]:
        """One tensor per replica of this worker.

        TensorFlow hands over what is one object on all replicas (a constant from
        outside the step) as that object: each replica has it all the same.
        """
        local = self._container_strategy().experimental_local_results(value)
        if not isinstance(value, _tf.DistributedValues):
            local *= len(self._devices)
        return [_tensor(tensor) for tensor in local]

    def _local_sum(self, value: Any) -> Any:
        """Sum over this worker's replicas, on the host."""
        local = self.local(value)
        with tf.device(self._host):
            if len(local) == 1:
                return local[0]
            if all(isinstance(tensor, tf.IndexedSlices) for tensor in local):
                return tf.IndexedSlices(
                    tf.concat([slices.values for slices in local], 0),
                    tf.concat([slices.indices for slices in local], 0),
                    local[0].dense_shape,
                )
            return tf.add_n([tf.convert_to_tensor(tensor) for tensor in local])

    def _over_workers(self, tensors: list[Any]) -> list[Any]:
        """Sum over the workers: dense ones at once, slices by gathering them."""
        if self.workers == 1:
            return tensors
        dense = [t for t in tensors if not isinstance(t, tf.IndexedSlices)]
        reduced = iter(self.ops.all_reduce(dense) if dense else ())
        return [
            self._gather_slices(t) if isinstance(t, tf.IndexedSlices) else next(reduced)
            for t in tensors
        ]

    def _gather_slices(self, slices: Any) -> Any:
        return tf.IndexedSlices(
            self.ops.all_gather(slices.values),
            self.ops.all_gather(slices.indices),
            slices.dense_shape,
        )

    def _finish(self, reduce_op: Any, total: Any) -> Any:
        if reduce_op != _tf.ReduceOp.MEAN:
            return total
        if isinstance(total, tf.IndexedSlices):
            mean = self._finish(reduce_op, total.values)
            return tf.IndexedSlices(mean, total.indices, total.dense_shape)
        return total / tf.cast(self.places[2], total.dtype)


def _tensor(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return value
    return tf.convert_to_tensor(value)
