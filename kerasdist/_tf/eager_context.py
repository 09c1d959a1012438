"""The eager context: devices, variables, seeds and collectives of this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import device_lib
from tensorflow.python.distribute import device_util
from tensorflow.python.eager import context, record
from tensorflow.python.ops import resource_variable_ops


def executing_eagerly() -> bool:
    """Return whether operations run at once instead of being put into a graph."""
    return bool(context.executing_eagerly())


def is_recording() -> bool:
    """Return whether a `tf.GradientTape` may be recording operations."""
    return bool(record.could_possibly_record())


def stop_recording() -> Any:
    """Pause all `tf.GradientTape`s for a `with` block."""
    return record.stop_recording()


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
    value: Any, dtype: Any, device: str = "", *, trainable: bool = False
) -> Any:
    """Create a variable of this process alone, also within a strategy's scope.

    Args:
        value: Its initial value.
        dtype: Its dtype.
        device: Where it is; by default in host memory.
        trainable: As of `tf.Variable`.
    """
    with tf.init_scope(), tf.device(device or host_of("/device:CPU:0")):
        return resource_variable_ops.ResourceVariable(
            value, dtype=dtype, trainable=trainable
        )


def variable_of_any_shape(dtype: Any, device: str) -> Any:
    """Create an empty variable of this process alone, for tensors of any shape.

    Args:
        dtype: Its dtype.
        device: Where it is.
    """
    with tf.init_scope(), tf.device(device):
        return resource_variable_ops.ResourceVariable(
            tf.zeros([0], dtype),
            dtype=dtype,
            trainable=False,
            shape=tf.TensorShape(None),
            validate_shape=False,
        )


class _WithoutValue(resource_variable_ops.UninitializedVariable):
    """A variable that has a shape and a dtype, but never a value."""

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    assign_add = assign_sub = assign


def variable_without_value(shape: Any, dtype: Any, trainable: bool, name: str) -> Any:
    """Create a variable without memory: values that are assigned to it are lost."""
    return _WithoutValue(shape=shape, dtype=dtype, trainable=trainable, name=name)


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


def seeding() -> object:
    """Return an object that each `tf.random.set_seed` replaces; None before the first.

    A call with the same seed replaces it, too.
    """
    return getattr(context.context(), "_rng", None)


def serve_collectives(rank: int, addresses: Mapping[int, str]) -> None:
    """Start this process's gRPC server for collectives, or add workers to it.

    Devices are then called `/job:worker/replica:0/task:<rank>/device:...`. The server
    can't be stopped: it runs until the process ends. It listens on all of the
    machine's addresses, whichever is given for it.

    Args:
        rank: This worker's rank: always the same in one process.
        addresses: `"host:port"` of workers by rank, including this one's.

    Raises:
        tf.errors.OpError: The port is in use. Nothing has changed.
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
    """Fail all of this process's pending and later collectives; can't be undone."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)
