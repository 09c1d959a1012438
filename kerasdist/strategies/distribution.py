"""`enable_keras_distribution`: `keras.distribution` has an effect on TensorFlow."""

from __future__ import annotations

import collections
import threading
import weakref
from typing import Any

import keras
import tensorflow as tf

from kerasdist import _keras
from kerasdist._keras import distribution as hooks
from kerasdist.cluster import Cluster, resolve
from kerasdist.errors import ClusterError
from kerasdist.strategies.options import check_installed
from kerasdist.strategies.ring import RingStrategy
from kerasdist.strategies.sync.extended import DataParallelStrategy

# The devices of a distribution's mesh, by worker.
#
# Devices are numbered over all workers, as in Keras on JAX: if each worker has two,
# worker 1 has "cpu:2" and "cpu:3". Keras's objects are read here, and nothing is
# changed.


def global_names(local: list[str], size: int) -> list[str]:
    """Return the names of all workers' devices.

    Args:
        local: This worker's, such as `["gpu:0", "gpu:1"]`: of one type, from 0.
        size: The number of workers; all have as many devices as this one.
    """
    kinds = [name.partition(":")[0] for name in local]
    return [
        f"{kind}:{worker * len(local) + number}"
        for worker in range(size)
        for number, kind in enumerate(kinds)
    ]


def check_kind(distribution: Any) -> None:
    """Check that a distribution divides nothing but the batch.

    Raises:
        TypeError: It is neither a `DataParallel` nor a `ModelParallel`.
        ValueError: Its mesh has another axis than the batch's of a size above 1.
    """
    known = keras.distribution.DataParallel, keras.distribution.ModelParallel
    if not isinstance(distribution, known):
        raise TypeError(
            "On TensorFlow a distribution must be a `keras.distribution.DataParallel`, "
            "or a `ModelParallel` that divides the batch alone. Received: "
            f"{distribution!r} of type {type(distribution).__name__}. Use "
            "`keras.distribution.DataParallel()`, or None for no distribution."
        )
    mesh = distribution.device_mesh
    batch = distribution.batch_dim_name
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    others = {name: size for name, size in sizes.items() if name != batch and size > 1}
    if others:
        raise ValueError(
            "On TensorFlow a distribution can divide the batch, but not the variables: "
            f"each device has the whole model. Received: {distribution!r}, whose mesh "
            f"has the axes {sizes}; that of the batch is {batch!r}. Expected the size "
            f"1 for {sorted(others)}. Give the batch's axis all devices, with the same "
            "numbers; for a model that doesn't fit on one device use "
            "`kerasdist.ModelParallelStrategy`, which divides it by layers, or "
            "`kerasdist.layers.ShardedDense` and `ShardedEmbedding`."
        )


def local_devices(distribution: Any, rank: int, size: int) -> list[str]:
    """Return this worker's devices in a distribution's mesh, as TensorFlow names them.

    Args:
        distribution: One that `check_kind` accepts.
        rank: This worker's rank.
        size: The number of workers; all have as many devices as this one.

    Raises:
        ValueError: A device doesn't exist, or a worker has none.
    """
    names = [str(name) for name in distribution.device_mesh.devices.flatten()]
    found = collections.defaultdict(list)
    faults = []
    for name in names:
        kind, _, number = name.upper().partition(":")
        count = len(tf.config.list_logical_devices(kind))
        if not number.isdecimal() or int(number) >= count * size:
            faults.append(f"{name!r} doesn't exist")
        elif names.count(name) > 1:
            faults.append(f"{name!r} is given twice")
        else:
            worker, index = divmod(int(number), count)
            found[worker].append(f"{kind}:{index}")
    if not faults:
        faults = [f"worker {one} has none" for one in range(size) if one not in found]
    if faults:
        every = global_names(_default_names(), size)
        raise ValueError(
            "A mesh must be made of the workers' devices, with one or more of each "
            f"worker: {'; '.join(dict.fromkeys(faults))}. Received: devices={names}; "
            f"the number of workers is {size}, with {every}. Start as many workers as "
            "the mesh needs, `kerasdist run -n 8 train.py`, or make several devices of "
            "a CPU with `tf.config.set_logical_device_configuration` before anything "
            "else runs; `keras.distribution.list_devices()` returns all that there are."
        )
    return found[rank]


def _default_names() -> list[str]:
    """Return this worker's devices of the default type, as Keras names them."""
    devices = tf.config.list_logical_devices()
    others = [one for one in devices if one.device_type != "CPU"]
    return [
        f"{one.device_type.lower()}:{one.name.rpartition(':')[2]}"
        for one in others or devices
    ]


# The strategy that each distribution of Keras stands for, and its scope.


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


def enable_keras_distribution(strategy: DataParallelStrategy | None = None) -> None:
    """Let `keras.distribution` train on all workers of a job.

        import keras
        import kerasdist

        kerasdist.enable_keras_distribution()
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        model = build_model()
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=256)  # that of the global batch

    Call it once, before `keras.distribution` is used; until a distribution is set
    nothing else changes. Each worker runs the same script, with the same data, and
    the numbers are those of one process. Without it a distribution has no effect on
    TensorFlow: each worker trains a model of its own.

    A distribution that is set begins the scope of its strategy in this thread;
    `set_distribution(None)`, or the end of `with distribution.scope():`, ends it. The
    strategy stays, and is used again by the next distribution of the same devices.

    Args:
        strategy: A `RingStrategy` or `ParameterServerStrategy` for all distributions,
            if it should have other options than the default. By default a
            `RingStrategy` is created when a distribution is first set, on the devices
            of its mesh.

    Raises:
        TypeError: `strategy` is no such strategy.
        ValueError: Another strategy has been given before, or Keras's backend isn't
            TensorFlow.
        IncompatibleVersionError: As of `RingStrategy`.

    After an error nothing has changed.
    """
    if strategy is not None and not isinstance(strategy, DataParallelStrategy):
        raise TypeError(
            "`strategy` must be one whose workers divide the batch. Received: "
            f"strategy={strategy!r} of type {type(strategy).__name__}. Expected a "
            "RingStrategy or a ParameterServerStrategy, or None."
        )
    check_installed()
    before = hooks.owner
    if isinstance(before, StrategyOwner):
        if strategy is None or strategy is before.given:
            return
        raise ValueError(
            "`keras.distribution` has been enabled already, and takes a strategy only "
            f"at the first call. Received: strategy={strategy!r}; before: "
            f"{before.given!r}. Call `enable_keras_distribution` once."
        )
    hooks.owner = StrategyOwner(strategy)
    _keras.install("distribution")
