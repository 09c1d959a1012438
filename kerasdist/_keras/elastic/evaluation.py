"""The test and the predict function of a job whose workers may change."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.context import setting
from kerasdist._keras.data.arrays import BatchIterator, RepeatableIterator
from kerasdist._keras.elastic.finished_calls import refuse_newcomer
from kerasdist._keras.protocols import ElasticHooks, KerasHooks, WorkerHooks
from kerasdist._tf.variables import PREDICTING_EPOCH

# The state of metrics over all workers, so that a lost worker's part isn't lost.
#
# Each replica's metrics hold its own part, and reading them sums over all replicas.
# Each step ends with a collective of all parts, which is its commit:
#
#     1. forward, gradients               perhaps with collectives of their own
#     2. totals := sum over the workers   the last collective: finished on all, or none
#     3. update
#
# The parts are summed beside the last gradients where that's possible (`parts`,
# `keep`), and by a collective of their own elsewhere (`commit`).
#
# After a change of the workers the chief's metrics hold the totals, and the others' 0.
# Parts of more than 64 KB are summed in every k-th step alone; in the others the commit
# is a collective of one number. Then each worker adds what it has counted since.

# Bytes of all parts that are summed in each step.
_MOST = 65_536


class MetricTotals:
    """The sums of a model's metrics over all replicas, after the last steps.

    Args:
        sum_over_workers: Sums host tensors over the workers.

    Attributes:
        steps: How many steps were finished since the metrics were reset.
    """

    def __init__(self, sum_over_workers: Callable[[Sequence[Any]], list[Any]]) -> None:
        self._sum = sum_over_workers
        self._host = _tf.host_of("/device:CPU:0")
        # By dtype: the sums, and this worker's part of them.
        self._totals: dict[Any, tuple[Any, Any]] = {}
        # Steps before this one, in graphs.
        self._count = _tf.own_variable(0, tf.int64)
        self._interval = 1
        self.reset()

    def reset(self) -> None:
        """Begin with metrics that are 0 on all workers."""
        self.steps = 0
        self._begin(0)

    def _begin(self, missing: int) -> None:
        """Sum in the next step, which all workers count as the first one."""
        self._first, self._missing = self.steps, missing
        self._count.assign(0)

    @property
    def missing(self) -> int:
        """The number of the last steps that the totals don't include."""
        steps = self.steps - self._first
        return (steps - 1) % self._interval if steps else self._missing

    def commit(self, metrics: Sequence[Sequence[Any]]) -> list[Any]:
        """Sum over the workers, at the end of a step: in its graph, or eagerly.

        Args:
            metrics: The copies of each variable that is summed over the replicas.

        Returns:
            Tensors that are there when the step is committed.
        """
        self._prepare(metrics)
        with tf.device(self._host):
            if not metrics:
                return self._sum([tf.zeros([1])])
            if self._interval == 1:
                return self._sum_parts(metrics)
            count = self._count.assign_add(1, read_value=True) - 1
            return [
                tf.cond(
                    tf.equal(count % self._interval, 0),
                    lambda: tf.size(self._sum_parts(metrics)[0]),
                    lambda: tf.size(self._sum([tf.zeros([1])])[0]),
                )
            ]

    def _prepare(self, metrics: Sequence[Sequence[Any]]) -> None:
        size = sum(_tf.bytes_of(copies[0]) for copies in metrics)
        self._interval = max(-(-size // _MOST), 1)
        for dtype in _by_dtype(metrics):
            self._make(dtype)

    def _make(self, dtype: Any) -> None:
        if dtype not in self._totals:
            kept = [_tf.variable_of_any_shape(dtype, self._host) for _ in range(2)]
            self._totals[dtype] = kept[0], kept[1]

    def parts(self, metrics: Sequence[Sequence[Any]]) -> dict[Any, Any]:
        """Return this worker's part for another collective, whose sums `keep` takes.

        Args:
            metrics: As for `commit`.

        Returns:
            One vector for each dtype; none if this step's parts aren't summed, or
            there are none.
        """
        self._prepare(metrics)
        if self._interval > 1:
            return {}
        with tf.device(self._host):
            return _flat(metrics)

    def keep(self, parts: dict[Any, Any], sums: Sequence[Any]) -> None:
        """Keep the sums of parts over the workers, in the step's graph."""
        # XLA can't change the shape of a variable.
        with tf.device(self._host), _tf.outside_of_xla():
            for (dtype, part), total in zip(parts.items(), sums, strict=True):
                self._set(dtype, total, part)

    def _sum_parts(self, metrics: Sequence[Sequence[Any]]) -> list[Any]:
        flat = _flat(metrics)
        sums = self._sum(list(flat.values()))
        self.keep(flat, sums)
        return sums

    def _set(self, dtype: Any, total: Any, part: Any) -> None:
        for kept, value in zip(self._totals[dtype], (total, part), strict=True):
            kept.assign(value, read_value=False)

    def sums(self, metrics: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the sums over the workers of all parts, a vector by dtype; eagerly."""
        with tf.device(self._host):
            flat = _flat(metrics)
            return self._sum(list(flat.values())) if flat else []

    def set(
        self,
        metrics: Sequence[Sequence[Any]],
        sums: Sequence[Any],
        steps: int,
        *,
        chief: bool,
    ) -> None:
        """Continue from the `sums` of other workers, which are the chief's; eagerly.

        Args:
            metrics: As for `commit`.
            sums: The sums.
            steps: See the attribute.
            chief: Whether this worker is the chief.
        """
        self.steps = steps
        for (dtype, some), total in zip(_by_dtype(metrics).items(), sums, strict=True):
            self._make(dtype)
            mine = total if chief else tf.zeros_like(total)
            self._set(dtype, total, mine)
            _assign(some, mine)
        self._begin(0)

    def divide(self, metrics: Sequence[Sequence[Any]], *, chief: bool) -> None:
        """Divide the totals among other workers: they are the chief's; eagerly.

        What a worker has counted since the totals were summed stays with it.

        Args:
            metrics: As for `commit`.
            chief: Whether this worker is the chief.
        """
        if self.steps:
            for dtype, present in _flat(metrics).items():
                total, part = (kept.read_value() for kept in self._totals[dtype])
                mine = total if chief else tf.zeros_like(total)
                self._totals[dtype][1].assign(mine)
                value = mine + present - part if self.missing else mine
                _assign(_by_dtype(metrics)[dtype], value)
        self._begin(self.missing)


def _by_dtype(metrics: Sequence[Sequence[Any]]) -> dict[Any, list[Sequence[Any]]]:
    found: dict[Any, list[Sequence[Any]]] = {}
    for copies in metrics:
        found.setdefault(copies[0].dtype, []).append(copies)
    return found


def _flat(metrics: Sequence[Sequence[Any]]) -> dict[Any, Any]:
    """Return this worker's part, one vector for each dtype."""
    found = {}
    for dtype, some in _by_dtype(metrics).items():
        parts = []
        for copies in some:
            flat = [tf.reshape(copy.read_value(), [-1]) for copy in copies]
            parts.append(flat[0] if len(flat) == 1 else tf.add_n(flat))
        found[dtype] = tf.concat(parts, 0)
    return found


def _assign(metrics: Sequence[Sequence[Any]], flat: Any) -> None:
    """Set variables to the parts of a vector, on the first local replica."""
    sizes = [copies[0].shape.num_elements() for copies in metrics]
    for copies, part in zip(metrics, tf.split(flat, sizes), strict=True):
        copies[0].assign(tf.reshape(part, copies[0].shape))
        for copy in copies[1:]:
            copy.assign(tf.zeros_like(copy))


# Batches for steps that may be repeated.


class EvaluatedPart(NamedTuple):
    """A worker's part of a batch.

    Attributes:
        batch: As the strategy's `run` takes it; None: the step is only to be traced.
        spec: The specification of all of the iterator's batches; None: not known.
    """

    batch: Any
    spec: Any


class Batches:
    """Batches that are taken one by one, and again unless committed.

    Args:
        iterator: What Keras calls a train function with: an iterator that repeats its
            batches itself, any other one of `fit`, whose batches don't depend on the
            workers, or the global batches of `train_on_batch`.
        hooks: The hooks of the strategy.
    """

    def __init__(self, iterator: Any, hooks: KerasHooks) -> None:
        self._iterator, self._hooks = iterator, hooks
        self._repeats = isinstance(iterator, RepeatableIterator)
        self._of_fit = is_of_fit(iterator)
        self._last: list[Any] = []

    @property
    def spec(self) -> Any:
        """See `EvaluatedPart.spec`."""
        return self._iterator.inner.element_spec if self._repeats else None

    def take(self) -> EvaluatedPart:
        """Take the next batch, outside of a section; at the end StopIteration."""
        if self._repeats:
            return _next(self._iterator.inner, self._hooks)
        if not self._last and self._of_fit:
            self._last.append(_next(self._iterator, self._hooks))
        elif not self._last:
            self._last.append(next(self._iterator))
        (last,) = self._last
        if self._of_fit:
            return last
        return EvaluatedPart(self._hooks.data.own_rows(last), None)

    def commit(self) -> None:
        """Count the last batch as used up."""
        self._last.clear()
        if self._repeats:
            self._iterator.commit()

    def renew(self) -> None:
        """Let `take` return the last batch again, unless it was committed."""
        if self._repeats:
            self._iterator.renew()


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


def by_layout(
    workers: WorkerHooks, make: Callable[[], Callable[[Any], Any]]
) -> Callable[[Any], Any]:
    """Return a function that is made for each layout of the replicas.

    Args:
        workers: The workers and their replicas.
        make: Makes it for the present layout.
    """
    made = functools.cache(lambda *layout: make())
    return lambda argument: made(workers.rank, *workers.job.replicas)(argument)


def repeated(
    elastic: ElasticHooks | None,
    call: Callable[[], Any],
    before: Callable[[], None] = lambda: None,
) -> Any:
    """Return what a call returns whose workers stay the same from beginning to end.

    Args:
        elastic: The changes of membership; None if there are none.
        call: May be called several times, and must begin at the same state itself.
        before: Is called each time before it, whether or not the workers change.
    """
    if elastic is None:
        return call()
    while True:
        before()
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
    calls = by_layout(hooks.workers, make)

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
