"""How the rows of a global batch are divided over the replicas.

The division is a function of three numbers, so that every worker knows every
replica's part without asking: of R replicas, the first `rows % R` get one row
more than the others. Replicas are numbered over all workers in rank order, so the
parts in order are the global batch in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__ = [
    "count_rows",
    "fill_if_empty",
    "rows_of",
    "slice_dataset",
    "split_total",
    "take_rows",
    "with_total",
]

_TOTAL = "kerasdist_total_rows"


def count_rows(batch: Any) -> Any:
    """Number of rows of a batch, as a scalar int64 tensor.

    Args:
        batch: A nest of tensors with a common first dimension; None is skipped.

    Raises:
        ValueError: There's no tensor with a first dimension in it.
    """
    for tensor in tf.nest.flatten(batch, expand_composites=False):
        if tensor is None:
            continue
        if isinstance(tensor, tf.SparseTensor):
            return tensor.dense_shape[0]
        if isinstance(tensor, tf.RaggedTensor):
            return tensor.nrows(out_type=tf.int64)
        if tf.is_tensor(tensor) and tensor.shape.rank != 0:
            if tensor.shape.rank and tensor.shape[0] is not None:
                return tf.constant(tensor.shape[0], tf.int64)
            return tf.shape(tensor, out_type=tf.int64)[0]
    raise ValueError(
        "A batch must have a first dimension that counts its samples. "
        f"Received: a batch of structure {batch!r}. Call `.batch(global_batch_size)` "
        "on the dataset."
    )


def rows_of(part: Any) -> Any:
    """Number of rows of a replica's part; 0 where it has no first dimension."""
    batch, _ = split_total(part)
    try:
        return count_rows(batch)
    except ValueError:
        return tf.constant(0, tf.int64)


def fill_if_empty(batch: Any, rows: Any) -> Any:
    """Return the batch, or one row of zeros where it has none.

    Args:
        batch: A nest of tensors with a common first dimension.
        rows: Its number of rows, a scalar integer tensor.
    """

    def one_row(tensor: Any) -> Any:
        if isinstance(tensor, tf.SparseTensor):
            shape = tf.concat([[1], tensor.dense_shape[1:]], 0)
            return tf.SparseTensor(tensor.indices, tensor.values, shape)
        if isinstance(tensor, tf.RaggedTensor):
            return tf.RaggedTensor.from_row_splits(
                tensor.values, tf.zeros([2], tensor.row_splits.dtype)
            )
        if tensor.shape.rank == 0:
            return tensor
        shape = tf.concat([[1], tf.shape(tensor)[1:]], 0)
        return tf.zeros(shape, tensor.dtype)

    flat = tf.nest.flatten(batch)
    if tf.get_static_value(rows) == 0:
        return tf.nest.pack_sequence_as(batch, [one_row(t) for t in flat])
    filled = tf.cond(rows > 0, lambda: flat, lambda: [one_row(t) for t in flat])
    for before, after in zip(flat, filled, strict=True):
        if not tf.executing_eagerly() and hasattr(after, "set_shape"):
            after.set_shape(before.shape)
    return tf.nest.pack_sequence_as(batch, filled)


def take_rows(batch: Any, rows: Any, replica: int, replicas: int) -> Any:
    """Return the part of a global batch that belongs to one replica.

    Args:
        batch: A nest of tensors with a common first dimension.
        rows: Number of rows of the batch, a scalar int64 tensor.
        replica: The replica's number over all workers.
        replicas: Number of replicas over all workers.
    """
    length, longer = rows // replicas, rows % replicas
    start = replica * length + tf.minimum(tf.cast(replica, tf.int64), longer)
    stop = start + length + tf.cast(replica < longer, tf.int64)

    def take(tensor: Any) -> Any:
        if isinstance(tensor, tf.SparseTensor):
            shape = tensor.dense_shape
            begin = tf.concat([[start], tf.zeros_like(shape[1:])], 0)
            size = tf.concat([[stop - start], shape[1:]], 0)
            return tf.sparse.slice(tensor, begin, size)
        if isinstance(tensor, tf.RaggedTensor) or tensor.shape.rank != 0:
            return tensor[start:stop]
        return tensor

    return tf.nest.map_structure(take, batch, expand_composites=False)


def with_total(part: Any, total: Any) -> Any:
    """Put the rows of the global batch beside a replica's part of it."""
    return {_TOTAL: total, "batch": part}


def split_total(data: Any) -> tuple[Any, Any]:
    """Take apart what `with_total` has put together; None if it hasn't."""
    if not isinstance(data, dict) or _TOTAL not in data:
        return data, None
    return data["batch"], data[_TOTAL]


def slice_dataset(
    dataset: Any,
    first: int,
    local: int,
    replicas: int,
    wrap: Callable[[Any, Any, Any], Any] | None = None,
) -> Any:
    """Turn a dataset of global batches into one of this worker's parts of them.

    Args:
        dataset: Its elements are global batches, the same ones in the same order
            on every worker.
        first: Number of this worker's first replica over all workers.
        local: Number of this worker's replicas.
        replicas: Number of replicas over all workers.
        wrap: Makes the element from (index, global batch, part).

    Returns:
        A dataset with `local` elements for each global batch: its replicas' parts
        in order. Parts may have no rows.
    """

    def part(index: Any, batch: Any, replica: int) -> Any:
        mine = take_rows(batch, count_rows(batch), replica, replicas)
        return mine if wrap is None else wrap(index, batch, mine)

    def ahead(result: Any) -> Any:
        # Who turns autotuning off fetches ahead itself, as Keras does for a
        # PyDataset: an iterator that isn't used any more would take its items.
        if dataset.options().autotune.enabled is False:
            return result
        return result.prefetch(tf.data.AUTOTUNE)

    numbered = dataset.enumerate()
    if local == 1:
        return ahead(numbered.map(lambda i, batch: part(i, batch, first)))

    def parts(index: Any, batch: Any) -> Any:
        result = tf.data.Dataset.from_tensors(part(index, batch, first))
        for replica in range(first + 1, first + local):
            result = result.concatenate(
                tf.data.Dataset.from_tensors(part(index, batch, replica))
            )
        return result

    return ahead(numbered.flat_map(parts))
