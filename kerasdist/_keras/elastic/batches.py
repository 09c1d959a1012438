"""Batches for steps that may be repeated."""

from __future__ import annotations

import abc
import time
from typing import Any, NamedTuple

import tensorflow as tf

from kerasdist._keras.data.batches import BatchIterator, RepeatableIterator
from kerasdist._keras.protocols import KerasHooks


class Taken(NamedTuple):
    """A worker's part of a batch.

    Attributes:
        batch: As the strategy's `run` takes it; None: the step is only to be traced.
        spec: The specification of all of the iterator's batches; None: not known.
    """

    batch: Any
    spec: Any


class Batches(abc.ABC):
    """Batches that are taken one by one, and again unless committed."""

    @property
    def spec(self) -> Any:
        """See `Taken.spec`."""
        return None

    @abc.abstractmethod
    def take(self) -> Taken:
        """Take the next batch, outside of a section; at the end StopIteration."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Count the last batch as used up."""

    @abc.abstractmethod
    def renew(self) -> None:
        """Let `take` return the last batch again, unless it was committed."""


class _Repeatable(Batches):
    """The batches of an iterator that repeats them itself."""

    def __init__(self, iterator: RepeatableIterator, hooks: KerasHooks) -> None:
        self._iterator, self._hooks = iterator, hooks

    @property
    def spec(self) -> Any:
        return self._iterator.inner.element_spec

    def take(self) -> Taken:
        return _next(self._iterator.inner, self._hooks)

    def commit(self) -> None:
        self._iterator.commit()

    def renew(self) -> None:
        self._iterator.renew()


class _Kept(Batches):
    """The batches of any other iterator, which don't depend on the workers."""

    def __init__(self, iterator: Any, hooks: KerasHooks) -> None:
        self._iterator, self._hooks = iterator, hooks
        self._last: Taken | None = None

    def take(self) -> Taken:
        if self._last is None:
            self._last = _next(self._iterator, self._hooks)
        return self._last

    def commit(self) -> None:
        self._last = None

    def renew(self) -> None:
        pass


class _Global(Batches):
    """The global batches of `train_on_batch`."""

    def __init__(self, iterator: Any, hooks: KerasHooks) -> None:
        self._iterator, self._hooks = iterator, hooks
        self._last: list[Any] = []

    def take(self) -> Taken:
        if not self._last:
            self._last.append(next(self._iterator))
        return Taken(self._hooks.data.own_rows(self._last[0]), None)

    def commit(self) -> None:
        self._last.clear()

    def renew(self) -> None:
        pass


def batches_of(iterator: Any, hooks: KerasHooks) -> Batches:
    """Return the batches of what Keras calls a train function with."""
    if isinstance(iterator, RepeatableIterator):
        return _Repeatable(iterator, hooks)
    if is_of_fit(iterator):
        return _Kept(iterator, hooks)
    return _Global(iterator, hooks)


def is_of_fit(iterator: Any) -> bool:
    """Return whether an iterator is that of an epoch, and not one of `*_on_batch`."""
    known = (
        RepeatableIterator,
        BatchIterator,
        tf.data.Iterator,
        tf.distribute.DistributedIterator,
    )
    return isinstance(iterator, known)


def _next(iterator: Any, hooks: KerasHooks) -> Taken:
    # What a `BatchIterator` reports of its waiting doesn't count outside of steps.
    begin = time.time()
    batch = next(iterator)
    hooks.timer.waited(time.time() - begin, between=True)
    return Taken(batch, iterator.element_spec)
