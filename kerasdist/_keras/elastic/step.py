"""The train function of a job whose workers may change: it repeats unfinished steps.

    take a batch ── section ───────────────────────────── commit the batch
                    keep the state, step, metric totals
                        │
                        └ a change of the workers: restore the state, renew the batch,
                          the step again, traced for the new layout of the replicas

Keras's loop doesn't notice it. A graph is one step, whatever `steps_per_execution`: it
is called as often, and the data may end in between.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.chief_failover import take_over
from kerasdist._keras.context import current
from kerasdist._keras.elastic.evaluation import (
    Batches,
    EvaluatedPart,
    MetricTotals,
    by_layout,
    is_of_fit,
    repeated,
)
from kerasdist._keras.elastic.finished_calls import refuse_newcomer
from kerasdist._keras.elastic.joining import Admission
from kerasdist._keras.protocols import ElasticHooks, KerasHooks, translating
from kerasdist._keras.shared_state import updated_state, whole_state
from kerasdist._tf.tensor_origins import reads_or_writes

# A train function whose `fit` another process can continue, between two steps.


class ContinuableStep(abc.ABC):
    """Takes steps of training on an iterator's batches.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        totals: The sums of its metrics over all replicas.
    """

    def __init__(self, trainer: Any, hooks: KerasHooks, totals: MetricTotals) -> None:
        self._trainer = trainer
        self._hooks = hooks
        self._totals = totals

    @abc.abstractmethod
    def __call__(self, iterator: Any) -> Any:
        """Take the steps of one execution; return the last one's logs.

        Raises:
            StopIteration, tf.errors.OutOfRangeError: There's no batch.
        """

    def begin(self) -> None:
        """Begin with metrics that are reset."""
        self._totals.reset()

    def prepare(self, iterator: Any) -> None:  # noqa: B027 - only some have to
        """Trace a step on the batches of an iterator, for the present layout."""

    def read_metrics(self, read: Callable[[], Any]) -> Any:
        """Return what `read` does, of metrics over all workers; it may be repeated.

        The metrics are reset next.
        """
        result = self._with_present(read)
        self._totals.reset()
        return result

    def sum_metrics(self) -> tuple[int, list[Any]]:
        """Return the steps of this epoch's metrics, and their sums over all workers.

        All call it alike, between two steps.
        """
        totals = self._totals
        found: tuple[int, list[Any]] = self._with_present(
            lambda: (totals.steps, totals.sums(self._metrics()))
        )
        return found

    def set_metrics(self, steps: int, sums: Sequence[Any]) -> None:
        """Continue from what `sum_metrics` has returned in other workers."""
        chief = self._hooks.workers.rank == 0
        self._totals.set(self._metrics(), sums, steps, chief=chief)

    def _with_present(self, call: Callable[[], Any]) -> Any:
        """Call a function that communicates, again if the workers change in it."""
        return call()

    def _begin_step(self) -> int:
        """Begin a step of `fit`; return its number in the epoch.

        That isn't known in the first step of a worker that has joined.
        """
        if current.resumed is not None:
            current.resumed()
            current.resumed = None
        return self._totals.steps

    def _metrics(self) -> list[Sequence[Any]]:
        """Return the copies of all metric variables that reading sums."""
        variables = [variable.value for variable in self._trainer.metrics_variables]
        return [
            _tf.local_results(variable)
            for variable in variables
            if variable.aggregation == tf.VariableAggregation.SUM
        ]


# Copies of variables as they were at the beginning of a step.


class Shadow:
    """The values that variables had at the beginning of a step, to restore them.

    A value shares its memory with the variable until the variable is overwritten, which
    makes TensorFlow write to other memory instead of the same.
    """

    def __init__(self) -> None:
        # By identity: variables can't be compared. Each with its copy.
        self._kept: dict[int, tuple[Any, Any]] = {}

    def save(self, variables: Sequence[Any]) -> list[Any]:
        """Keep the values, in a step's graph or eagerly.

        Args:
            variables: TensorFlow's variables, each on one device.

        Returns:
            Operations that the step must wait for: one that has failed could have
            overwritten a variable that isn't kept yet.
        """
        operations = []
        for variable in variables:
            if id(variable) not in self._kept:
                kept = _tf.variable_of_any_shape(variable.dtype, variable.device)
                self._kept[id(variable)] = variable, kept
            with tf.device(variable.device):
                kept = self._kept[id(variable)][1]
                done = kept.assign(variable.read_value(), read_value=False)
            if done is not None:
                operations.append(done)
        return operations

    def restore(self, variables: Sequence[Any]) -> None:
        """Give variables the values that `save` has kept, eagerly."""
        for variable in variables:
            with tf.device(variable.device):
                variable.assign(self._kept[id(variable)][1].read_value())


# Updates of the weights that wait for the commit of their step.
#
# A step that ends before its commit then hasn't changed what an optimizer updates: no
# `Shadow` of it is kept, which would cost a copy, because values that are kept aren't
# overwritten in place.
#
#     forward, gradients ── metrics ── reduce both: the commit ── updates
#                        └ `apply` returns here, and does its work there
#
# That a step mustn't notice: while it is traced, operations are looked for that read or
# write these variables after `apply`, or write them before. A step with one is traced
# again with all updates where they are.


class LateUpdates:
    """The updates of one replica's step, which is being traced.

    Args:
        variables: TensorFlow's variables that optimizers update, as they are on this
            replica.
        parts: Returns what the last reduction is to sum beside gradients.
        commit: Is given the sums; returns what the updates wait for.

    Attributes:
        noticed: Whether the step would notice that updates are late.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        parts: Callable[[], Sequence[Any]],
        commit: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> None:
        self._variables = variables
        self._parts = parts
        self._commit = commit
        self._graph = tf.compat.v1.get_default_graph()
        self._before = len(self._graph.get_operations())
        self._first: int | None = None
        self._updates: list[tuple[Callable[..., Any], Callable[[Any], Any]]] = []
        self.noticed = False

    def add(
        self, reduce: Callable[..., list[Any]], update: Callable[[list[Any]], Any]
    ) -> bool:
        """Let an update run at the end of the step; return whether that's possible.

        Args:
            reduce: Reduces gradients; is given what it sums beside them, whose sums it
                returns after its results.
            update: Is given the reduced gradients.
        """
        graph = tf.compat.v1.get_default_graph()
        if graph is not self._graph:
            self.noticed = True  # in a branch, or a function of its own
            return False
        if self._first is None:
            self._first = len(graph.get_operations())
        self._updates.append((reduce, update))
        return True

    def finish(self) -> None:
        """Commit the step, and run its updates."""
        operations = self._graph.get_operations()[self._before :]
        first = len(operations) if self._first is None else self._first - self._before
        _, written = reads_or_writes(self._graph, operations[:first], self._variables)
        after = reads_or_writes(self._graph, operations[first:], self._variables)
        self.noticed |= written or any(after)
        parts: Sequence[Any] = self._parts() if self._updates else ()
        sums: Sequence[Any] = ()
        reduced = []
        for number, (reduce, _) in enumerate(self._updates, 1):
            beside = parts if number == len(self._updates) else ()
            results = reduce(beside=beside)
            end = len(results) - len(beside)
            sums = results[end:]
            reduced.append(results[:end])
        with tf.control_dependencies(self._commit(sums)):
            for (_, update), gradients in zip(self._updates, reduced, strict=True):
                update(gradients)


_Calls = Callable[[Any], Any]


class _OutdatedError(Exception):
    """The workers have changed since the step was prepared; nothing has run."""


class ElasticStep(ContinuableStep):
    """Takes steps of training on an iterator's batches.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        elastic: Their changes of membership.
        make_function: Makes a function that takes one step on a list of one batch.
        instrument: Returns a function that calls the one that its argument makes.
    """

    def __init__(
        self,
        trainer: Any,
        hooks: KerasHooks,
        elastic: ElasticHooks,
        make_function: Callable[[], _Calls],
        instrument: Callable[[Callable[[], _Calls]], _Calls],
    ) -> None:
        super().__init__(trainer, hooks, MetricTotals(hooks.state.sum_over_workers))
        self._elastic = elastic
        self._make_function = make_function
        # Whether updates wait for the commit, and those of the step in the trace.
        self._late = True
        self._traced: list[LateUpdates] = []
        self._epoch = elastic.epoch
        self._ranks = tuple(hooks.workers.communicator.ranks)
        self._calls = by_layout(hooks.workers, lambda: instrument(self._make))
        self._shadow = Shadow()
        # The variables that the running step has kept.
        self._saved: list[Any] = []
        self._admission = Admission(trainer, hooks, elastic)

    def __call__(self, iterator: Any) -> Any:
        """See `ContinuableStep.__call__`."""
        with translating(self._hooks.workers.failure):
            return self._take_steps(iterator)

    def _take_steps(self, iterator: Any) -> Any:
        batches = Batches(iterator, self._hooks)
        if not is_of_fit(iterator):
            refuse_newcomer(self._hooks, "train_on_batch")
        else:
            self._change_members(iterator, self._begin_step())
        logs = None
        for number in range(int(self._trainer.steps_per_execution)):
            try:
                logs = self._take_step(batches)
            except (StopIteration, tf.errors.OutOfRangeError):
                if number == 0:
                    raise
                break
        if is_of_fit(iterator):
            return logs
        return self._trainer._get_metrics_result_or_logs(logs)

    def _change_members(self, iterator: Any, number: int) -> None:
        """Let workers join or leave before a step of `fit`, if it's time to."""
        if self._admission.poll(self, iterator, number):
            # The others may be lost before the newcomers' first commit.
            steps, sums = self.sum_metrics()
            self.set_metrics(int(self._hooks.consensus.of_chief(steps)), sums)
            self._elastic.finish_joining()

    def prepare(self, iterator: Any) -> None:
        """See `ContinuableStep.prepare`."""
        spec = Batches(iterator, self._hooks).spec
        if spec is None or self._trainer.run_eagerly or self._hooks.timer.running:
            return
        with translating(self._hooks.workers.failure):
            self._calls(EvaluatedPart(None, spec))

    def _with_present(self, call: Callable[[], Any]) -> Any:
        def checked() -> Any:
            self._check()
            return call()

        while True:
            with contextlib.suppress(_OutdatedError):
                return repeated(self._elastic, checked, self._adapt_to_members)

    def _take_step(self, batches: Batches) -> Any:
        """Take a step on the next batch, as often as the workers change in it."""
        workers = self._hooks.workers
        while True:
            self._adapt_to_members()
            began, changes = time.monotonic(), len(self._elastic.changes)
            before = workers.communicator.step
            self._saved = []
            try:
                taken = batches.take()
                self._check()
                logs = self._calls(taken)
            except _OutdatedError:
                batches.renew()
                continue
            except Exception as error:
                if not self._elastic.has_changed(error):
                    raise
                self._shadow.restore(self._saved)
                workers.communicator.step = before
                pauses = (each.seconds for each in self._elastic.changes[changes:])
                taken_so_far = time.monotonic() - began - sum(pauses)
                self._hooks.timer.repeated(max(taken_so_far, 0.0))
                batches.renew()
                continue
            self._totals.steps += 1
            # A worker that is alone reduces nothing.
            workers.communicator.step = max(before + 1, workers.communicator.step)
            batches.commit()
            return logs

    def _adapt_to_members(self) -> None:
        """Adapt to a change of the workers, if there was one."""
        if self._epoch == self._elastic.epoch:
            return
        self._epoch = self._elastic.epoch
        workers = self._hooks.workers
        missing, before = self._totals.missing, self._ranks
        self._ranks = tuple(workers.communicator.ranks)
        if missing and not set(before) <= set(self._ranks):
            steps = "step" if missing == 1 else f"{missing} steps"
            self._hooks.log_once(
                f"missing {self._epoch}",
                "kerasdist: the metrics are so large that they are summed over the "
                "workers every few steps: what the lost worker counted in the last "
                f"{steps} isn't in this epoch's metrics.",
            )
        self._totals.divide(self._metrics(), chief=workers.rank == 0)
        if self._hooks.gradients.memories.variables:
            self._hooks.gradients.memories.restart(self._saved)
            self._hooks.log_once(
                f"kept {self._epoch}",
                "kerasdist: what a lost worker hadn't sent yet of its gradients is "
                "lost, and a new worker begins with nothing; the others keep theirs.",
            )
        take_over()

    def _check(self) -> None:
        if self._epoch != self._elastic.epoch:
            raise _OutdatedError

    def late_updates(self) -> LateUpdates | None:
        """Return the late updates of the replica whose step is traced, if they are."""
        if tf.executing_eagerly() or not self._late:
            return None
        own = [_tf.copy_here(variable) for variable in updated_state(self._trainer)]
        flat: dict[Any, Any] = {}

        def parts() -> list[Any]:
            if self._hooks.workers.local_replicas == 1:
                flat.update(self._totals.parts(self._metrics()))
            return list(flat.values())

        def commit(sums: Sequence[Any]) -> Sequence[Any]:
            if not flat:
                return self._commit()
            self._totals.keep(flat, sums)
            return sums

        made = LateUpdates(own, parts, commit)
        self._traced.append(made)
        return made

    def _make(self) -> _Calls:
        """Return a function that takes one step, for the present layout."""
        made = self._make_graph()
        # The last specification, and its graph: a comparison of two is slow.
        last: list[Any] = [None, None]

        def trace(batch: Any) -> Any:
            nonlocal made
            self._traced.clear()
            kept = len(self._hooks.gradients.memories.variables)
            found = made[0].get_concrete_function(batch)
            is_noticed = any(updates.noticed for updates in self._traced)
            # A step must be able to restore all that it changes.
            if is_noticed or len(self._hooks.gradients.memories.variables) > kept:
                self._late = self._late and not is_noticed
                made = self._make_graph()
                found = made[0].get_concrete_function(batch)
            self._traced.clear()
            return found

        def run(taken: EvaluatedPart) -> Any:
            batch, spec = taken
            if self._trainer.run_eagerly:
                call = made[0]
            elif spec is None:
                call = trace(batch)
            else:
                if spec is not last[0]:
                    last[:] = spec, trace(spec)
                call = last[1]
            if batch is None:
                return None
            # Tracing isn't in the section: collectives in it, of variables that are
            # created, are repeated by themselves.
            with self._elastic.section():
                self._check()
                self._saved = made[1]
                return call(batch)

        return run

    def _make_graph(self) -> tuple[Any, list[Any]]:
        """Return a function of one step, and the variables that it keeps."""
        function = self._make_function()
        saved: list[Any] = []
        late = self._late and not self._trainer.run_eagerly

        def step(batch: Any) -> Any:
            state = [
                *whole_state(self._trainer),
                *self._hooks.gradients.memories.variables,
            ]
            if late:
                updated = {id(variable) for variable in updated_state(self._trainer)}
                state = [each for each in state if id(each) not in updated]
            saved[:] = [copy for each in state for copy in _tf.local_results(each)]
            with tf.control_dependencies(self._shadow.save(saved)):
                logs = function([batch])
            if not late:
                self._totals.commit(self._metrics())
            return logs

        if self._trainer.run_eagerly:
            return step, saved
        return tf.function(step, autograph=False, reduce_retracing=True), saved

    def _commit(self) -> Sequence[Any]:
        """Commit a step in replica context; return what there is afterwards."""
        if self._hooks.workers.local_replicas == 1:
            return self._totals.commit(self._metrics())

        def merge(_: Any) -> Any:
            with tf.control_dependencies(self._totals.commit(self._metrics())):
                return tf.constant(0)

        return [tf.distribute.get_replica_context().merge_call(merge)]
