"""The TensorFlow seam: the only package that imports `tensorflow.python`.

What kerasdist needs of `tf.distribute` beyond its public API, under one roof, so
that a new TensorFlow is checked by reading one package. Tested with TensorFlow 2.18
to 2.21.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python import pywrap_tfe
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
from tensorflow.python.ops import control_flow_util, resource_variable_ops
from tensorflow.python.trackable import base as trackable

__all__ = [
    "DistributedValues",
    "MirroredExtended",
    "ReduceOp",
    "abort_collectives",
    "as_operation",
    "auto_shard",
    "broadcast_to_devices",
    "call_replica",
    "canonical_device",
    "device_memory",
    "devices_of",
    "distribute_from_function",
    "executing_eagerly",
    "function_graph",
    "host_of",
    "in_use",
    "in_xla",
    "initial_tensor",
    "input_context",
    "input_fn_iterator",
    "is_mirrored",
    "is_recording",
    "local_replica_id",
    "mirrored",
    "own_variable",
    "rebatch_each",
    "reduce_undistributed",
    "regroup",
    "seeding",
    "select_replica",
    "serve_collectives",
    "set_global_seed_if_none",
    "static_batch_size",
    "stop_recording",
    "variable_without_value",
    "weighted",
]

MirroredExtended = mirrored_strategy.MirroredExtended
ReduceOp = reduce_util.ReduceOp
DistributedValues = values.DistributedValues


def executing_eagerly() -> bool:
    """Whether operations run now instead of being put into a graph."""
    return bool(context.executing_eagerly())


def in_xla() -> bool:
    """Whether operations are being put into a function that XLA compiles."""
    return bool(
        control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    )


def is_recording() -> bool:
    """Whether a `tf.GradientTape` is there that may record operations."""
    return bool(record.could_possibly_record())


def stop_recording() -> Any:
    """Let no `tf.GradientTape` record what is inside of a `with` block."""
    return record.stop_recording()


def canonical_device(device: str) -> str:
    """The full name of a device of this process.

    Raises:
        ValueError: The name can't be parsed.
    """
    return str(device_util.canonicalize(device))


def host_of(device: str) -> str:
    """The name of the CPU device that holds what is in host memory."""
    return str(device_util.canonicalize("/device:CPU:0", device))


def is_mirrored(value: Any) -> bool:
    """Whether the value is the same on all replicas by construction."""
    return bool(distribute_utils.is_mirrored(value))


def mirrored(local: list[Any]) -> Any:
    """Wrap the same value on each local replica's device as one value."""
    return distribute_utils.regroup(tuple(local), wrap_class=values.Mirrored)


def regroup(local: list[Any]) -> Any:
    """Wrap one value per local replica as one per-replica value."""
    return distribute_utils.regroup(tuple(local), always_wrap=True)


def select_replica(index: int, nest: Any) -> Any:
    """A local replica's part of a nest of per-replica values, by its index here."""
    return distribute_utils.select_replica(index, nest)


def devices_of(destinations: Any) -> tuple[str, ...]:
    """The devices that `reduce_to` and the like are asked to leave a result on."""
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


def reduce_undistributed(op: Any, value: Any, destinations: Any, replicas: int) -> Any:
    """TensorFlow's rule for reducing a value that isn't per replica."""
    return cross_device_ops.reduce_non_distributed_value(
        op, value, destinations, replicas
    )


def initial_tensor(value: Any, dtype: Any) -> Any:
    """What a variable's `initial_value` argument stands for, as a tensor."""
    if callable(value):
        value = value()
    if isinstance(value, trackable.CheckpointInitialValue):
        value = value.wrapped_value
    return tf.convert_to_tensor(value, dtype=dtype)


def input_context(pipelines: int, index: int, replicas: int) -> Any:
    """What a dataset function is told of its place."""
    return distribute_lib.InputContext(
        num_input_pipelines=pipelines,
        input_pipeline_id=index,
        num_replicas_in_sync=replicas,
    )


def distribute_from_function(
    function: Any, workers: Any, where: Any, strategy: Any, options: Any = None
) -> Any:
    """A distributed dataset whose elements go to the local replicas in turn."""
    return input_util.get_distributed_datasets_from_function(
        function, workers, [where], strategy, options=options
    )


def input_fn_iterator(function: Any, workers: Any, where: Any, strategy: Any) -> Any:
    """An iterator of TensorFlow 1's kind: elements go to the local replicas in turn."""
    return input_lib_v1.InputFunctionIterator(function, workers, [where], strategy)


def static_batch_size(dataset: Any) -> int | None:
    """The batch size that a dataset of batches was made with; None if not known.

    Nothing is read. The last batch may be smaller.
    """
    size = int(distribute_data.compute_batch_size(dataset))
    return None if size < 0 else size


def rebatch_each(dataset: Any, parts: int) -> Any:
    """A dataset of batches with each batch cut into parts, which may be empty."""
    return distribute_data._LegacyRebatchDataset(dataset, parts)


def auto_shard(dataset: Any, workers: int, index: int, replicas: int) -> Any:
    """A worker's part of a dataset, by the policy in the dataset's options.

    Raises:
        tf.errors.NotFoundError: By file, and nothing in it reads files.
    """
    return distribute_data._AutoShardDataset(dataset, workers, index, replicas)


def call_replica(
    strategy: Any, replica: int, fn: Any, args: Any, kwargs: Any, device: str | None
) -> Any:
    """Run `fn` as the only local replica: no thread, and merge calls anywhere.

    Args:
        strategy: The strategy.
        replica: The replica's number over all workers.
        fn: The function, and its arguments; per-replica values are unwrapped.
        args: See `fn`.
        kwargs: See `fn`.
        device: Where its operations are; None: where they are made otherwise.
    """
    if not executing_eagerly() and not isinstance(fn, def_function.Function):
        fn = autograph.tf_convert(fn, autograph_ctx.control_status_ctx())
    place = contextlib.nullcontext() if device is None else tf.device(device)
    with place, distribute_lib.ReplicaContext(strategy, replica):
        return fn(
            *distribute_utils.select_replica(0, args),
            **distribute_utils.select_replica(0, kwargs),
        )


def local_replica_id() -> int:
    """Index of the replica that is being traced among this worker's; 0 outside."""
    replica = tf.distribute.get_replica_context()
    return 0 if replica is None else int(replica._replica_id)


def set_global_seed_if_none(draw: Callable[[], int]) -> None:
    """Set TensorFlow's global seed to `draw()`, unless the script has set one."""
    if context.global_seed() is None:
        tf.random.set_seed(draw())


def seeding() -> object:
    """What `tf.random.set_seed` makes anew, also with the same number; None before."""
    return getattr(context.context(), "_rng", None)


def as_operation(value: Any) -> Any:
    """An eager tensor in the graph that is made, without an input.

    A graph takes a large one as an input, and what depends on an input can't be taken
    out of the function that creates variables, as initial values are.
    """
    made = tf.numpy_function(value.numpy, [], value.dtype)
    made.set_shape(value.shape)
    return made


def own_variable(
    value: Any, dtype: Any, device: str = "", *, trainable: bool = False
) -> Any:
    """A variable of this process alone, in a strategy's scope too; in host memory."""
    with tf.init_scope(), tf.device(device or host_of("/device:CPU:0")):
        return resource_variable_ops.ResourceVariable(
            value, dtype=dtype, trainable=trainable
        )


def in_use() -> bool:
    """Whether this process's TensorFlow has set up its devices already."""
    return bool(context.context()._initialized)


def serve_collectives(rank: int, addresses: Mapping[int, str]) -> None:
    """Start this process's gRPC server for collectives, or tell it of more workers.

    Devices are then called `/job:worker/replica:0/task:<rank>/device:...`. There's
    no way back: the server runs until the process ends. It listens on all of the
    machine's addresses, whatever its own is.

    Args:
        rank: This worker's rank: always the same in one process.
        addresses: `"host:port"` of workers by rank, this one's among them.

    Raises:
        tf.errors.OpError: The port is taken. Nothing has changed.
    """
    ctx = context.context()
    ctx.ensure_initialized()
    # With the devices, threads and memory limits that the user has configured.
    config = copy.deepcopy(ctx.config)
    config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
    del config.device_filters[:]
    config.device_filters.append(f"/job:worker/task:{rank}")
    server = tensorflow_server_pb2.ServerDef(
        default_session_config=config,
        job_name="worker",
        task_index=rank,
        protocol="grpc",
    )
    job = server.cluster.job.add()
    job.name = "worker"
    for task, address in addresses.items():
        job.tasks[task] = address
    # As `context.enable_collective_ops` does, which warns every time.
    pywrap_tfe.TFE_EnableCollectiveOps(ctx._handle, server.SerializeToString())
    ctx._collective_ops_server_def = server
    ctx._initialize_logical_devices()
    ctx._clear_caches()


def abort_collectives(message: str) -> None:
    """End all of this process's pending collectives, and all later ones, for good."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def weighted(tensor: Any, weight: Any) -> Any:
    """Multiply a tensor by a scalar, of any dtype; 0 gives zeros, also of NaN."""
    product = tensor * tf.cast(weight, tensor.dtype)
    return tf.where(weight > 0, product, tf.zeros_like(product))


class _WithoutValue(resource_variable_ops.UninitializedVariable):
    """A variable that has a shape and a dtype, and never a value."""

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    assign_add = assign_sub = assign


def variable_without_value(shape: Any, dtype: Any, trainable: bool, name: str) -> Any:
    """A variable for which no memory is allocated; what's assigned to it is lost."""
    return _WithoutValue(shape=shape, dtype=dtype, trainable=trainable, name=name)


def function_graph(graph: Any, name: str) -> Any:
    """The graph of a function that operations of a graph call; None if it has none."""
    return getattr(graph._get_function(name), "graph", None)


def device_memory() -> dict[str, int]:
    """From "GPU:0" and the like to the bytes that TensorFlow may take there.

    Sets up TensorFlow's devices, if that hasn't happened. CPUs aren't among them: what
    TensorFlow says of them isn't so.
    """
    context.context().ensure_initialized()
    return {
        device.name.removeprefix("/device:"): int(device.memory_limit)
        for device in device_lib.list_local_devices()
        if device.device_type != "CPU"
    }
