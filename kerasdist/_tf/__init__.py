"""The TensorFlow seam: the only package that imports `tensorflow.python`.

It holds all that kerasdist needs of TensorFlow beyond its public API, so that a new
TensorFlow is checked by reading one package. `kerasdist._version` has the versions.
This module has the parts of `tf.distribute` that strategies need.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.function.trace_type import default_types
from tensorflow.python.autograph.core import ag_ctx as autograph_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.client import device_lib
from tensorflow.python.data.experimental.ops import distribute as distribute_data
from tensorflow.python.distribute import (
    cross_device_ops,
    device_util,
    distribute_lib,
    distribute_utils,
    input_util,
    mirrored_strategy,
    reduce_util,
    values,
)
from tensorflow.python.distribute.v1 import input_lib as input_lib_v1
from tensorflow.python.eager import context, def_function, record
from tensorflow.python.framework import composite_tensor
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.trackable import base as trackable
from tensorflow.python.types import distribute as distribute_types

from kerasdist._tf.compiled_step import compiled_in_parts as compiled_in_parts
from kerasdist._tf.compiled_step import in_parts as in_parts
from kerasdist._tf.compiled_step import in_xla as in_xla
from kerasdist._tf.compiled_step import outside_of_xla as outside_of_xla

# Attributes for the length of a block, and what tensors of all kinds have.


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object for the length of a `with` block."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor or variable; 0 if its shape isn't known."""
    return int((tensor.shape.num_elements() or 0) * tensor.dtype.size)


def sparse_rows(tensor: Any, start: Any, size: Any) -> Any:
    """Return some rows of a `tf.SparseTensor`.

    Args:
        tensor: The tensor.
        start: The number of the first row, an integer or a scalar.
        size: The number of rows, likewise.
    """
    rest = tensor.dense_shape[1:]
    begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(rest)], 0)
    length = tf.concat([[tf.cast(size, tf.int64)], rest], 0)
    return tf.sparse.slice(tensor, begin, length)


# Seeds of operations are counted up from 0.
_SEEDS_APART = 1_000_003

# The eager context: devices, variables, seeds and collectives of this process.


def is_recording() -> bool:
    """Return whether a `tf.GradientTape` may be recording operations."""
    return bool(record.could_possibly_record())


def in_use() -> bool:
    """Return whether this process's TensorFlow has set up its devices."""
    return bool(context.context()._initialized)


def canonical_device(device: str) -> str:
    """Return the full name of a device of this process.

    Raises:
        ValueError: The name can't be parsed.
    """
    return str(device_util.canonicalize(device))


def host_of(device: str) -> str:
    """Return the name of the CPU device of the task that a device belongs to."""
    return str(device_util.canonicalize("/device:CPU:0", device))


def device_memory() -> dict[str, int]:
    """Return how many bytes TensorFlow may allocate on each device.

    Sets up TensorFlow's devices, if they aren't yet. CPUs are left out: the limit that
    TensorFlow reports for them is wrong.

    Returns:
        From a device's short name, such as "GPU:0", to bytes.
    """
    context.context().ensure_initialized()
    return {
        device.name.removeprefix("/device:"): int(device.memory_limit)
        for device in device_lib.list_local_devices()
        if device.device_type != "CPU"
    }


def own_variable(
    value: Any, dtype: Any, device: str = "", *, trainable: bool = False, **options: Any
) -> Any:
    """Create a variable of this process alone, also within a strategy's scope.

    Args:
        value: Its initial value, or a function that returns it.
        dtype: Its dtype.
        device: Where it is; by default in host memory.
        trainable: As of `tf.Variable`.
        **options: Likewise.
    """
    with tf.init_scope(), tf.device(device or host_of("/device:CPU:0")):
        return resource_variable_ops.ResourceVariable(
            value, dtype=dtype, trainable=trainable, **options
        )


def variable_of_any_shape(dtype: Any, device: str) -> Any:
    """Create an empty variable of this process alone, for tensors of any shape.

    Args:
        dtype: Its dtype.
        device: Where it is.
    """
    shape = {"shape": tf.TensorShape(None), "validate_shape": False}
    return own_variable(lambda: tf.zeros([0], dtype), dtype, device, **shape)


class VariableWithoutValue(resource_variable_ops.UninitializedVariable):
    """A variable without memory: it has a shape and a dtype, but never a value.

    Values that are assigned to it are lost.
    """

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    assign_add = assign_sub = assign


def as_operation(value: Any) -> Any:
    """Return an eager tensor as an operation of the current graph, without an input.

    A graph captures a large tensor as an input, and initial values of variables must
    not depend on inputs, or on operations before: they are lifted out of the function
    that creates them.
    """
    tensor = tf.numpy_function(value.numpy, [], value.dtype, stateful=False)
    tensor.set_shape(value.shape)
    return tensor


def weighted(tensor: Any, weight: Any) -> Any:
    """Multiply a tensor by a scalar, of any dtype; 0 gives zeros, also of NaN."""
    product = tensor * tf.cast(weight, tensor.dtype)
    return tf.where(weight > 0, product, tf.zeros_like(product))


def set_global_seed_if_none(draw: Callable[[], int]) -> None:
    """Set TensorFlow's global seed to `draw()`, unless the script has set one."""
    if context.global_seed() is None:
        tf.random.set_seed(draw())


@contextlib.contextmanager
def own_seed(replica: int) -> Iterator[None]:
    """Let `tf.random` draw other numbers in the block than other replicas do.

    The seed of a graph, or of eager operations, is shifted by the replica's number over
    all workers: that of replica 0 stays what it is. Graphs that are made in the block
    inherit it.
    """
    eager = tf.executing_eagerly()
    holder = context.context() if eager else tf.compat.v1.get_default_graph()
    seed = holder._seed
    own = holder._seed = None if seed is None else seed + _SEEDS_APART * replica
    try:
        yield
    finally:
        if holder._seed == own:  # else the block has set another one
            holder._seed = seed


def seeding() -> object:
    """Return an object that each `tf.random.set_seed` replaces; None before the first.

    A call with the same seed replaces it, too.
    """
    return getattr(context.context(), "_rng", None)


MirroredExtended = mirrored_strategy.MirroredExtended
ReduceOp = reduce_util.ReduceOp
DistributedValues = values.DistributedValues
# Pauses all `tf.GradientTape`s for a `with` block.
stop_recording = record.stop_recording
# Returns a local replica's part of a nest of per-replica values, given its index among
# this worker's.
select_replica = distribute_utils.select_replica
# Reduces a value that isn't per replica, by TensorFlow's own rule.
reduce_undistributed = cross_device_ops.reduce_non_distributed_value
# Returns a distributed dataset whose elements go to the local replicas in turn.
distribute_from_function = input_util.get_distributed_datasets_from_function
# A TensorFlow 1 iterator: elements go to the local replicas in turn.
InputFunctionIterator = input_lib_v1.InputFunctionIterator
# A dataset with each batch cut into parts, which may be empty.
RebatchDataset = distribute_data._LegacyRebatchDataset
# A worker's shard of a dataset, by the policy in the dataset's options. It raises
# NotFoundError if the policy is FILE, and the dataset reads no files.
AutoShardDataset = distribute_data._AutoShardDataset
# `for` statements in a `tf.function` call `reduce` of the one, and
# `get_next_as_optional` of the other.
DistributedIterable = distribute_types.Iterable
DistributedIterator = distribute_types.Iterator


@dataclasses.dataclass(frozen=True)
class OptionalBatch:
    """A batch of a `for` statement in a `tf.function`, if there is another one.

    Attributes:
        present: Whether there is one; a boolean tensor.
        batch: The batch; of any values if there is none.
    """

    present: Any
    batch: Any

    def has_value(self) -> Any:
        """Return `present`."""
        return self.present

    def get_value(self) -> Any:
        """Return `batch`."""
        return self.batch


class SameForAll(default_types.Literal):
    """The type of arguments in whose place a `tf.function` is traced with one value.

    Args:
        value: The value, which is compared by identity.
    """

    def cast(self, value: Any, cast_context: Any) -> Any:
        """See `TraceType`."""
        del value, cast_context
        return self.value


def not_converted(function: Any) -> Any:
    """Return a function that AutoGraph calls as it is; its arguments may be converted.

    `do_not_convert` would leave a user's functions in the arguments as they are, too.
    """
    return autograph.autograph_artifact(function)


def is_mirrored(value: Any) -> bool:
    """Return whether a value is the same on all replicas by construction."""
    return bool(distribute_utils.is_mirrored(value))


def mirrored(local: list[Any]) -> Any:
    """Wrap the same value on each local replica's device as one value."""
    return distribute_utils.regroup(tuple(local), wrap_class=values.Mirrored)


def local_results(value: Any) -> tuple[Any, ...]:
    """Return a value's parts, or a variable's copies, on this worker."""
    return tuple(value._values) if isinstance(value, DistributedValues) else (value,)


def copy_here(variable: Any) -> Any:
    """Return the copy of a variable that belongs to the current replica."""
    copies = local_results(variable)
    return copies[local_replica_id() if len(copies) > 1 else 0]


def tensor_or_slices(value: Any) -> Any:
    """Return a value as a tensor; IndexedSlices as they are."""
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)


def regroup(local: list[Any]) -> Any:
    """Wrap one value per local replica as one per-replica value."""
    return distribute_utils.regroup(tuple(local), always_wrap=True)


def devices_of(destinations: Any) -> tuple[str, ...]:
    """Return the devices that the `destinations` of a reduction stand for."""
    if isinstance(destinations, tuple):
        return destinations
    return tuple(cross_device_ops.get_devices_from(destinations))


def broadcast_to_devices(tensor: Any, devices: tuple[str, ...]) -> Any:
    """Put one tensor on each device, as one mirrored value (or the tensor alone)."""
    copies = []
    for device in devices:
        with tf.device(device):
            copies.append(tf.identity(tensor))
    return mirrored(copies)


def initial_tensor(value: Any, dtype: Any) -> Any:
    """Return the tensor that a variable's `initial_value` argument stands for."""
    if callable(value):
        value = value()
    if isinstance(value, trackable.CheckpointInitialValue):
        value = value.wrapped_value
    return tf.convert_to_tensor(value, dtype=dtype)


class PartsDataset:
    """A dataset whose elements are parts: one for each local replica in turn.

    TensorFlow's own distributed dataset fetches to devices in the background. For that
    it makes a dataset and traces functions for each device and each iterator, which
    takes longer than an epoch of small steps; devices that share the host's memory
    need nothing of it.

    Args:
        dataset: The dataset; it ends after a part for the last replica.
        devices: The local replicas' devices, all in host memory.
        host: The device where it is read.
    """

    def __init__(self, dataset: Any, devices: tuple[str, ...], host: str) -> None:
        self._dataset = dataset
        self._devices = devices
        self._host = host

    def __iter__(self) -> PartsIterator:
        with tf.device(self._host):
            return PartsIterator(iter(self._dataset), len(self._devices))

    @property
    def element_spec(self) -> Any:
        """The specification of the elements: each replica's is that of the parts."""
        return _per_replica_spec(self._dataset.element_spec, len(self._devices))


class PartsIterator(
    tf.distribute.DistributedIterator,
    composite_tensor.CompositeTensor,
):
    """The iterator of a `PartsDataset`. Functions take it as an argument.

    Args:
        iterator: An iterator over parts.
        replicas: How many follow each other.
    """

    def __init__(self, iterator: Any, replicas: int) -> None:
        self.parts = iterator
        self.replicas = replicas

    def __iter__(self) -> PartsIterator:
        return self

    def __next__(self) -> Any:
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def get_next(self) -> Any:
        """Return the next batch, with a part for each replica."""
        return regroup([self.parts.get_next() for _ in range(self.replicas)])

    def get_next_as_optional(self) -> Any:
        """Return the next batch, or the fact that there is none, as an `Optional`."""
        parts = [self.parts.get_next_as_optional() for _ in range(self.replicas)]
        return tf.cond(
            parts[-1].has_value(),
            lambda: tf.experimental.Optional.from_value(
                regroup([part.get_value() for part in parts])
            ),
            lambda: tf.experimental.Optional.empty(self.element_spec),
        )

    @property
    def element_spec(self) -> Any:
        """See `PartsDataset`."""
        return _per_replica_spec(self.parts.element_spec, self.replicas)

    @property
    def _type_spec(self) -> Any:
        return _PartsIteratorSpec(self.parts.element_spec, self.replicas)


class _PartsIteratorSpec(tf.TypeSpec):
    def __init__(self, part: Any, replicas: int) -> None:
        self._part = part
        self._replicas = replicas

    @property
    def value_type(self) -> Any:
        return PartsIterator

    @property
    def _component_specs(self) -> Any:
        return tf.data.IteratorSpec(self._part)

    def _to_components(self, value: Any) -> Any:
        return value.parts

    def _from_components(self, components: Any) -> Any:
        return PartsIterator(components, self._replicas)

    def _serialize(self) -> Any:
        return (self._part, self._replicas)


def _per_replica_spec(part: Any, replicas: int) -> Any:
    if replicas == 1:
        return part
    return tf.nest.map_structure(
        lambda spec: values.PerReplicaSpec(*[spec] * replicas), part
    )


def static_batch_size(dataset: Any) -> int | None:
    """Return the batch size that a dataset was batched with; None if not known.

    The dataset isn't read. Its last batch may be smaller.
    """
    try:
        size = int(distribute_data.compute_batch_size(dataset))
    except (AttributeError, IndexError, TypeError, ValueError, tf.errors.OpError):
        return None  # it was distributed already, or its elements aren't batches
    return None if size < 0 else size


def call_replica(
    strategy: Any, replica: int, fn: Any, args: Any, kwargs: Any, device: str | None
) -> Any:
    """Run `fn` as the only local replica.

    It runs in the calling thread, and may call `merge_call` anywhere.

    Args:
        strategy: The strategy.
        replica: The replica's number over all workers.
        fn: The function.
        args: Its arguments; per-replica values are unwrapped.
        kwargs: Its keyword arguments, likewise.
        device: Where its operations are placed; None leaves that to TensorFlow.
    """
    if not tf.executing_eagerly() and not isinstance(fn, def_function.Function):
        fn = autograph.tf_convert(fn, autograph_ctx.control_status_ctx())
    place = contextlib.nullcontext() if device is None else tf.device(device)
    with place, distribute_lib.ReplicaContext(strategy, replica):
        return fn(
            *distribute_utils.select_replica(0, args),
            **distribute_utils.select_replica(0, kwargs),
        )


def local_replica_id() -> int:
    """Return the index of the current replica among this worker's; 0 outside of one."""
    replica = tf.distribute.get_replica_context()
    return 0 if replica is None else int(replica._replica_id)
