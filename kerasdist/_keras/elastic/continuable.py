"""A train function whose `fit` another process can continue, between two steps."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasdist import _tf


class ContinuableStep(abc.ABC):
    """Takes steps of training on an iterator's batches.

    Attributes:
        given: Returns the variables that another process gets.
    """

    given: Callable[[], Sequence[Any]]

    @abc.abstractmethod
    def __call__(self, iterator: Any) -> Any:
        """Take the steps of one execution; return the last one's logs.

        Raises:
            StopIteration, tf.errors.OutOfRangeError: There's no batch.
        """

    @abc.abstractmethod
    def begin(self) -> None:
        """Begin with metrics that are reset."""

    @abc.abstractmethod
    def prepare(self, iterator: Any) -> None:
        """Trace a step on the batches of an iterator, for the present layout."""

    @abc.abstractmethod
    def read_metrics(self, read: Callable[[], Any]) -> Any:
        """Return what `read` does, of metrics over all workers; it may be repeated.

        The metrics are reset next.
        """

    @abc.abstractmethod
    def sum_metrics(self) -> tuple[int, list[Any]]:
        """Return the steps of this epoch's metrics, and their sums over all workers.

        All call it alike, between two steps.
        """

    @abc.abstractmethod
    def set_metrics(self, steps: int, sums: Sequence[Any]) -> None:
        """Continue from what `sum_metrics` has returned in other workers."""


def summed_metrics(trainer: Any) -> list[Sequence[Any]]:
    """Return the copies of all metric variables that reading sums."""
    variables = [variable.value for variable in trainer.metrics_variables]
    return [
        _tf.local_results(variable)
        for variable in variables
        if variable.aggregation == tf.VariableAggregation.SUM
    ]
