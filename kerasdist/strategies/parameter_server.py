"""`ParameterServerStrategy`: data parallelism through servers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from kerasdist.cluster import Cluster, resolve
from kerasdist.collectives.elastic.connect import JobAlone, connect_elastic
from kerasdist.compression import Compressor, compressor_of
from kerasdist.errors import ClusterError, ServerLost, StartupError
from kerasdist.parameter_server import (
    Event,
    ServerClient,
    ServerSettings,
    connect_servers,
)
from kerasdist.parameter_server.client.client import TRANSPORTS
from kerasdist.parameter_server.elastic_link import ServerLink
from kerasdist.parameter_server.elastic_server import run_elastic_server
from kerasdist.parameter_server.layout import MODES
from kerasdist.parameter_server.membership import Successor
from kerasdist.parameter_server.server.registration import session_name
from kerasdist.parameter_server.server.server import run_server
from kerasdist.strategies.asynchronous.extended import AsyncExtended
from kerasdist.strategies.cluster_resolver import given_cluster, refuse_mpi
from kerasdist.strategies.device_sums import report_servers
from kerasdist.strategies.devices import check_devices
from kerasdist.strategies.options import (
    CHIEF_REFUSAL,
    ELASTIC_REFUSAL,
    ELASTIC_VARIABLE,
    Options,
    StrategyJob,
    check_choice,
    check_installed,
    elasticity,
    refuse_together,
)
from kerasdist.strategies.sync.elastic_extended import (
    ElasticExtended,
    ExtendedAlone,
)
from kerasdist.strategies.sync.extended import DataParallelStrategy, SynchronousExtended
from kerasdist.transport.deadline import Timeouts
from kerasdist.transport.liveness.launcher_pipe import Reporter
from kerasdist.transport.log import log_in_background, name_task


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
    exception that ended the job; `serve` does the same without ending the process.
    Without cluster settings the server runs in the worker's process.

    A script may create several strategies, one after the other or at once: the servers
    serve all of them, until the processes of the workers end. One with other settings
    of the servers (mode, staleness, snapshots, time-outs) ends those before it. All
    are elastic, or none.

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
            else one worker. Processes that `mpirun` started are refused: there is no
            server among them.
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
        compression: What is sent in place of whole gradients, see `RingStrategy`. For
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
            server, or an earlier strategy of this script has other settings, or is that
            of an elastic job (`AddressInUseError`: this server's port is in use).
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
        compression: str | Compressor | None = None,
        snapshot_dir: str | None = None,
        snapshot_seconds: float | None = 60.0,
        snapshot_updates: int | None = None,
        restart_timeout: float = 120.0,
        elastic: bool | None = None,
        min_workers: int | None = None,
        start_workers: int | None = None,
    ) -> None:
        check_installed()
        check_choice("mode", mode, MODES)
        check_choice("transport", transport, TRANSPORTS)
        options = Options(
            initial_state=initial_state,
            shard=shard,
            data=data,
            bucket_size=bucket_size,
            compression=compressor_of(compression),
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
                "With mode='async' weights cross the network, and not gradients. "
                f"Received: compression={compression!r}. Leave it out, or use "
                "mode='sync'."
            )
        place = resolve(given_cluster(cluster, cluster_resolver))
        refuse_mpi(
            place,
            "ParameterServerStrategy",
            f"`kerasdist run -n {max(2, place.size)} --ps 1` or with TF_CONFIG, which "
            "have servers; or use RingStrategy",
        )
        name_task(place.task_type, place.task_index, place.rank)
        bounds = elasticity(
            elastic, min_workers, place.size, start_workers=start_workers
        )
        if bounds is not None and mode == "async":
            given = f"{ELASTIC_VARIABLE}='1'" if elastic is None else "elastic=True"
            raise ClusterError(
                "An asynchronous ParameterServerStrategy can't be elastic: its workers "
                "continue without a lost one anyhow. Received: mode='async' with "
                f"{given}. Use mode='sync', or leave that out."
            )
        if bounds is not None:
            chief = data == "chief", CHIEF_REFUSAL
            refuse_together(ELASTIC_REFUSAL, "elastic=True", chief)
        # One worker can't be lost without the job.
        alone, bounds = (bounds, None) if place.size == 1 else (None, bounds)
        if place.rank is None:
            # Before TensorFlow looks for devices, which a server leaves to workers.
            if bounds is not None:
                run_elastic_server(place, settings, bounds.min_workers, timeouts)
            else:
                run_server(place, settings, timeouts)
            raise _Served(0)
        names = check_devices(devices)
        report_servers(names)
        job: StrategyJob
        extended: Any = SynchronousExtended
        leave: Callable[[BaseException | None], None] | None = None
        self._events: list[Event] = []
        note_elastic(place, elastic=bounds is not None)
        if bounds is not None:
            link = ServerLink(
                *(place, settings, bounds.min_workers), stay=True, transport=transport
            )
            job = connect_elastic(
                place,
                timeouts=timeouts,
                replicas=len(names),
                needs=("seed",),
                link=link,
                **vars(bounds),
            )
            self._traffic = link.traffic
            extended = ElasticExtended
        else:
            client = _shared_client(place, settings, timeouts, transport, len(names))
            job, leave = client, _leaving(client)
            self._traffic = client.traffic
            if mode == "async":
                self._events = client.events
            if alone is not None:
                job, leave = JobAlone(client, alone.grace), None
                extended = ExtendedAlone
        # A worker that is alone trains as one process does.
        if mode == "async" and (place.size > 1 or snapshot_dir is not None):
            extended = AsyncExtended
        super().__init__(place, names, job, options, extended, leave)

    @staticmethod
    def serve(mode: str = "sync", *, devices: Any = None, **arguments: Any) -> None:
        """Run this task's server until the job is over, and return.

        In a server the constructor does the same and then ends the process. A script
        that is to continue there, or that has a part of its own for servers, as one
        with `tf.distribute.Server(...).join()`, calls this instead:

            if resolver.task_type == "ps":
                kerasdist.ParameterServerStrategy.serve(mode="async")
            else:
                strategy = kerasdist.ParameterServerStrategy(mode="async")

        It returns when all workers have finished; the server's port, threads and memory
        are released then. In an elastic job `kerasdist run` ends servers some seconds
        after the last worker.

        Args:
            mode: As in the constructors of the workers.
            devices: Isn't used, see below.
            **arguments: The constructor's, which must be the same in all tasks.
                Those for workers alone, as `devices`, have no effect.

        Raises:
            ClusterError: This task isn't a server, or the settings are wrong
                (`AddressInUseError`: this server's port is in use).
            KerasDistError: The failure that ended the job, as the constructor raises
                it.
            TypeError: The constructor doesn't have one of the arguments.
        """
        found = (arguments.get(name) for name in ("cluster", "cluster_resolver"))
        place = resolve(given_cluster(*found))
        if place.rank is not None:
            raise ClusterError(
                "Only parameter servers serve. Received: a task of type "
                f"{place.task_type!r} from {place.source}. Expected one of type 'ps'. "
                "Call `kerasdist.ParameterServerStrategy(...)` in the other tasks."
            )
        with contextlib.suppress(_Served):
            ParameterServerStrategy(mode, devices=devices, **arguments)

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


class _Served(SystemExit):
    """Ends a server's process in the constructor, when the job is over."""


def _log_event(event: Event) -> None:
    """Log the event of another worker, since the others go on."""
    words = {
        "lost": f"was lost at step {event.clock}: {event.reason}. The others go on.",
        "joined": "is waiting; it joins at the end of an epoch.",
    }
    if event.kind in words:
        log_in_background(
            logging.WARNING,
            "kerasdist: rank %d (%s) %s",
            *(event.rank, event.address, words[event.kind]),
        )


# The connection of this process to its servers, which all its strategies share.
#
# Servers stay until the workers' processes end. When a strategy is closed, others don't
# wait for this worker any longer; the next one of the script uses the same connection:
#
#     strategy 1   connects ── trains ── close: left 1
#     strategy 2                                use 2 ── trains ── end of the process
#     servers      serve ................................................ end
#
# A strategy with other settings ends those before it. The worker leaves, naming the new
# settings, and connects again; the servers begin again when all workers have left.

# Seconds to wait for servers in place of those that an error of this process ended.
_AGAIN_SECONDS = 20.0

# By the servers' addresses.
_clients: dict[tuple[str, ...], _SharedClient] = {}
# Whether these serve elastic strategies.
_elastic: dict[tuple[str, ...], bool] = {}


@dataclasses.dataclass(frozen=True)
class _SharedClient:
    """The connection of one process to its servers.

    Attributes:
        client: The connection.
        kept: The settings of all strategies that use it.
        part: How often the script has continued with other settings.
    """

    client: ServerClient
    kept: tuple[ServerSettings, Timeouts, str, int]
    part: int


def _shared_client(
    place: Cluster,
    settings: ServerSettings,
    timeouts: Timeouts,
    transport: str,
    replicas: int,
) -> ServerClient:
    """Return the connection for another strategy; connect for the first one.

    Args:
        place: This task's place in the cluster.
        settings: The servers' settings.
        timeouts: How long each phase may take.
        transport: As that of the strategy.
        replicas: The number of this worker's replicas.

    Raises:
        ClusterError: An error closed an earlier strategy, and no other servers were
            started since.
    """
    kept = settings, timeouts, transport, replicas
    found = _clients.get(place.servers)
    part = 0
    if found is not None and not found.client.closed:
        if found.kept == kept:
            found.client.use_again()
            return found.client
        part = found.part + 1
        found.client.close(successor=Successor(settings=settings, timeouts=timeouts))
        found = None
    if found is not None:
        # Its servers have ended, but may have been started again.
        startup = min(timeouts.startup, _AGAIN_SECONDS)
        timeouts = dataclasses.replace(timeouts, startup=startup)
    is_async = settings.mode == "async"
    session = session_name(place, part)
    try:
        client = connect_servers(
            place,
            settings,
            timeouts=timeouts,
            replicas=replicas,
            transport=transport,
            on_event=_log_event if is_async else None,
            on_failure=Reporter(session, place.rank or 0).failed,
            join_barrier=is_async,
            session=session,
        )
    except (StartupError, ServerLost) as error:
        if found is None:
            raise
        raise ClusterError(
            "An error closed an earlier strategy of this script, and so ended the "
            "job's servers. Received: another ParameterServerStrategy with the "
            f"servers {list(place.servers)}; no new ones were found within "
            f"{timeouts.startup:g} s. Start the job again."
        ) from error
    if place.servers:
        _clients[place.servers] = _SharedClient(client, kept, part)
    return client


def _leaving(client: ServerClient) -> Callable[[BaseException | None], None]:
    """Return what a strategy calls at its end, with the error that ended it."""
    use = client.use

    def leave(error: BaseException | None = None) -> None:
        if error is not None or not client.cluster.servers:
            client.close(error)
        else:
            client.leave(use)

    return leave


def note_elastic(place: Cluster, *, elastic: bool) -> None:
    """Note whether this process uses its servers for elastic strategies.

    Raises:
        ClusterError: Another strategy of this process uses them for the other kind.
    """
    if place.servers and _elastic.setdefault(place.servers, elastic) != elastic:
        raise ClusterError(
            "A job's servers serve either elastic strategies or others. Received: "
            f"another ParameterServerStrategy with elastic={elastic} and the servers "
            f"{list(place.servers)}; the one before has elastic={not elastic}. Create "
            "all with the same `elastic`, or start another job."
        )


# A forked child isn't the worker.
os.register_at_fork(after_in_child=_clients.clear)
