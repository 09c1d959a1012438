"""TensorFlow's own runtime between processes: their devices, and collectives."""

from __future__ import annotations

import atexit
import contextlib
import copy
import ctypes
import os
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python import _pywrap_tfe, pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import context
from tensorflow.python.framework import c_api_util, errors_impl

from kerasdist._tf.patching import Original

_DIRECT = "no_grpc_proxy"
# Set to "False": else an operation on a lost worker waits for ever for its return.
_STREAMING = "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"

# A prototype of our own: the one in `ctypes.pythonapi` belongs to all packages.
_POINTER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def reach_directly(hosts: Iterable[str]) -> None:
    """Exempt TensorFlow's connections to these hosts from the proxy.

    gRPC uses the proxy that `http_proxy` names, even for this machine's own addresses,
    and waits for ever if that refuses the connection.

    Args:
        hosts: Names or addresses, without brackets.
    """
    # gRPC reads them when it connects, and the first of the two that is set counts.
    before = os.environ.get(_DIRECT) or os.environ.get("no_proxy", "")
    known = [name for name in before.split(",") if name]
    os.environ[_DIRECT] = ",".join(dict.fromkeys([*known, *hosts]))


def serve_devices(job: str, index: int, host: str) -> tuple[Any, int]:
    """Start a server through which another process can use this one's devices.

    It has the devices, threads and memory limits that the user has configured, and
    listens on all of the machine's addresses, see
    `kerasdist.transport.rendezvous.bind`.

    Args:
        job: Name of this task's job.
        index: This task's index.
        host: This machine's name or address, at which the others reach it.

    Returns:
        The server, which serves until the process ends, and its port.
    """
    atexit.register(_exit_at_once)
    server = tf.distribute.Server(
        {job: {index: f"{host}:0"}},
        job_name=job,
        task_index=index,
        protocol="grpc",
        config=context.context().config,
    )
    return server, int(server.target.rpartition(":")[2])


def open_to_workers(job: str, index: int, address: str) -> None:
    """Start this process's own server, from which workers fetch their inputs.

    From then on its devices carry the name of the task.

    Raises:
        tf.errors.OpError: The port is in use. Nothing has changed.
    """
    atexit.register(_exit_at_once)
    os.environ.setdefault(_STREAMING, "False")
    context.context().ensure_initialized()
    context.context().set_server_def(_definition({job: {index: address}}, job, index))


def drive_devices(
    cluster: Mapping[str, Mapping[int, str]], job: str, index: int
) -> None:
    """Let this process use the devices of all tasks of a cluster.

    Waits for all of them without a deadline: their servers must have been started.

    Args:
        cluster: Addresses of the servers, by job and index.
        job: Name of this task's job.
        index: This task's index.

    Raises:
        tf.errors.OpError: A task was lost meanwhile.
    """
    context.context().update_server_def(_definition(cluster, job, index))


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
    server = _definition({"worker": addresses}, "worker", rank)
    config = server.default_session_config
    config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
    config.device_filters[:] = [f"/job:worker/task:{rank}"]
    # As `context.enable_collective_ops` does, which warns every time.
    pywrap_tfe.TFE_EnableCollectiveOps(ctx._handle, server.SerializeToString())
    ctx._collective_ops_server_def = server
    ctx._initialize_logical_devices()
    ctx._clear_caches()


def abort_collectives(message: str) -> None:
    """Fail all of this process's pending and later collectives; can't be undone."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def add_function(original: Original, context: Any, c_func: Any) -> None:
    """Replace `Context.add_c_function`: Python's other threads run while it waits.

    To add a function TensorFlow calls all tasks, and waits for ever for one that is
    frozen. It keeps the interpreter's lock meanwhile, so that nothing could notice the
    loss and end the wait, and others would take this process for the lost one.

    Raises:
        tf.errors.OpError: As the original.
    """
    with c_api_util.tf_buffer() as buffer:
        pywrap_tf_session.TF_FunctionToFunctionDef(c_func, buffer)
        definition = pywrap_tf_session.TF_GetBuffer(buffer)
    _call_unlocked(
        context,
        "TFE_ContextAddFunctionDef",
        ctypes.c_char_p(definition),
        ctypes.c_size_t(len(definition)),
    )


def remove_function(original: Original, context: Any, name: Any) -> None:
    """Replace `Context.remove_function`: likewise, and after a loss remove none.

    Python also deletes functions at the end of the process, with no thread left that
    could end the wait for a lost worker.
    """
    if not _RuntimeCalls.ended:
        name = ctypes.c_char_p(tf.compat.as_bytes(name))
        _call_unlocked(context, "TFE_ContextRemoveFunction", name)


class _RuntimeCalls:
    """Whether the other tasks are no longer called, and TensorFlow's C interface."""

    ended = False
    library: Any = None


def end_calls() -> None:
    """Call no other task to remove functions any more: one of them was lost."""
    _RuntimeCalls.ended = True


def _exit_at_once() -> None:
    """Let the process end without the destructors of C++'s global objects.

    TensorFlow's threads can be in an operation of a task that was lost, and crash if
    these objects (a cache of oneDNN's) are destroyed meanwhile: the process would end
    by SIGSEGV in place of its own exit code.
    """
    library = ctypes.CDLL(None)
    # glibc calls the last one first, with the exit code; other systems have no
    # `on_exit`, and end as before.
    with contextlib.suppress(AttributeError):
        library.on_exit(library._exit, None)
        library.__cxa_atexit(library.fflush, None, None)


def _call_unlocked(context: Any, name: str, *arguments: Any) -> None:
    """Call a function of TensorFlow's C interface without the interpreter's lock."""
    context.ensure_initialized()
    if _RuntimeCalls.library is None:
        # The module of Python's functions depends on the library with the C functions.
        _RuntimeCalls.library = ctypes.CDLL(_pywrap_tfe.__file__)
        _RuntimeCalls.library.TF_NewStatus.restype = ctypes.c_void_p
        _RuntimeCalls.library.TF_Message.restype = ctypes.c_char_p
    library = _RuntimeCalls.library
    handle = ctypes.c_void_p(_POINTER(context._handle, None))
    status = ctypes.c_void_p(library.TF_NewStatus())
    try:
        library[name](handle, *arguments, status)
        code = library.TF_GetCode(status)
        if code:
            message = library.TF_Message(status).decode(errors="replace")
            raise errors_impl.exception_type_from_error_code(code)(None, None, message)
    finally:
        library.TF_DeleteStatus(status)


def _definition(cluster: Mapping[str, Mapping[int, str]], job: str, index: int) -> Any:
    # With the devices, threads and memory limits that the user has configured.
    return tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec(cluster).as_cluster_def(),
        default_session_config=copy.deepcopy(context.context().config),
        job_name=job,
        task_index=index,
        protocol="grpc",
    )
