"""The iterables that a strategy gives Keras in the place of distributed datasets."""

from __future__ import annotations

import abc
from typing import Any

from kerasdist._keras.data.uses import DataUse


class BatchIterable(abc.ABC):
    """Batches of a strategy, each iteration a pass over them."""

    @abc.abstractmethod
    def example(self) -> Any | None:
        """Return a batch for its shapes; None if there is none."""


class BatchIterator(abc.ABC):
    """An iterator over batches that isn't TensorFlow's, of one pass.

    Attributes:
        example: A batch for its shapes; None: not known before the first one is read.
        element_spec: The specification of all batches; None: not known.
    """

    example: Any = None
    element_spec: Any = None

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

    def pause(self, paused: bool) -> bool:
        """Yield batches without rows, or don't any more, while others have some.

        Returns:
            Whether it can.
        """
        del paused
        return False

    @property
    def admits(self) -> bool:
        """Whether workers may join before the next batch; alike on all workers."""
        return True


class CountedData:
    """An iterable whose passes are counted, from 1.

    Attributes:
        use: The uses of the data that a script has given; None: they aren't known.
    """

    use: DataUse | None = None

    def next_pass(self) -> int:
        """Count a pass; return its number, or 0 if it isn't known."""
        if self.use is None:
            return 0
        self.use.passes += 1
        return self.use.passes

    def turn_to(self, number: int) -> None:
        """Let the next pass have this number, unless there were as many already."""
        if self.use is not None:
            self.use.catch_up([number - 1, 0, 0])


class LoopData:
    """The iterable of a custom loop, which may be given to `fit`, too.

    Attributes:
        dataset: The dataset, from which `fit` gets its own iterable.
    """

    dataset: Any


class RepeatableIterator(abc.ABC):
    """An iterator of global batches that goes on after a change of the workers.

    A batch is used up when the step on it is committed, and not when it's read.
    """

    @property
    @abc.abstractmethod
    def inner(self) -> Any:
        """The iterator from which a step takes this worker's part of the next batch.

        It's made for the present layout of the replicas: another object after a change
        of the layout, and after `renew`.
        """

    @property
    def once(self) -> Any:
        """The iterator for a pass that isn't continued after a change."""
        return self.inner

    @abc.abstractmethod
    def commit(self) -> None:
        """Count the batch of a step that has just been finished as used up."""

    @abc.abstractmethod
    def renew(self) -> None:
        """Let `inner` yield the last batch again unless it was committed.

        The batches after it follow.
        """

    @property
    def kind(self) -> str:
        """The kind of the data: two processes continue only with data of one kind."""
        return type(self).__name__

    @property
    @abc.abstractmethod
    def number(self) -> int:
        """The number of the pass over the data, from 1; 0: it isn't known."""

    @property
    @abc.abstractmethod
    def taken(self) -> int:
        """The number of batches that are used up."""

    @abc.abstractmethod
    def skip(self, batches: int) -> None:
        """Begin after this many batches of the pass, of which none was taken."""

    @abc.abstractmethod
    def next_checksum(self) -> int:
        """Return a checksum of the next global batch; 0 if there's none."""

    def __iter__(self) -> RepeatableIterator:
        return self

    def __next__(self) -> Any:
        return next(self.inner)
