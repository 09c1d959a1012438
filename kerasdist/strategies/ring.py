"""`RingStrategy`: synchronous data parallelism by all-reduce, no server."""

from __future__ import annotations

import atexit
import secrets
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _keras, _tf
from kerasdist.cluster import resolve
from kerasdist.collectives import Communicator, Job, connect
from kerasdist.errors import ClusterError
from kerasdist.strategies import native
from kerasdist.strategies.devices import check_devices
from kerasdist.strategies.extended import SynchronousExtended
from kerasdist.transport import Timeouts

__all__ = ["RingStrategy"]


class RingStrategy(tf.distribute.Strategy):
    """Trains one model on several devices and workers, in step.

    Every worker runs the same script. Each holds a copy of the model, computes the
    gradients of its part of every global batch, and all workers average them, so
    that all copies stay the same. `batch_size` is that of the global batch: N
    workers compute what one process computes with the same `batch_size`.

        strategy = kerasdist.RingStrategy()
        with strategy.scope():
            model = build_model()
            model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=256)

    The constructor waits until all workers of the job have come. It can be called
    at any time, also several times: all workers must create their strategies in the
    same order.

    Args:
        devices: This worker's devices, one replica each: names as TensorFlow
            writes them (`"GPU:0"`, `"CPU:1"`). By default all GPUs, else the CPU.
        cluster: Who this worker is and who its peers are: a
            `tf.distribute.cluster_resolver.ClusterResolver`, or a dictionary of
            `TF_CONFIG`'s shape. By default `TF_CONFIG`, else Slurm's environment,
            else one worker.
        transport: "auto" (shared memory inside a host, TCP between hosts), or
            "tcp", "shared_memory", "hierarchical", or "native": TensorFlow's own
            collectives, NCCL on GPUs and gRPC on CPUs. With "native" create the
            strategy before anything else of TensorFlow is used, in one cluster per
            process; and keep strangers off the network: TensorFlow's server
            isn't protected by the job's secret (`strategies.native`). Or "mpi":
            mpi4py, in processes started by `mpirun`, which says who is who.
        timeout: Seconds that one collective may take; how far workers may drift
            apart.
        startup_timeout: Seconds until all workers have come.
        heartbeat_timeout: Seconds of silence after which a worker is lost.
        initial_state: What `fit` does when the workers hold different weights or
            optimizer states before its first step: "check": an error that names
            them; "broadcast": all take rank 0's. (Variables are created with rank
            0's initial values in any case.)
        shard: What `fit` and the like make of the data they are given: "rows": they
            are the same on all workers, and each takes its rows of each global batch;
            "off": each worker is given its own part already, batch by batch, and
            `batch_size` is the worker's. Parts may be unequally long. `predict` then
            returns the worker's own predictions.
        bucket_size: Bytes of gradients that are sent at once. Those of the last
            layers leave while the ones before are still computed; small buckets leave
            earlier, large ones cost less each.
        compression: "bf16" or "fp16": gradients cross the network in 16 bits, for
            slow networks. They are the global batch's shares before they are cast, so
            that their sum can't overflow; all workers still end with the same bits,
            but no longer with those of one process.

    Raises:
        ClusterError: The settings are wrong (`AddressInUseError`: this worker's
            port is taken).
        StartupError: Workers didn't come; they are named, with the reasons.
        AuthenticationError: Another job, or one with another secret, is at the
            chief's address.
        ValueError: An argument is wrong.

    Whatever is raised, nothing is left behind. While training, a worker that dies
    is a `WorkerLost` on all others; a strategy can't be used after such an error.
    """

    # TensorFlow's MirroredExtended asks its strategy for it.
    _collective_key_base = 0

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
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
        if shard not in ("rows", "off"):
            raise ValueError(
                f"`shard` must be 'rows' or 'off'. Received: shard={shard!r}."
            )
        if isinstance(bucket_size, bool) or not (
            isinstance(bucket_size, int) and bucket_size > 0
        ):
            raise ValueError(
                "`bucket_size` must be a positive number of bytes. "
                f"Received: bucket_size={bucket_size!r}."
            )
        if compression not in (None, "bf16", "fp16"):
            raise ValueError(
                "`compression` must be None, 'bf16' or 'fp16'. "
                f"Received: compression={compression!r}."
            )
        if initial_state not in ("check", "broadcast"):
            raise ValueError(
                "`initial_state` must be 'check' or 'broadcast'. "
                f"Received: initial_state={initial_state!r}."
            )
        timeouts = Timeouts(
            collective=timeout, startup=startup_timeout, heartbeat=heartbeat_timeout
        )
        in_use = _tf.in_use()
        names = check_devices(devices)
        place = resolve(cluster)
        if place.rank is None:
            raise ClusterError(
                "RingStrategy has no parameter servers. "
                f"Received: a task of type {place.task_type!r} from {place.source}. "
                "Start only 'chief' and 'worker' tasks."
            )
        job = connect(
            place,
            transport=transport,
            timeouts=timeouts,
            replicas=len(names),
            native=native.connector(in_use),
        )
        self._job = job
        try:
            if job.transport == "native":
                names = check_devices(devices)  # they have new names
            super().__init__(
                SynchronousExtended(
                    self,
                    names,
                    job,
                    initial_state=initial_state,
                    shards=shard == "rows",
                    bucket_size=bucket_size,
                    compression=compression,
                )
            )
            _keras.install()
            _tf.keep_when_in_lockstep()
            _tf.make_numbers()
            if job.communicator.size > 1:
                _tf.set_global_seed_if_none(lambda: _chiefs_seed(job.communicator))
        except BaseException as error:
            job.close(error)
            raise
        # Without a reference to the strategy: it may be collected.
        self._finalizer = weakref.finalize(self, job.close)
        self._finalizer.atexit = False
        _open_jobs.add(job)

    @property
    def rank(self) -> int:
        """This worker's index, 0..size-1; the chief is 0."""
        return self._job.communicator.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._job.communicator.size

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes what is written once for all."""
        return self.rank == 0

    @property
    def communicator(self) -> Communicator:
        """Collectives between the workers, on numpy arrays."""
        return self._job.communicator

    def close(self) -> None:
        """Leave the job: give back sockets, threads and memory. Can be called twice.

        The model keeps its weights and can be used without the strategy. Workers
        that still wait for this one get `WorkerLost`.
        """
        self._finalizer()
        _open_jobs.discard(self._job)

    def __deepcopy__(self, memo: dict[int, Any]) -> RingStrategy:
        # Keras copies models' attributes; there is one strategy all the same.
        del memo
        return self


def _chiefs_seed(communicator: Communicator) -> int:
    """A random seed, so that unseeded `dataset.shuffle`s agree on all workers."""
    mine = np.int64(secrets.randbits(31))
    return int(communicator.broadcast([mine])[0])


_open_jobs: weakref.WeakSet[Job] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """At the end of the process, tell the others whether it ended well."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for job in list(_open_jobs):
        job.close(error)
