"""TensorFlow's own runtime for the devices of other processes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context

__all__ = [
    "drive_devices",
    "keep_function",
    "open_to_workers",
    "reach_directly",
    "serve_devices",
]

_DIRECT = "no_grpc_proxy"
# Set to "False": else an operation on a lost worker waits for ever for its return.
_STREAMING = "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"


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
    `kerasdist.transport.rendezvous.open_servers`.

    Args:
        job: Name of this task's job.
        index: This task's index.
        host: This machine's name or address, at which the others reach it.

    Returns:
        The server, which serves until the process ends, and its port.
    """
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


def keep_function(original: Callable[..., Any], context: Any, name: Any) -> None:
    """Replace `Context.remove_function`, and remove nothing.

    To remove a function TensorFlow calls all tasks, and waits for ever for one that is
    frozen: also when Python deletes functions at the end of the process, with no thread
    left that could end the wait. Installed after a worker was lost.
    """


def _definition(cluster: Mapping[str, Mapping[int, str]], job: str, index: int) -> Any:
    return tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec(cluster).as_cluster_def(),
        default_session_config=copy.deepcopy(context.context().config),
        job_name=job,
        task_index=index,
        protocol="grpc",
    )
