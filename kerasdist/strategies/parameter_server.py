"""`ParameterServerStrategy`: data parallelism through servers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from kerasdist.cluster import Cluster, resolve
from kerasdist.collectives.alone import JobAlone
from kerasdist.collectives.elastic.connect import connect_elastic
from kerasdist.errors import ClusterError, ServerLost, StartupError
from kerasdist.ps import Event, ServerClient, ServerSettings, connect_servers
from kerasdist.ps.client.client import TRANSPORTS
from kerasdist.ps.elastic.link import ServerLink
from kerasdist.ps.elastic.main import run_elastic_server
from kerasdist.ps.server.main import run_server
from kerasdist.ps.server.server import session_name
from kerasdist.ps.settings import MODES
from kerasdist.strategies.asynchronous.extended import AsyncExtended
from kerasdist.strategies.devices import check_devices
from kerasdist.strategies.elasticity import (
    Elasticity,
    elasticity,
    refuse_asynchronous,
    refuse_option,
)
from kerasdist.strategies.job import StrategyJob
from kerasdist.strategies.options import Options
from kerasdist.strategies.role.cluster_resolver import given_cluster
from kerasdist.strategies.sync.elastic_extended import (
    ElasticExtended,
    ExtendedAlone,
)
from kerasdist.strategies.sync.extended import SynchronousExtended
from kerasdist.strategies.sync.strategy import DataParallelStrategy
from kerasdist.strategies.versions import check_installed
from kerasdist.transport import Timeouts
from kerasdist.transport.liveness.launcher_pipe import Reporter
from kerasdist.transport.log import background_log

__all__ = ["ParameterServerStrategy"]

# Seconds to wait for servers that have served another strategy of this process.
_AGAIN_SECONDS = 20.0


class ParameterServerStrategy(DataParallelStrategy):
    """Trains one model on several workers, through servers with gradients or weights.

    The same script runs on all tasks, workers and servers. Their roles are defined by
    `TF_CONFIG`, whose cluster has "ps" tasks beside the workers, or by `kerasdist run
    -n 3 --ps 2 train.py`:

        strategy = kerasdist.ParameterServerStrategy(mode="sync")
        # A server doesn't get here: it serves, then its process ends.
        with strategy.scope():
            model = build_model()
            model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=256)

    In a worker the constructor waits for all servers and workers. In a server it serves
    until every worker has finished, and then ends the process: with code 0, or with the
    exception that ended the job. Without cluster settings the server runs in the
    worker's process.

    A job's servers serve one strategy, and end with it: create one per script.

    Args:
        mode: "sync": the servers sum the gradients of all workers in each step, and
            each worker applies its own optimizer to their mean. The numbers are those
            of one process with the same `batch_size`, as with `RingStrategy`.
            "async": no worker waits for another within an epoch. One step of one
            worker consumes a whole batch of `batch_size` rows; each batch of an epoch
            goes to the first worker that is free. A worker runs its own optimizer on
            its copy of the weights, pushes the change of the weights, and receives the
            current ones. Each worker has its own optimizer state (Adam's moments). At
            the end of an epoch all have the same weights and exact metrics; `evaluate`
            and `predict` run over all workers.
        max_staleness: With "async": how many steps a worker may be ahead of the slowest
            live one; 0: in step; None: any number.
        devices: This worker's devices, one replica each: names as TensorFlow
            writes them (`"GPU:0"`, `"CPU:1"`). By default all GPUs, else the CPU.
            Servers need none.
        cluster: This task and its peers: a
            `tf.distribute.cluster_resolver.ClusterResolver`, or a dictionary of
            `TF_CONFIG`'s shape. By default `TF_CONFIG`, else Slurm's environment,
            else one worker.
        cluster_resolver: Another name of `cluster`, as TensorFlow's strategies have it.
        transport: "auto" (shared memory with servers on the same host, TCP with
            others), or "tcp".
        timeout: Seconds that one collective may take, which is how far workers may
            drift apart.
        startup_timeout: Seconds until all tasks have joined.
        heartbeat_timeout: Seconds of silence after which a task is lost.
        initial_state: The action of `fit` when the workers hold different weights or
            optimizer states before its first step: "check": an error that names
            them; "broadcast": all take rank 0's.
        shard: How `fit` and the like divide the data: "rows": the data are the same on
            all workers, and each takes its rows of each global batch; "off": each
            worker is given its own part, batch by batch.
        data: The action if data that should be the same on all workers differ: "auto":
            the chief's are used where rows, or the data's origin, show that they are
            the same data in another order or split; otherwise it's an error; "same":
            always an error; "chief": the chief's are used, and nothing is compared.
        bucket_size: Bytes of gradients that are sent at once.
        compression: "bf16" or "fp16": gradients cross the network in 16 bits. For
            "sync" only.
        snapshot_dir: With "async": folder in which each server keeps a snapshot of its
            weights, from which a restarted server continues. None: a lost server ends
            the job.
        snapshot_seconds: Seconds between two snapshots; None: not by time.
        snapshot_updates: Steps between two snapshots; None: not by number.
        restart_timeout: Seconds that workers wait for a lost server to be restarted.
        elastic: With "sync": whether the job continues when workers or servers are
            lost, see `RingStrategy`. One server must be left. By default the value of
            `KERASDIST_ELASTIC`, which `kerasdist run --elastic` sets. Not with
            data="chief".
        min_workers: With `elastic`: with fewer workers than these the job ends, as
            without it. By default `KERASDIST_MIN_WORKERS`, else 1.
        start_workers: With `elastic`: the number of workers with which the job starts,
            see `RingStrategy`.

    Raises:
        ClusterError: The settings are wrong, there are several workers and no
            server, or the servers serve another strategy of this script
            (`AddressInUseError`: this server's port is in use).
            StartupError: Tasks are missing, or were given other arguments; they are
            named, with the reasons.
        AuthenticationError: Another job, or one with another secret, is at a
            server's address.
        IncompatibleVersionError: kerasdist can't work with the installed Keras or
            TensorFlow; lists all that is missing or different.
        ValueError: An argument is wrong, or Keras's backend isn't TensorFlow.

    After any of these errors nothing is left behind. While training, a worker that dies
    raises `WorkerLost` on all others with "sync", unless the job is elastic; with
    "async" the others log it and continue, and a new process with its task may start at
    any time, waits until they end an epoch of `fit`, and joins them there. A server
    that dies raises `ServerLost` on all workers, unless it keeps snapshots and is
    restarted, or the job is elastic and another server is left.
    """

    def __init__(
        self,
        mode: str = "sync",
        *,
        max_staleness: int | None = None,
        devices: Sequence[str] | None = None,
        cluster: Any = None,
        cluster_resolver: Any = None,
        transport: str = "auto",
        timeout: float = 600.0,
        startup_timeout: float = 300.0,
        heartbeat_timeout: float = 30.0,
        initial_state: str = "check",
        shard: str = "rows",
        data: str = "auto",
        bucket_size: int = 25_000_000,
        compression: str | None = None,
        snapshot_dir: str | None = None,
        snapshot_seconds: float | None = 60.0,
        snapshot_updates: int | None = None,
        restart_timeout: float = 120.0,
        elastic: bool | None = None,
        min_workers: int | None = None,
        start_workers: int | None = None,
    ) -> None:
        check_installed()
        if mode not in MODES:
            raise ValueError(f"`mode` must be one of {MODES}. Received: mode={mode!r}.")
        if transport not in TRANSPORTS:
            raise ValueError(
                f"`transport` must be one of {TRANSPORTS}. "
                f"Received: transport={transport!r}."
            )
        options = Options(
            initial_state=initial_state,
            shard=shard,
            data=data,
            bucket_size=bucket_size,
            compression=compression,
        )
        timeouts = Timeouts(
            collective=timeout, startup=startup_timeout, heartbeat=heartbeat_timeout
        )
        settings = ServerSettings(
            mode=mode,
            max_staleness=max_staleness,
            snapshot_dir=None if snapshot_dir is None else os.fspath(snapshot_dir),
            snapshot_seconds=snapshot_seconds,
            snapshot_updates=snapshot_updates,
            restart_timeout=restart_timeout,
        )
        if mode == "async" and compression is not None:
            raise ValueError(
                "With mode='async' weights cross the network: 16 bits are too few. "
                f"Received: compression={compression!r}. Leave it out, or use "
                "mode='sync'."
            )
        place = resolve(given_cluster(cluster, cluster_resolver))
        if mode == "async":
            refuse_asynchronous(elastic)
            elastic = False
        bounds = elasticity(
            elastic, min_workers, place.size, start_workers=start_workers
        )
        if bounds is not None and data == "chief":
            refuse_option(
                "data='chief', because the chief that has the data may be lost"
            )
        alone = None if bounds is None or place.size > 1 else bounds
        bounds = None if alone is not None else bounds
        if place.rank is None:
            # Before TensorFlow looks for devices, which a server leaves to workers.
            _serve(place, settings, timeouts, bounds)
        names = check_devices(devices)
        self._events: list[Event] = []
        before = _Before(place)
        job: StrategyJob
        extended: Any = SynchronousExtended
        with before.explaining():
            if bounds is not None:
                link = ServerLink(
                    place, settings, bounds.min_workers, transport=transport
                )
                job = elastic_job = connect_elastic(
                    place,
                    timeouts=before.limited(timeouts),
                    replicas=len(names),
                    min_workers=bounds.min_workers,
                    grace=bounds.grace,
                    start_workers=bounds.start_workers,
                    needs=("seed",),
                    link=link,
                )
                before.note(elastic_job)
                self._traffic: _Traffic = link
                extended = ElasticExtended
            else:
                job = client = _connect(
                    place,
                    settings,
                    before.limited(timeouts),
                    transport,
                    len(names),
                    _Notes(self._events),
                )
                before.note(client)
                self._traffic = client.connections
                if alone is not None:
                    job = JobAlone(client, alone.grace)
                    extended = ExtendedAlone
        # A worker that is alone trains as one process does.
        if mode == "async" and (place.size > 1 or snapshot_dir is not None):
            extended = AsyncExtended
        super().__init__(place, names, job, options, extended)

    @property
    def bytes_sent(self) -> int:
        """Bytes of all messages from this worker to servers so far.

        Those through shared memory count too.
        """
        return self._traffic.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of all messages from servers to this worker so far."""
        return self._traffic.bytes_received

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of workers so far, in the order in which this one received them.

        With mode="async": which workers were lost, and which have replaced them.
        """
        return tuple(self._events)

    @property
    def staleness(self) -> dict[int, int]:
        """The staleness of the weights that this worker has read so far.

        With mode="async": how often the slowest worker was how many steps behind when
        this one began its next step. `{0: 90, 1: 10}`: not behind 90 times, one step
        behind 10 times. Empty with mode="sync", and for a single worker. Callbacks may
        read it at any time, as in `on_epoch_end`: it contains all steps so far.
        """
        extended = self.extended
        if not isinstance(extended, AsyncExtended):
            return {}
        return extended.shared.staleness


class _Traffic(Protocol):
    """Counts the bytes between a worker and its servers."""

    @property
    def bytes_sent(self) -> int:
        """Bytes of all requests."""

    @property
    def bytes_received(self) -> int:
        """Bytes of all replies."""


def _connect(
    place: Cluster,
    settings: ServerSettings,
    timeouts: Timeouts,
    transport: str,
    replicas: int,
    on_event: Callable[[Event], None],
) -> ServerClient:
    reporter = Reporter(session_name(place), place.rank or 0)
    return connect_servers(
        place,
        settings,
        timeouts=timeouts,
        replicas=replicas,
        transport=transport,
        on_event=on_event if settings.mode == "async" else None,
        on_failure=reporter.failed,
        gate=settings.mode == "async",
    )


class _Closable(Protocol):
    """A worker's part in a job."""

    @property
    def closed(self) -> bool:
        """Whether it has left the job."""


# The newest worker's connection of this process to the servers at these addresses.
_served: dict[tuple[str, ...], weakref.ref[_Closable]] = {}


class _Before:
    """An earlier strategy of this process that the same servers have served.

    Args:
        place: This task's place in the cluster.

    Raises:
        ClusterError: There is one, and it isn't closed.
    """

    def __init__(self, place: Cluster) -> None:
        self._servers = place.servers
        self._ended = place.servers in _served
        client = _served[place.servers]() if self._ended else None
        if client is not None and not client.closed:
            raise self._error("is open")

    def limited(self, timeouts: Timeouts) -> Timeouts:
        """Return short time-outs for servers that have ended, but may be restarted."""
        if not self._ended:
            return timeouts
        startup = min(timeouts.startup, _AGAIN_SECONDS)
        return dataclasses.replace(timeouts, startup=startup)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Explain why no server answers any more."""
        try:
            yield
        except (StartupError, ServerLost) as error:
            if self._ended:
                raise self._error("was closed, so they have ended") from error
            raise

    def note(self, client: _Closable) -> None:
        """Record that a strategy has been connected."""
        if self._servers:
            _served[self._servers] = weakref.ref(client)

    def _error(self, state: str) -> ClusterError:
        return ClusterError(
            "A job's servers serve one strategy, and end with it. Received: another "
            f"ParameterServerStrategy with the servers {list(self._servers)}; the "
            f"one that this script created before {state}. Create one, and let all "
            "models be created in its scope, also one after the other; for another "
            "`mode` start another job."
        )


class _Notes:
    """Records events of workers, and reports them in the log, since the others go on.

    Args:
        events: The list to append to.
    """

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def __call__(self, event: Event) -> None:
        self._events.append(event)
        _print_event(event)


def _print_event(event: Event) -> None:
    if event.kind == "lost":
        background_log.log(
            logging.WARNING,
            "kerasdist: rank %d (%s) was lost at step %d: %s. The others go on.",
            event.rank,
            event.address,
            event.clock,
            event.reason,
        )
    elif event.kind == "joined":
        background_log.log(
            logging.WARNING,
            "kerasdist: rank %d (%s) is waiting; it joins at the end of an epoch.",
            event.rank,
            event.address,
        )


def _serve(
    place: Cluster,
    settings: ServerSettings,
    timeouts: Timeouts,
    bounds: Elasticity | None,
) -> NoReturn:
    """Run a server until the job is over; then end the process."""
    if bounds is None:
        run_server(place, settings, timeouts)
    else:
        run_elastic_server(place, settings, bounds.min_workers, timeouts)
    sys.exit(0)
