"""The test and the predict function of a job whose workers may change."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from kerasdist._keras.context import setting
from kerasdist._keras.data.arrays import BatchIterator, RepeatableIterator
from kerasdist._keras.elastic.state.finished_calls import refuse_newcomer
from kerasdist._keras.protocols import ElasticHooks, KerasHooks, WorkerHooks
from kerasdist._tf.marks import PREDICTING_EPOCH

# Batches for steps that may be repeated.


class EvaluatedPart(NamedTuple):
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
        """See `EvaluatedPart.spec`."""
        return None

    @abc.abstractmethod
    def take(self) -> EvaluatedPart:
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

    def take(self) -> EvaluatedPart:
        return _next(self._iterator.inner, self._hooks)

    def commit(self) -> None:
        self._iterator.commit()

    def renew(self) -> None:
        self._iterator.renew()


class _KeptBatches(Batches):
    """The batches of any other iterator, which don't depend on the workers."""

    def __init__(self, iterator: Any, hooks: KerasHooks) -> None:
        self._iterator, self._hooks = iterator, hooks
        self._last: EvaluatedPart | None = None

    def take(self) -> EvaluatedPart:
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

    def take(self) -> EvaluatedPart:
        if not self._last:
            self._last.append(next(self._iterator))
        return EvaluatedPart(self._hooks.data.own_rows(self._last[0]), None)

    def commit(self) -> None:
        self._last.clear()

    def renew(self) -> None:
        pass


def batches_of(iterator: Any, hooks: KerasHooks) -> Batches:
    """Return the batches of what Keras calls a train function with."""
    if isinstance(iterator, RepeatableIterator):
        return _Repeatable(iterator, hooks)
    if is_of_fit(iterator):
        return _KeptBatches(iterator, hooks)
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


def _next(iterator: Any, hooks: KerasHooks) -> EvaluatedPart:
    # What a `BatchIterator` reports of its waiting doesn't count outside of steps.
    begin = time.time()
    batch = next(iterator)
    hooks.timer.waited(time.time() - begin, between=True)
    return EvaluatedPart(batch, iterator.element_spec)


# Calls that are begun again after a change of the workers.


class ByLayout:
    """A function that is made for each layout of the replicas.

    Args:
        workers: The workers and their replicas.
        make: Makes it for the present layout.
    """

    def __init__(
        self, workers: WorkerHooks, make: Callable[[], Callable[[Any], Any]]
    ) -> None:
        self._workers = workers
        self._make = make
        self._made: dict[Any, Callable[[Any], Any]] = {}

    def __call__(self, argument: Any) -> Any:
        """Call the function for the present layout."""
        layout = self._workers.rank, tuple(self._workers.job.replicas)
        if layout not in self._made:
            self._made[layout] = self._make()
        return self._made[layout](argument)


def repeated(elastic: ElasticHooks | None, call: Callable[[], Any]) -> Any:
    """Return what a call returns whose workers stay the same from beginning to end.

    Args:
        elastic: The changes of membership; None if there are none.
        call: May be called several times, and must begin at the same state itself.
    """
    if elastic is None:
        return call()
    while True:
        try:
            with elastic.section():
                return call()
        except Exception as error:
            if not elastic.has_changed(error):
                raise


def test_function(
    trainer: Any, hooks: KerasHooks, make: Callable[[], Callable[[Any], Any]]
) -> Callable[[Any], Any]:
    """Return a test function that is made for each layout of the replicas.

    `evaluate` is begun again as a whole. `test_on_batch`, whose metrics are reset
    before, is repeated here.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        make: Makes a function for the present layout.
    """
    calls = ByLayout(hooks.workers, make)

    def call(iterator: Any) -> Any:
        if is_of_fit(iterator):
            return calls(iterator)
        refuse_newcomer(hooks, "test_on_batch")
        batches = list(iterator)

        def test() -> Any:
            trainer.reset_metrics()
            return calls(iter(batches))

        with setting(evaluating=True):
            return repeated(hooks.elastic, test)

    return call


def renew_prediction(trainer: Any, hooks: KerasHooks) -> None:
    """Let the predict function be made again if it was for other workers."""
    if hooks.elastic is None:
        return
    if PREDICTING_EPOCH.get(trainer) != hooks.elastic.epoch:
        trainer.predict_function = None
        PREDICTING_EPOCH.set(trainer, hooks.elastic.epoch)
