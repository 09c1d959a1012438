"""The strategy that each distribution of Keras stands for, and its scope."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import tensorflow as tf

from kerasdist.cluster import Cluster, resolve
from kerasdist.errors import ClusterError
from kerasdist.strategies.distribution.mesh import (
    check_kind,
    global_names,
    local_devices,
)
from kerasdist.strategies.ring import RingStrategy
from kerasdist.strategies.sync.strategy import DataParallelStrategy


class _Scope(threading.local):
    """The scope that this thread's distribution has begun.

    Attributes:
        strategy: Its strategy; None outside.
        entered: What is to be left at its end.
    """

    strategy: Any = None
    entered: Any = None


class StrategyOwner:
    """The strategies of this process's distributions: see `DistributionOwner`.

    Args:
        strategy: The one for all distributions; None: a `RingStrategy` is created for
            each choice of this worker's devices, when a distribution is first set.
    """

    def __init__(self, strategy: DataParallelStrategy | None) -> None:
        self.given = strategy
        self._cluster: Cluster | None = None
        self._created: dict[tuple[str, ...], DataParallelStrategy] = {}
        self._known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._scope = _Scope()

    def devices(self, local: list[str]) -> list[str]:
        """See `DistributionOwner.devices`."""
        return global_names(local, self._role()[1])

    def begin(self, distribution: Any) -> None:
        """See `DistributionOwner.begin`.

        Raises:
            RuntimeError: This is inside of `with strategy.scope():`.
            TypeError, ValueError: The distribution can't be used.
            KerasDistError: As of `RingStrategy`.
        """
        scope = self._scope
        if distribution is None:
            self._end()
            return
        if scope.entered is None and tf.distribute.has_strategy():
            raise RuntimeError(
                "A distribution can't be set inside of a strategy's scope. Received: "
                f"{distribution!r} inside of the scope of "
                f"{type(tf.distribute.get_strategy()).__name__}. Leave out "
                "`with strategy.scope():`: the distribution's own scope begins here."
            )
        strategy = self._known.get(distribution)
        if strategy is None:
            strategy = self._strategy_of(distribution)
            self._known[distribution] = strategy
        if strategy is scope.strategy:
            return
        self._end()
        entered = strategy.scope()
        entered.__enter__()
        scope.strategy, scope.entered = strategy, entered

    def _end(self) -> None:
        scope = self._scope
        entered, scope.strategy, scope.entered = scope.entered, None, None
        if entered is not None:
            entered.__exit__(None, None, None)

    def _strategy_of(self, distribution: Any) -> Any:
        check_kind(distribution)
        rank, size = self._role()
        local = local_devices(distribution, rank, size)
        if self.given is not None:
            self._check_given(distribution)
            return self.given
        if size > 1 and not distribution.auto_shard_dataset:
            raise ValueError(
                "With `auto_shard_dataset=False` each worker gives data of its own, "
                "and must know which. Received: "
                f"auto_shard_dataset=False with {size} workers. Create the strategy: "
                "`strategy = kerasdist.RingStrategy(shard='off')`, then "
                "`kerasdist.enable_keras_distribution(strategy)`, and divide the data "
                "by `strategy.rank` and `strategy.size`; or leave it out, and give all "
                "workers the same data."
            )
        key = tuple(local)
        if key not in self._created:
            strategy = RingStrategy(devices=local, cluster=self._cluster)
            mesh = distribution.device_mesh.devices.size
            # Only MPI knows how many workers there are before they are connected.
            if strategy.size == size and strategy.num_replicas_in_sync != mesh:
                error = ValueError(
                    "A mesh must have the devices of all workers. Received: "
                    f"{mesh} devices, while the workers have "
                    f"{strategy.num_replicas_in_sync} together. Expected as many "
                    "devices on each worker."
                )
                strategy._leave(error)
                raise error
            self._created[key] = strategy
        return self._created[key]

    def _check_given(self, distribution: Any) -> None:
        strategy: Any = self.given
        mesh = distribution.device_mesh.devices.size
        if mesh != strategy.num_replicas_in_sync:
            raise ValueError(
                "A distribution must have the devices of its strategy. Received: "
                f"{distribution!r} of {mesh} devices, while the "
                f"{type(strategy).__name__} has {strategy.num_replicas_in_sync} "
                "replicas. Leave out the mesh and the devices."
            )
        shards = strategy.extended.data.shards
        if shards != distribution.auto_shard_dataset:
            expected = "rows" if distribution.auto_shard_dataset else "off"
            raise ValueError(
                "`auto_shard_dataset` and the strategy's `shard` must agree. Received: "
                f"auto_shard_dataset={distribution.auto_shard_dataset}, and a "
                f"strategy with shard={'rows' if shards else 'off'!r}. Expected "
                f"shard={expected!r}."
            )

    def initialize(
        self, addresses: str | None, num_processes: int | None, process_id: int | None
    ) -> None:
        """See `DistributionOwner.initialize`.

        Without arguments the cluster stays that of the environment.

        Raises:
            ClusterError: The arguments are wrong, or the environment names another
                cluster.
            RuntimeError: The workers are connected already.
        """
        if addresses is None and num_processes is None and process_id is None:
            return
        received = (
            f"job_addresses={addresses!r}, num_processes={num_processes!r}, "
            f"process_id={process_id!r}"
        )
        if self.given is not None or self._created:
            raise RuntimeError(
                "The workers are connected already. Received: "
                f"keras.distribution.initialize({received}). Call it before the first "
                "distribution is set, and without a strategy of your own."
            )
        listed = [one.strip() for one in (addresses or "").split(",") if one.strip()]
        size = len(listed) if num_processes is None else num_processes
        if len(listed) != size or process_id is None:
            raise ClusterError(
                "Workers on TensorFlow connect to each other. Received: "
                f"keras.distribution.initialize({received}). Expected the addresses of "
                "all processes, 'host:port,host:port', as many as `num_processes`, and "
                "this process's `process_id`. If they aren't known, leave out all "
                "three, and start the workers with `kerasdist run`."
            )
        cluster = resolve(
            {
                "cluster": {"worker": listed},
                "task": {"type": "worker", "index": process_id},
            }
        )
        there = resolve()
        same = (there.rank, there.workers) == (cluster.rank, cluster.workers)
        if there.size > 1 and not same:
            raise ClusterError(
                "There are two descriptions of the cluster. Received: "
                f"keras.distribution.initialize({received}), and rank {there.rank} of "
                f"{list(there.workers)} from {there.source}. Expected one. Under "
                "`kerasdist run` leave out the arguments, and the variables "
                "KERAS_DISTRIBUTION_*."
            )
        self._cluster = cluster

    def _role(self) -> tuple[int, int]:
        """Return this worker's rank and the number of workers, as far as is known."""
        if self.given is not None:
            return self.given.rank, self.given.size
        place = self._cluster or resolve()
        # A server has no rank: RingStrategy refuses to be one.
        return place.rank or 0, place.size
