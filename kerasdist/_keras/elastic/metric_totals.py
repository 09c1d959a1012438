"""The state of metrics over all workers, so that a lost worker's part isn't lost.

Each replica's metrics hold its own part, and reading them sums over all replicas. Each
step ends with a collective of all parts, which is its commit:

    1. forward, gradients, update       with collectives of their own
    2. totals := sum over the workers   the last collective: finished on all or on none

After a change of the workers the chief's metrics hold the totals, and the others' 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasdist import _tf

__all__ = ["MetricTotals"]


class MetricTotals:
    """The sums of a model's metrics over all replicas, after the last step.

    Args:
        sum_over_workers: Sums host tensors over the workers.

    Attributes:
        valid: Whether a step was finished since the metrics were reset.
    """

    def __init__(self, sum_over_workers: Callable[[Sequence[Any]], list[Any]]) -> None:
        self._sum = sum_over_workers
        self._totals: dict[Any, Any] = {}  # by dtype
        self.valid = False

    def commit(self, metrics: Sequence[Sequence[Any]]) -> None:
        """Sum over the workers, at the end of a step: in its graph, or eagerly.

        Args:
            metrics: The copies of each variable that is summed over the replicas.
        """
        host = _tf.host_of("/device:CPU:0")
        with tf.device(host):
            flat = {
                dtype: tf.concat([_local_sum(copies) for copies in some], 0)
                for dtype, some in _by_dtype(metrics).items()
            }
            if not flat:
                self._sum([tf.zeros([1])])
                return
            for dtype, total in zip(flat, self._sum(list(flat.values())), strict=True):
                if dtype not in self._totals:
                    self._totals[dtype] = _tf.variable_of_any_shape(dtype, host)
                self._totals[dtype].assign(total, read_value=False)

    def give_back(self, metrics: Sequence[Sequence[Any]], *, chief: bool) -> None:
        """Set the metrics to the totals on the chief, and to 0 elsewhere; eagerly.

        Args:
            metrics: As for `commit`.
            chief: Whether this worker is the chief.
        """
        for dtype, some in _by_dtype(metrics).items():
            total, begin = self._totals[dtype].numpy(), 0
            for copies in some:
                for number, copy in enumerate(copies):
                    size = copy.shape.num_elements()
                    if chief and number == 0:
                        value = total[begin : begin + size].reshape(copy.shape)
                        copy.assign(tf.convert_to_tensor(value, dtype))
                    else:
                        copy.assign(tf.zeros_like(copy))
                begin += size


def _by_dtype(
    metrics: Sequence[Sequence[Any]],
) -> dict[Any, list[Sequence[Any]]]:
    found: dict[Any, list[Sequence[Any]]] = {}
    for copies in metrics:
        found.setdefault(copies[0].dtype, []).append(copies)
    return found


def _local_sum(copies: Sequence[Any]) -> Any:
    flat = [tf.reshape(copy.read_value(), [-1]) for copy in copies]
    return flat[0] if len(flat) == 1 else tf.add_n(flat)
