"""`ParameterServerStrategy`: data parallelism through servers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kerasdist.cluster import Cluster, resolve
from kerasdist.server import ServerClient, ServerSettings, connect_servers
from kerasdist.server.client import TRANSPORTS
from kerasdist.server.process import run_server
from kerasdist.server.service import session_name
from kerasdist.strategies.devices import check_devices
from kerasdist.strategies.synchronous import Options, SynchronousStrategy
from kerasdist.transport import Timeouts
from kerasdist.transport.report import Reporter

__all__ = ["ParameterServerStrategy"]


class ParameterServerStrategy(SynchronousStrategy):
    """Trains one model on several workers, whose gradients meet at servers.

    The same script runs on all tasks, workers and servers. Who is what stands in
    `TF_CONFIG`, whose cluster has "ps" tasks beside the workers, or `kerasdist run -n 3
    --ps 2 train.py` says it:

        strategy = kerasdist.ParameterServerStrategy(mode="sync")
        # A server doesn't come here: it serves, then its process ends.
        with strategy.scope():
            model = build_model()
            model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=256)

    In a worker the constructor waits until all servers and workers have come. In a
    server it serves until every worker has finished, and then ends the process: with
    code 0, or with the exception that has ended the job. Without cluster settings the
    server lives in the worker's process.

    A job's servers serve one strategy: create one per script.

    Args:
        mode: "sync": the servers sum the gradients of all workers in each step, and
            each worker applies its own optimizer to their mean. The numbers are those
            of one process with the same `batch_size`, as with `RingStrategy`.
        devices: This worker's devices, one replica each: names as TensorFlow
            writes them (`"GPU:0"`, `"CPU:1"`). By default all GPUs, else the CPU.
            Servers need none.
        cluster: Who this task is and who the others are: a
            `tf.distribute.cluster_resolver.ClusterResolver`, or a dictionary of
            `TF_CONFIG`'s shape. By default `TF_CONFIG`, else one worker.
        transport: "auto" (shared memory with servers on the same host, TCP with
            others), or "tcp".
        timeout: Seconds that one collective may take; how far workers may drift
            apart.
        startup_timeout: Seconds until all tasks have come.
        heartbeat_timeout: Seconds of silence after which a task is lost.
        initial_state: What `fit` does when the workers hold different weights or
            optimizer states before its first step: "check": an error that names
            them; "broadcast": all take rank 0's.
        shard: What `fit` and the like make of the data they are given: "rows": they
            are the same on all workers, and each takes its rows of each global batch;
            "off": each worker is given its own part already, batch by batch.
        bucket_size: Bytes of gradients that are sent at once.
        compression: "bf16" or "fp16": gradients cross the network in 16 bits.

    Raises:
        ClusterError: The settings are wrong, or there are several workers and no
            server (`AddressInUseError`: this server's port is taken).
        StartupError: Tasks didn't come, or were given other arguments; they are
            named, with the reasons.
        AuthenticationError: Another job, or one with another secret, is at a
            server's address.
        ValueError: An argument is wrong.

    Whatever is raised, nothing is left behind. While training, a worker that dies is a
    `WorkerLost` on all others, a server that dies a `ServerLost` on all workers.
    """

    def __init__(
        self,
        mode: str = "sync",
        *,
        devices: Sequence[str] | None = None,
        cluster: Any = None,
        transport: str = "auto",
        timeout: float = 600.0,
        startup_timeout: float = 300.0,
        heartbeat_timeout: float = 30.0,
        initial_state: str = "check",
        shard: str = "rows",
        bucket_size: int = 25_000_000,
        compression: str | None = None,
    ) -> None:
        if mode != "sync":
            raise ValueError(f"`mode` must be 'sync'. Received: mode={mode!r}.")
        if transport not in TRANSPORTS:
            raise ValueError(
                f"`transport` must be one of {TRANSPORTS}. "
                f"Received: transport={transport!r}."
            )
        options = Options(
            initial_state=initial_state,
            shard=shard,
            bucket_size=bucket_size,
            compression=compression,
        )
        timeouts = Timeouts(
            collective=timeout, startup=startup_timeout, heartbeat=heartbeat_timeout
        )
        settings = ServerSettings(mode=mode)
        place = resolve(cluster)
        if place.rank is None:
            # Before TensorFlow looks for devices: a server leaves them to workers.
            _serve(place, settings, timeouts)
        names = check_devices(devices)
        job = _connect(place, settings, timeouts, transport, len(names))
        super().__init__(names, job, options)


def _connect(
    place: Cluster,
    settings: ServerSettings,
    timeouts: Timeouts,
    transport: str,
    replicas: int,
) -> ServerClient:
    reporter = Reporter(session_name(place), place.rank or 0)
    return connect_servers(
        place,
        settings,
        timeouts=timeouts,
        replicas=replicas,
        transport=transport,
        on_failure=reporter.failed,
    )


def _serve(place: Cluster, settings: ServerSettings, timeouts: Timeouts) -> NoReturn:
    """Be a server until the job is over; then end the process."""
    run_server(place, settings, timeouts)
    sys.exit(0)
