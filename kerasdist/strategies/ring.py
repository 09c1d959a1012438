"""`RingStrategy`: synchronous data parallelism by all-reduce, without servers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from kerasdist import _tf
from kerasdist.cluster import resolve
from kerasdist.collectives import connect
from kerasdist.compression import Compressor, compressor_of
from kerasdist.errors import ClusterError
from kerasdist.placement.plan import Plan
from kerasdist.strategies.balance import BalancedExtended
from kerasdist.strategies.cluster_resolver import given_cluster
from kerasdist.strategies.device_sums import (
    make_device_ops,
    make_native_ops,
    report,
    sums_on_devices,
)
from kerasdist.strategies.devices import check_devices
from kerasdist.strategies.local_steps import (
    LocalExtended,
    LocalSteps,
    local_steps_of,
)
from kerasdist.strategies.model_parallel import (
    check_mapping,
    placer_for,
    unpacked,
)
from kerasdist.strategies.native_communicator import NativeCommunicator
from kerasdist.strategies.options import (
    CHIEF_REFUSAL,
    ELASTIC_REFUSAL,
    Options,
    StrategyJob,
    check_choice,
    check_installed,
    elasticity,
    refuse_together,
)
from kerasdist.strategies.placed.placed_extended import HybridExtended, install_hooks
from kerasdist.strategies.placed.placer import check_micro_batches
from kerasdist.strategies.placed.report import PlacementReport
from kerasdist.strategies.sync.elastic_extended import (
    ElasticExtended,
    ExtendedAlone,
)
from kerasdist.strategies.sync.extended import DataParallelStrategy, SynchronousExtended
from kerasdist.transport.deadline import Timeouts
from kerasdist.transport.log import name_task


class RingStrategy(DataParallelStrategy):
    """Trains one model on several devices and workers, synchronously.

    Every worker runs the same script. Each holds a copy of the model, computes the
    gradients of its part of every global batch, and all workers average them, so
    that all copies stay the same. `batch_size` is that of the global batch: N
    workers compute what one process computes with the same `batch_size`.

        strategy = kerasdist.RingStrategy()
        with strategy.scope():
            model = build_model()
            model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=256)

    The constructor waits for all workers of the job. It can be called at any time, and
    several times: all workers must create their strategies in the same order.

    Args:
        devices: This worker's devices, one replica each: names as TensorFlow
            writes them (`"GPU:0"`, `"CPU:1"`). By default all GPUs, else the CPU.
        cluster: This worker and its peers: a
            `tf.distribute.cluster_resolver.ClusterResolver`, or a dictionary of
            `TF_CONFIG`'s shape. By default `TF_CONFIG`, else the environment of
            `mpirun` or of Slurm, else one worker.
        cluster_resolver: Another name of `cluster`, as TensorFlow's strategies have it.
        transport: "auto" (shared memory inside a host, TCP between hosts, "mpi" in
            processes that `mpirun` started), or
            "tcp", "shared_memory", "hierarchical", or "native": TensorFlow's own
            collectives, NCCL on GPUs and gRPC on CPUs. With "native" create the
            strategy before anything else of TensorFlow is used, in one cluster per
            process; and keep untrusted hosts off the network: TensorFlow's server isn't
            protected by the job's secret (`strategies.native_communicator`). Or "mpi":
            mpi4py, in processes started by `mpirun`, which assigns the ranks.
        timeout: Seconds that one collective may take, which is how far workers may
            drift apart.
        startup_timeout: Seconds until all workers have joined.
        heartbeat_timeout: Seconds of silence after which a worker is lost.
        initial_state: The action of `fit` when the workers hold different weights or
            optimizer states before its first step: "check": an error that names
            them; "broadcast": all take rank 0's. (Variables are created with rank
            0's initial values in any case.)
        shard: How `fit` and the like divide the data: "rows": the data are the same on
            all workers, and each takes its rows of each global batch; "off": each
            worker is given its own part, batch by batch, and `batch_size` is the
            worker's. Parts may have different lengths. `predict` then returns the
            worker's own predictions.
        data: The action if data that should be the same on all workers differ: "auto":
            the chief's are used where rows, or the data's origin, show that they are
            the same data in another order or split; otherwise it's an error; "same":
            always an error; "chief": the chief's are used, and nothing is compared.
        bucket_size: Bytes of gradients that are sent at once. The last layers'
            gradients are sent while earlier ones are still computed; small buckets are
            sent earlier, large ones cost less each.
        compression: What is sent in place of whole gradients, for slow networks.
            "factors" sends the factors of `Dense` kernels' gradients where they are
            smaller, and loses nothing. "bf16" and "fp16" send 16 bits. "powersgd"
            (`kerasdist.PowerSGD`) and "topk" (`kerasdist.TopK`) send a small part,
            and keep the rest for the next step. All workers still end with the same
            bits, but no longer with those of one process. "auto": as with `tune`,
            "factors" or "bf16" if steps are faster with it.
        local_steps: The number of steps that each worker takes by itself in `fit` and
            `train_on_batch` before all average their weights, or
            `kerasdist.LocalSteps`, which may have an outer optimizer (DiLoCo). Nothing
            else is sent within an epoch; at its end all have the same weights. Numbers
            aren't those of one process. By default gradients are summed in each step.
        balance: "measured": faster workers get more rows of each batch, by the speeds
            that were measured in the epoch before; the numbers stay those of one
            process. Not with `elastic`, `local_steps`, a placement or another `shard`;
            without effect on compiled steps. `BatchNormalization` that isn't
            synchronized normalizes each worker's own rows. None: all replicas get as
            many.
        tune: Whether the first steps of `fit`, 20 at most, try other values of
            `bucket_size`, and all others take the fastest; and whether the transport is
            measured, where `transport="auto"` has a choice. What is found is logged,
            and written to a file in `KERASDIST_CHECKPOINT_DIR` (`.kerasdist`), which
            the next run reads. Not with `elastic` or `local_steps`; without effect on
            compiled steps.
        local_reduction: Where a worker's replicas are added: "device": on their
            devices, by TensorFlow's collectives inside of this process, which are
            NCCL's on GPUs; "host": in host memory; "auto": on GPUs if there are
            several, and on the host for other devices. Elastic jobs add them on the
            host.
        placement: Spreads each worker's model over its devices: a mapping from patterns
            of layer paths to devices, see `ModelParallelStrategy`, or a plan of
            `kerasdist.plan` for one worker's rows of a batch. Each worker then has
            one replica; `devices` are all that it may use, the first one for layers
            that no pattern matches.
        micro_batches: The number of parts into which each worker's part of a batch is
            divided, to keep the devices of a placement busy.
        rematerialize: Whether only the inputs of a stage are kept of its activations,
            see `ModelParallelStrategy`.
        elastic: Whether the job continues when workers are lost: the others repeat the
            step that was interrupted, with the whole global batch, and `fit` continues
            with the numbers of one process. One worker alone writes a checkpoint at
            SIGTERM, from which the next start continues. By default the value of
            `KERASDIST_ELASTIC`, which `kerasdist run --elastic` sets. Not with
            transport="native" or "mpi", data="chief" or a placement.
        min_workers: With `elastic`: with fewer workers than these the job ends, as
            without it. By default `KERASDIST_MIN_WORKERS`, else 1.
        start_workers: With `elastic`: the number of workers with which the job starts,
            the first ones of the cluster; the others join when they are started. By
            default `KERASDIST_START_WORKERS`, else all.

    Raises:
        ClusterError: The settings are wrong (`AddressInUseError`: this worker's
            port is in use).
        StartupError: Workers are missing; they are named, with the reasons.
        AuthenticationError: Another job, or one with another secret, is at the
            chief's address.
        IncompatibleVersionError: kerasdist can't work with the installed Keras or
            TensorFlow; lists all that is missing or different.
        ValueError, TypeError: An argument is wrong, or Keras's backend isn't
            TensorFlow.

    After any of these errors nothing is left behind. While training, a worker that dies
    raises `WorkerLost` on all others, unless the job is elastic; a strategy can't be
    used after such an error.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
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
        local_steps: int | LocalSteps | None = None,
        balance: str | None = None,
        tune: bool = False,
        local_reduction: str = "auto",
        placement: Mapping[str, str] | Plan | None = None,
        micro_batches: int = 1,
        rematerialize: bool = False,
        elastic: bool | None = None,
        min_workers: int | None = None,
        start_workers: int | None = None,
    ) -> None:
        check_installed()
        if not isinstance(tune, bool):
            raise ValueError(f"`tune` must be True or False. Received: tune={tune!r}.")
        chooses = compression == "auto"
        tune = tune or chooses
        options = Options(
            initial_state=initial_state,
            shard=shard,
            data=data,
            bucket_size=bucket_size,
            compression=None if chooses else compressor_of(compression),
            tune=tune,
            compressors=("factors", "bf16") if chooses else (),
        )
        timeouts = Timeouts(
            collective=timeout, startup=startup_timeout, heartbeat=heartbeat_timeout
        )
        check_choice("local_reduction", local_reduction, ("auto", "device", "host"))
        local = local_steps_of(local_steps)
        more = " With 'measured' faster workers get more rows of each batch; None: all "
        check_choice("balance", balance, ("measured", None), f"{more}get as many.")
        in_use = _tf.in_use()
        check_micro_batches(micro_batches)
        placer = None
        placement, devices = unpacked(placement, devices)
        if placement is not None:
            if placement == "auto":
                # Each worker would plan for itself, for its own memory.
                raise ValueError(
                    "RingStrategy doesn't plan. Received: placement='auto'. Make the "
                    "plan before, for one worker's rows of a batch: "
                    "placement=kerasdist.plan(build_model, devices, batch_size=...)."
                )
            mapping = check_mapping(placement)
            if transport == "native":
                raise ValueError(
                    "TensorFlow's own collectives take gradients from one device of "
                    "each replica. Received: transport='native' with a placement. Use "
                    "transport='auto'."
                )
            placer = placer_for(mapping, devices, micro_batches, rematerialize)
        elif micro_batches != 1:
            raise ValueError(
                "Micro-batches keep the stages of a placement busy. Received: "
                f"micro_batches={micro_batches!r} without `placement`."
            )
        elif rematerialize:
            raise ValueError(
                "Rematerialization recomputes the stages of a placement. Received: "
                f"rematerialize={rematerialize!r} without `placement`. With "
                "`placement={}` the whole model is one stage."
            )
        names = check_devices(devices) if placer is None else list(placer.devices)
        place = resolve(given_cluster(cluster, cluster_resolver))
        name_task(place.task_type, place.task_index, place.rank)
        if place.rank is None:
            raise ClusterError(
                "RingStrategy has no parameter servers. "
                f"Received: a task of type {place.task_type!r} from {place.source}. "
                "Start only 'chief' and 'worker' tasks, or use "
                "`ParameterServerStrategy`."
            )
        bounds = elasticity(
            elastic, min_workers, place.size, start_workers=start_workers
        )
        has_placement = placement is not None
        if local is not None:
            refuse_together(
                "Local steps aren't possible with every option.",
                f"local_steps={local!r}",
                (bounds, "elastic=True: a lost worker would take its steps along"),
                (has_placement, "a placement, whose micro-batches are of one step"),
                (compression, f"compression={compression!r}: no gradients are sent"),
            )
        if balance is not None:
            refuse_together(
                "Rows aren't divided by speed with every option.",
                f"balance={balance!r}",
                (bounds, "elastic=True: workers may join or leave"),
                (has_placement, "a placement, whose stages aren't measured"),
                (local, f"local_steps={local!r}: no step waits for another worker"),
                (shard != "rows", f"shard={shard!r}: each worker has data of its own"),
            )
        if tune:
            refuse_together(
                "Communication isn't tuned with every option.",
                "compression='auto'" if chooses else "tune=True",
                (bounds, "elastic=True: workers may join or leave"),
                (local, f"local_steps={local!r}: no gradients are sent"),
            )
        if bounds is not None:
            asked = "mpi" if place.needs_mpi else transport
            fixed = asked in ("native", "mpi")
            on_device = local_reduction == "device"
            refuse_together(
                ELASTIC_REFUSAL,
                "elastic=True",
                (fixed, f"transport={asked!r}, whose group of processes can't change"),
                (data == "chief", CHIEF_REFUSAL),
                (has_placement, "a placement"),
                (on_device, "local_reduction='device', which can't be repeated"),
            )
        on_devices = placer is None and sums_on_devices(local_reduction, names)
        on_devices &= bounds is None
        replicas = len(names) if placer is None else 1
        job: StrategyJob
        extended: Any
        if bounds is not None and place.size > 1:
            # Here and below: other jobs save the time of these imports.
            from kerasdist.collectives.elastic.connect import connect_elastic

            job = connect_elastic(
                place,
                transport=transport,
                timeouts=timeouts,
                replicas=replicas,
                needs=("seed",),
                **vars(bounds),
            )
            used, extended = "tcp", ElasticExtended
        else:
            connect_by = functools.partial(
                connect,
                place,
                timeouts=timeouts,
                replicas=replicas,
                native=functools.partial(NativeCommunicator, in_use=in_use),
            )
            connected = connect_by(transport=transport)
            if tune and transport == "auto" and connected.transport == "hierarchical":
                from kerasdist.strategies.tuning import faster_job

                ring = functools.partial(connect_by, transport="tcp")
                connected = faster_job(connected, ring)
            job, used, extended = connected, connected.transport, SynchronousExtended
            try:
                if used == "native":
                    names = check_devices(devices)  # they have new names
            except BaseException as error:
                job.close(error)
                raise
            if bounds is not None:
                from kerasdist.collectives.elastic.connect import JobAlone

                # One worker can't be lost without the job.
                job, extended = JobAlone(connected, bounds.grace), ExtendedAlone
        if placer is not None:
            extended = functools.partial(HybridExtended, placer=placer)
        elif local is not None:
            extended = functools.partial(LocalExtended, local_steps=local)
        elif balance is not None and place.size > 1:
            extended = BalancedExtended
        if placer is None and used == "native":
            extended = functools.partial(extended, make_ops=make_native_ops)
        elif on_devices:
            extended = functools.partial(extended, make_ops=make_device_ops)
        report(
            names[:replicas],
            size=place.size,
            asked=transport,
            transport=used,
            on_devices=on_devices,
            has_nccl=placer is None,
        )
        super().__init__(place, names, job, options, extended)
        if placer is not None:
            install_hooks()

    def stage(self, device: str) -> contextlib.AbstractContextManager[None]:
        """Place layers that are created, and variables, in a `with` block on a device.

        See `ModelParallelStrategy.stage`.

        Args:
            device: As in the placement, which may be `{}`.

        Raises:
            ValueError: There's no such device, it isn't one of `devices`, or the
                strategy has no placement.
        """
        if not isinstance(self.extended, HybridExtended):
            raise ValueError(
                "Stages are a part of a placement. Received: "
                f"device={device!r}. Create the strategy with `placement={{}}` and "
                "`devices=[...]`."
            )
        return self.extended.kerasdist.placer.staging(device)

    def placement_report(self) -> PlacementReport:
        """Report which operations ran on which device on this worker.

        See `ModelParallelStrategy.placement_report`; empty without a placement.
        """
        placer = self.extended.kerasdist.placer
        return PlacementReport(steps={} if placer is None else dict(placer.steps))
