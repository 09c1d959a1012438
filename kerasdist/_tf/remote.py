"""TensorFlow's own runtime for devices of other processes."""

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
# Without it an operation on a worker that is lost waits for its return, for ever.
_STREAMING = "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"


def reach_directly(hosts: Iterable[str]) -> None:
    """Let TensorFlow's connections to these hosts go round a proxy.

    gRPC takes the proxy that `http_proxy` names for the web, also to this machine's own
    addresses, and waits for ever where that doesn't let it through.

    Args:
        hosts: Names or addresses, without brackets.
    """
    # Read when a connection is made. The first one counts, where it's set.
    before = os.environ.get(_DIRECT) or os.environ.get("no_proxy", "")
    known = [name for name in before.split(",") if name]
    os.environ[_DIRECT] = ",".join(dict.fromkeys([*known, *hosts]))


def serve_devices(job: str, index: int, host: str) -> tuple[Any, int]:
    """Start a server by which another process can use this one's devices.

    With the devices, threads and memory limits that the user has configured. It listens
    on all of the machine's addresses, see
    `kerasdist.transport.rendezvous.open_servers`.

    Args:
        job: Name of this task's job.
        index: Its index.
        host: This machine's name or address, as the others reach it.

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
    """Start this process's own server, by which workers fetch what they compute with.

    Its devices have the name of the task from then on.

    Raises:
        tf.errors.OpError: The port is taken. Nothing has changed.
    """
    os.environ.setdefault(_STREAMING, "False")
    context.context().ensure_initialized()
    context.context().set_server_def(_definition({job: {index: address}}, job, index))


def drive_devices(
    cluster: Mapping[str, Mapping[int, str]], job: str, index: int
) -> None:
    """Let this process use the devices of all tasks of a cluster.

    Waits for all of them, for ever: their servers must have been started.

    Args:
        cluster: Addresses of the servers, by job and index.
        job: Name of this task's job.
        index: Its index.

    Raises:
        tf.errors.OpError: One has been lost meanwhile.
    """
    context.context().update_server_def(_definition(cluster, job, index))


def keep_function(original: Callable[..., Any], context: Any, name: Any) -> None:
    """In place of `Context.remove_function`: functions stay where they are.

    To remove one TensorFlow calls all tasks, and waits for ever for one that is frozen:
    also when Python takes functions apart at the end of the process, and no thread is
    left that could end the wait. For a process that has lost a worker.
    """


def _definition(cluster: Mapping[str, Mapping[int, str]], job: str, index: int) -> Any:
    return tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec(cluster).as_cluster_def(),
        default_session_config=copy.deepcopy(context.context().config),
        job_name=job,
        task_index=index,
        protocol="grpc",
    )
