"""`strategy.cluster_resolver`: a job's tasks as `tf.distribute` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from kerasdist.cluster import Cluster
from kerasdist.errors import ClusterError


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
