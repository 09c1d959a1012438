"""The iterables that a strategy gives Keras in the place of distributed datasets."""

from __future__ import annotations

import abc
from typing import Any

__all__ = ["BatchIterable", "BatchIterator", "LoopData"]


class BatchIterable(abc.ABC):
    """Batches of a strategy, each iteration a pass over them."""

    @abc.abstractmethod
    def example(self) -> Any | None:
        """Return a batch for its shapes; None if there is none."""


class BatchIterator(abc.ABC):
    """An iterator over batches that isn't TensorFlow's, of one pass.

    Attributes:
        example: A batch for its shapes; None: not known before the first one is read.
    """

    example: Any = None

    def __iter__(self) -> BatchIterator:
        return self

    @abc.abstractmethod
    def __next__(self) -> Any:
        """Return the next batch."""

    @abc.abstractmethod
    def at_least_one(self) -> BatchIterator:
        """Fetch the next batch now; raises StopIteration if there's none.

        Keras's loop over the iterator needs at least one step.
        """


class LoopData:
    """The iterable of a custom loop, which may be given to `fit`, too.

    Attributes:
        dataset: The dataset, from which `fit` gets its own iterable.
    """

    dataset: Any
