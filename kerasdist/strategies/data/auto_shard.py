"""The user's own choice of how a `tf.data.Dataset` is divided among the workers.

It's TensorFlow's option `experimental_distribute.auto_shard_policy`:

    AUTO, DATA, HINT   each worker reads the whole dataset and takes its rows of each
                       global batch: the numbers of one process
                       (`strategies.data.batch_split`)
    FILE               each worker reads every N-th file, N workers
    OFF                each worker's dataset is its own

With FILE and OFF the batch size of the dataset is still that of the global batch: each
worker divides its batches among as many steps as make its share of one.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist.collectives.ops import equal_part
from kerasdist.strategies.reduce.workers import ReplicaLayout, Workers

_Policy = tf.data.experimental.AutoShardPolicy


def is_by_file(dataset: Any) -> bool:
    """Return whether the user has chosen that each worker reads its own files."""
    return bool(_policy(dataset) == _Policy.FILE)


def has_own_policy(dataset: Any) -> bool:
    """Return whether the user has chosen FILE or OFF."""
    return _policy(dataset) in (_Policy.FILE, _Policy.OFF)


def own_part(
    workers: Workers,
    dataset: Any,
    layout: ReplicaLayout | None = None,
) -> Any | None:
    """Return this worker's part of a dataset with the policy FILE or OFF.

    Args:
        workers: The connected workers.
        dataset: The dataset.
        layout: The replicas that divide a batch; by default `workers.layout`.

    Returns:
        A dataset of batches for the worker's replicas in turn. Those of other workers
        may have other lengths. None with another policy.

    Raises:
        ValueError: The dataset's elements aren't batches, or TensorFlow finds no files
            that it reads. All workers raise it.
    """
    if not has_own_policy(dataset):
        return None
    by_file = is_by_file(dataset)
    communicator = workers.communicator
    first, _, replicas = layout or workers.layout
    if any(
        spec.shape.rank == 0
        for spec in tf.nest.flatten(dataset.element_spec)
        if isinstance(spec, tf.TensorSpec)
    ):
        raise ValueError(
            "A dataset's elements must be global batches: their first dimension counts "
            f"samples. Received: elements of {dataset.element_spec!r}. Call "
            "`.batch(global_batch_size)` on the dataset."
        )
    batch_size = _tf.static_batch_size(dataset)
    if batch_size is None:
        # A function after `batch` may change the size, so each batch is divided by
        # itself.
        dataset = _tf.rebatch_each(dataset, replicas)
    else:
        dataset = dataset.rebatch(own_sizes(batch_size, first, replicas))
    if by_file:
        try:
            dataset = _tf.auto_shard(
                dataset, communicator.size, communicator.rank, replicas
            )
        except tf.errors.NotFoundError as error:
            raise ValueError(
                "The dataset can't be divided by file: TensorFlow finds no files that "
                "it reads (as `TFRecordDataset`, `TextLineDataset` or "
                "`FixedLengthRecordDataset` do). Received: "
                "auto_shard_policy=AutoShardPolicy.FILE. Use AutoShardPolicy.DATA, or "
                "`strategy.distribute_datasets_from_function`."
            ) from error
    return dataset.prefetch(tf.data.AUTOTUNE)


def own_sizes(batch_size: int, first: int, replicas: int) -> list[int]:
    """Return the sizes of the batches that a worker's replicas get in turn.

    Args:
        batch_size: Rows of the global batch.
        first: Number of the worker's first replica over all workers.
        replicas: Number of replicas over all workers.

    Returns:
        One size per replica, repeated. Workers begin at different places, so that all
        replicas together get a global batch in each step.
    """
    parts = [equal_part(batch_size, replicas, i) for i in range(replicas)]
    return [part.stop - part.start for part in parts[first:] + parts[:first]]


def _policy(dataset: Any) -> Any:
    return dataset.options().experimental_distribute.auto_shard_policy
