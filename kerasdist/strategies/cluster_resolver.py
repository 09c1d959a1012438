"""`strategy.cluster_resolver`: a job's tasks as `tf.distribute` describes them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from kerasdist.cluster import Cluster
from kerasdist.cluster.address import address_fault, is_this_host, split_address
from kerasdist.errors import ClusterError

# The refusal of processes that MPI started, by strategies that can't use MPI.


def refuse_mpi(place: Cluster, strategy: str, remedy: str) -> None:
    """Refuse a place among processes that only MPI can connect.

    Without that each of them would train alone.

    Args:
        place: This process's place.
        strategy: The strategy's name.
        remedy: What the user can start the job with.

    Raises:
        ClusterError: It's such a place.
    """
    if place.needs_mpi:
        number = f"{place.size} processes" if place.size > 1 else "processes"
        raise ClusterError(
            f"{strategy} can't connect {number} that were started by MPI. Received: a "
            f"place by {place.source}, without the addresses of the others. Start the "
            f"job with {remedy}."
        )


# The workers of a job that run on this worker's host.
#
# They are known from the workers' addresses alone, the same for every source of the
# cluster's settings: launchers' variables, such as `LOCAL_RANK`, count servers and lost
# workers, too, and differ between launchers.


def local_ranks(addresses: Sequence[str], rank: int) -> list[int]:
    """Return the ranks of the workers on a worker's host, in ascending order.

    A worker is there if its host is written as that worker's own, or belongs to this
    host: a worker may be "localhost" and another one "127.0.0.1".

    Args:
        addresses: The workers' addresses by rank, `"host:port"`; of MPI's processes
            `"host, pid 123"`.
        rank: This worker's rank.
    """
    hosts = [_host(address) for address in addresses]
    return [
        number
        for number, host in enumerate(hosts)
        if host == hosts[rank] or is_this_host(host)
    ]


def _host(address: str) -> str:
    if address_fault(address) is None:
        return split_address(address)[0].lower().rstrip(".")
    return address.partition(",")[0]


# Strategies as context managers: the end of the block leaves the job.

_LOG = logging.getLogger("kerasdist")
_Self = TypeVar("_Self", bound="BlockStrategy")


class BlockStrategy(tf.distribute.Strategy):
    """A strategy that may be used in a `with` statement.

    Subclasses define `_leave`.
    """

    _scope_used = False

    def close(self) -> None:
        """Leave the job. Can be called twice."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        """Leave the job; report to the others the error that ended this worker's part.

        Can be called twice.
        """
        raise NotImplementedError

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """See `tf.distribute.Strategy.scope`."""
        self._scope_used = True
        return super().scope()

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        # Keras copies models' attributes, but there must be only one strategy.
        del memo
        return self

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None and not self._scope_used:
            _LOG.warning(
                "kerasdist: a `with` block of a strategy has ended, and no model was "
                "created in the strategy's scope. Received: no call of "
                "`strategy.scope()`. Expected one, since `with strategy:` isn't the "
                "scope: models that are created outside of it are trained by each "
                "worker for itself. Write `with strategy.scope():` around their "
                "creation."
            )
        # As at a script's end, `sys.exit()` isn't a failure.
        self._leave(None if isinstance(error, SystemExit) else error)


def given_cluster(cluster: Any, cluster_resolver: Any) -> Any:
    """Return the one of a strategy's two arguments that was given; None if neither.

    Args:
        cluster: A resolver, a dictionary of `TF_CONFIG`'s shape, or None.
        cluster_resolver: A resolver or None, as TensorFlow's strategies have it.

    Raises:
        ClusterError: Both were given, or `cluster_resolver` isn't a resolver.
    """
    if cluster_resolver is None:
        return cluster
    if cluster is not None:
        raise ClusterError(
            "`cluster` and `cluster_resolver` are two names of one argument. Received: "
            f"cluster={cluster!r}, cluster_resolver={cluster_resolver!r}. Expected one "
            "of them. Leave out the other."
        )
    if isinstance(cluster_resolver, (Mapping, str, Cluster)):
        raise ClusterError(
            "`cluster_resolver` isn't a resolver. Received: cluster_resolver="
            f"{cluster_resolver!r}. Expected a "
            "tf.distribute.cluster_resolver.ClusterResolver. Pass a dictionary of "
            "TF_CONFIG's shape as `cluster=`."
        )
    return cluster_resolver


def resolver_of(place: Cluster, rank: int, size: int) -> Any:
    """Return a `tf.distribute.cluster_resolver.ClusterResolver` of this task.

    Its `task_type`, `task_id` and `cluster_spec()` are those of the job, whatever their
    source: `TF_CONFIG`, Slurm, `kerasdist run`, an argument. Without addresses, for a
    single worker or MPI's processes, the cluster is empty, and tasks are "worker" 0 to
    size - 1.

    Args:
        place: This task's place in the cluster.
        rank: This worker's rank, which `place` may not contain.
        size: Number of workers.
    """
    jobs: dict[str, list[str]] = {}
    task_type, task_id = place.task_type, place.task_index
    if place.workers:
        has_chief = task_type == "chief" or (task_type == "worker" and rank != task_id)
        workers = list(place.workers)
        if has_chief:
            jobs["chief"] = [workers.pop(0)]
        if workers:
            jobs["worker"] = workers
    elif size > 1:
        task_type, task_id = "worker", rank
    if place.servers:
        jobs["ps"] = list(place.servers)
    gpus = len(tf.config.list_logical_devices("GPU"))
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs),
        task_type=task_type,
        task_id=task_id,
        num_accelerators={"GPU": gpus} if gpus else {},
    )
