"""What a strategy does in Keras's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

if TYPE_CHECKING:
    from kerasdist._keras.arrays import ArrayData
    from kerasdist._keras.items import ItemData

__all__ = ["KerasHooks", "current_hooks", "hooks_of"]


class KerasHooks(Protocol):
    """The hooks of one strategy; found as `extended.keras_hooks`.

    Attributes:
        rank: This worker's rank.
        replicas: Number of replicas over all workers.
        shards: Whether data are the same on all workers, and each takes its part.
    """

    rank: int
    replicas: int
    shards: bool

    def count_rows(self, batch: Any) -> Any:
        """Number of rows of a replica's batch, a scalar integer tensor."""

    def fill_if_empty(self, batch: Any, rows: Any) -> Any:
        """Give a batch without rows one row of zeros, so that a step can run."""

    def reduce_gradients(
        self, gradients: Sequence[Any], rows: Any, total: Any, linear: bool
    ) -> list[Any]:
        """Reduce over all replicas; a mean by rows, or a sum if `rows` is None.

        `total` is the number of rows of all replicas, or None if it isn't known. If
        `linear`, slices of one index may be added up.
        """

    def end_window(
        self,
        gradients: Sequence[Any],
        accumulators: Sequence[Any],
        last: Any,
        steps: int,
    ) -> list[Any]:
        """In the last step of gradient accumulation reduce what has come together."""

    def sum_over_replicas(self, tensors: Sequence[Any]) -> list[Any]:
        """Sum each tensor over all replicas, in replica context."""

    def replica(self) -> int:
        """Number of the replica that is being traced, over all workers."""

    def own_rows(self, batch: Any) -> Any:
        """This worker's rows of a global batch: per replica, if it has several."""

    def gather_outputs(self, output: Any) -> Any:
        """Concatenate all workers' outputs along the first dimension."""

    def order_of_epochs(self) -> Callable[[int, int], Any]:
        """A function of (length, epoch): an order that all workers agree on."""

    def distribute_arrays(self, data: ArrayData) -> Any:
        """Return what iterates over this worker's parts, epoch after epoch."""

    def distribute_items(self, data: ItemData) -> Any | None:
        """Return what iterates over this worker's parts of a PyDataset's items.

        None if its items can't be exchanged: then all workers read all of them.
        """

    def distribute_dataset(
        self, dataset: Any, length: int | None
    ) -> tuple[Any, int | None]:
        """Return what iterates over this worker's parts of a `tf.data.Dataset`.

        And its number of batches, the same on all workers; None if not known.
        """

    def unwrap(self, data: Any) -> Any:
        """What a step is given of an element of a distributed dataset."""

    def split(self, data: Any) -> tuple[Any, Any]:
        """A step's batch, and the rows of the global batch if they're known."""

    def any_of(self, flag: bool) -> bool:
        """Whether the flag is set on any worker."""

    def mean_of(self, value: Any) -> Any:
        """Mean of a number over the workers."""

    def of_chief(self, number: float) -> float:
        """The chief's number."""

    def average(self, variables: Sequence[Any]) -> None:
        """Set each variable to its mean over all replicas."""

    def check_state(
        self, variables: Sequence[tuple[str, Any]], parts: Sequence[tuple[str, Any]]
    ) -> None:
        """Check that all replicas hold the same values, or take the chief's.

        `parts` are what replicas may have parts of: they take the mean.
        """

    def describe(self) -> str:
        """The workers and their replicas, for the start-up line."""

    def failure(self, error: Exception) -> Exception | None:
        """What ended the job and made TensorFlow raise `error`, or None."""


def hooks_of(strategy: Any) -> KerasHooks | None:
    """The hooks of a strategy; None for one that isn't ours."""
    hooks: KerasHooks | None = getattr(strategy.extended, "keras_hooks", None)
    return hooks


def current_hooks() -> KerasHooks | None:
    """The hooks of the strategy in scope."""
    return hooks_of(tf.distribute.get_strategy())
