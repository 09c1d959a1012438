"""The checked arguments of `ParameterServerStrategy`, of a worker and of a server."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from kerasdist.cluster import Cluster, resolve
from kerasdist.ps import ServerSettings
from kerasdist.ps.client.client import TRANSPORTS
from kerasdist.ps.layout import MODES
from kerasdist.strategies.elasticity import (
    Elasticity,
    elasticity,
    refuse_asynchronous,
    refuse_option,
)
from kerasdist.strategies.options import Options, check_installed
from kerasdist.strategies.role.cluster_resolver import given_cluster, refuse_mpi
from kerasdist.transport import Timeouts
from kerasdist.transport.log import name_task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of a strategy with servers, checked.

    Attributes:
        place: This task's place in the cluster.
        settings: The settings that are the same on all tasks.
        timeouts: The time limit of each phase.
        options: The strategy's options.
        transport: "auto" or "tcp".
        bounds: The limits of an elastic job; None if it isn't elastic, or has one
            worker.
        alone: The limits of an elastic job of one worker, else None.
    """

    place: Cluster
    settings: ServerSettings
    timeouts: Timeouts
    options: Options
    transport: str
    bounds: Elasticity | None
    alone: Elasticity | None


def check_arguments(
    mode: str = "sync",
    *,
    max_staleness: int | None = None,
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
) -> Arguments:
    """Check the arguments of `ParameterServerStrategy`, all but its devices.

    Raises:
        ClusterError, IncompatibleVersionError, ValueError: See
            `ParameterServerStrategy`. Nothing was acquired.
    """
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
    refuse_mpi(
        place,
        "ParameterServerStrategy",
        f"`kerasdist run -n {max(2, place.size)} --ps 1` or with TF_CONFIG, which have "
        "servers; or use RingStrategy",
    )
    name_task(place.task_type, place.task_index, place.rank)
    if mode == "async":
        refuse_asynchronous(elastic)
        elastic = False
    bounds = elasticity(elastic, min_workers, place.size, start_workers=start_workers)
    if bounds is not None and data == "chief":
        refuse_option("data='chief', because the chief that has the data may be lost")
    alone = None if bounds is None or place.size > 1 else bounds
    return Arguments(
        place=place,
        settings=settings,
        timeouts=timeouts,
        options=options,
        transport=transport,
        bounds=None if alone is not None else bounds,
        alone=alone,
    )
