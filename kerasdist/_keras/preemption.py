"""The continuation of a `fit` whose last workers were preempted, by the next start.

    all leave    sum the metrics ── the first member writes the state to a file
    next start   the same call of `fit` ── all take the state from the file ── the rest
                 of the epoch ── ... ── the file is removed

The state is the one that a worker gets which joins, with the metrics of the epoch so
far. Earlier calls of `fit` are run again, with the seed of the preempted job.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.context import current
from kerasdist._keras.data.arrays import RepeatableIterator
from kerasdist._keras.data.epoch_iterators import batch_size_of_fit, batches_of_fit
from kerasdist._keras.elastic import finished_calls, training_state
from kerasdist._keras.elastic.evaluation import MetricTotals, is_of_fit
from kerasdist._keras.elastic.finished_calls import fits_of, unfit
from kerasdist._keras.elastic.joining import depart
from kerasdist._keras.elastic.step import ContinuableStep
from kerasdist._keras.elastic.training_state import CheckpointFile, DataPlace
from kerasdist._keras.protocols import ElasticHooks, KerasHooks
from kerasdist._keras.shared_state import state_to_give
from kerasdist.collectives.row_exchange import Array
from kerasdist.errors import SnapshotError
from kerasdist.transport import log

if TYPE_CHECKING:
    from kerasdist.collectives.elastic.termination import Leaving

# The train function of a job of one worker, which the next start may continue.


class StepAlone(ContinuableStep):
    """Takes steps as in a job that isn't elastic: none is ever repeated.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        calls: Takes the steps of one execution.
    """

    def __init__(
        self, trainer: Any, hooks: KerasHooks, calls: Callable[[Any], Any]
    ) -> None:
        super().__init__(trainer, hooks, MetricTotals(list))
        self._communicator = hooks.workers.communicator
        self._calls = calls
        job: Any = hooks.workers.job
        self._leaving = job.leaving
        # By the type of an iterator: whether it's one of `fit`, and whether it counts
        # its batches. Asking costs as much as the rest of this module in a step.
        self._kinds: dict[type, tuple[bool, bool]] = {}

    def __call__(self, iterator: Any) -> Any:
        """See `ContinuableStep.__call__`."""
        kind = self._kinds.get(type(iterator))
        if kind is None:
            kind = is_of_fit(iterator), isinstance(iterator, RepeatableIterator)
            self._kinds[type(iterator)] = kind
        if not kind[0]:
            return self._calls(iterator)
        number = self._begin_step()
        wanted = self._leaving.wanted and current.iterator is not None
        # At the end of data no step follows: `fit` ends its epoch first.
        if wanted and not (kind[1] and not iterator.next_checksum()):
            depart(self._trainer, self._hooks, self, iterator, number)
        logs = self._calls(iterator)
        # The last execution of a pass may have had fewer; then none follows.
        steps = int(self._trainer.steps_per_execution)
        if kind[1]:
            for _ in range(steps):
                iterator.commit()
        self._totals.steps += steps
        self._communicator.step += steps
        return logs


def in_fit(hooks: KerasHooks) -> contextlib.AbstractContextManager[None]:
    """Let this worker have the time of a `fit` to leave, in the block."""
    leaving: Leaving | None = getattr(hooks.workers.job, "leaving", None)
    if leaving is None or leaving.termination is None:
        return contextlib.nullcontext()
    return leaving.termination.in_fit()


class Resumption:
    """The checkpoint of one call of `fit`: written, and continued from.

    Args:
        hooks: The hooks of the model's strategy.
        elastic: Their changes of membership.

    Attributes:
        due: Whether this call continues the one that was preempted, alike on all.
    """

    def __init__(self, hooks: KerasHooks, elastic: ElasticHooks) -> None:
        self._hooks = hooks
        self._elastic = elastic
        self._file: CheckpointFile = hooks.checkpoint
        self._kept = self._file.path.with_suffix(".kept.npz")
        resumes = hooks.workers.job.facts.get("resumes")
        self.due = resumes == fits_of(hooks)
        self._appending: list[Any] = []
        self._place: Any = None

    # The last workers leave.

    def keep(
        self, trainer: Any, step: ContinuableStep, iterator: Any, number: int
    ) -> None:
        """Write the state, on the first member; all call it alike, between two steps.

        Args:
            trainer: The model.
            step: Takes its steps.
            iterator: The iterator of the next step; None: the last epoch has ended.
            number: The number of that step in the epoch.
        """
        hooks = self._hooks
        variables = state_to_give(trainer)
        facts = training_state.collect(trainer, hooks, variables, iterator, number)
        steps, sums = step.sum_metrics()
        arrays = finished_calls.arrays_of(current.callbacks)
        facts |= {
            "seed": hooks.workers.job.facts["seed"],
            "data": _data(),
            "steps": steps,
            "metrics": _metrics(trainer),
            "callback_arrays": [
                [index, name, len(some)] for index, name, some in arrays
            ],
        }
        answer = _unknown(trainer, iterator)
        if not facts["communicator_step"]:
            # A file would bind the next start to this script for nothing.
            answer = "no step was taken"
        if iterator is not None:
            facts["checksum"] = 0 if answer else iterator.next_checksum()
        if not answer and hooks.gradients.save is not None:
            # What keeps it from being written keeps the checkpoint, too.
            with contextlib.suppress(OSError):
                hooks.gradients.save(trainer.trainable_variables, self._kept)
        while not answer:
            # Once more if the first member is lost before it has written the file.
            mine = ""
            if hooks.workers.rank == 0:
                state = [_tf.local_results(each)[0] for each in _state(trainer)]
                kept = [array for _, _, some in arrays for array in some]
                values = [np.asarray(each) for each in (*state, *kept, *sums)]
                mine = self._write(facts, values)
            answers = hooks.consensus.facts(mine)
            answer = next((text for text in answers.values() if text), "")
        text = (
            f"kerasdist: the job is preempted after step {facts['communicator_step']}"
        )
        if answer == str(self._file.path):
            text += f". The next start of this script continues there, from {answer}"
        else:
            text += f". The next start of this script begins from scratch: {answer}"
        hooks.log_once("preempted", text)

    def _write(self, facts: dict[str, Any], values: Sequence[Array]) -> str:
        """Write the file; return its path, or why it can't be written."""
        try:
            self._file.write(facts, values)
        except OSError as error:
            return f"{self._file.path} can't be written ({error.strerror or error})"
        return str(self._file.path)

    # The next start.

    def begin(self, callbacks: Sequence[Any]) -> None:
        """Let the callbacks continue their files as they begin."""
        for callback in callbacks if self.due else ():
            if isinstance(callback, keras.callbacks.CSVLogger) and not callback.append:
                callback.append = True
                self._appending.append(callback)

    def resume(
        self, trainer: Any, callbacks: Sequence[Any], step: ContinuableStep
    ) -> bool:
        """Take the state from the file, before the first step; all call it alike.

        Args:
            trainer: The model.
            callbacks: Those of this `fit`, which have begun.
            step: Takes its steps.

        Returns:
            Whether the `fit` was preempted after its last epoch: nothing is trained.

        Raises:
            SnapshotError: This call can't continue from the file.
        """
        hooks = self._hooks
        every = _state(trainer)
        epoch = None
        while epoch != self._elastic.epoch:
            # Again if the workers have changed meanwhile: then ranks are others.
            epoch = self._elastic.epoch
            root, facts, values = self._read(trainer, every, callbacks)
            hooks.state.share(every, root)
            forms = facts["arrays"][len(every) :]
            rest = values[len(every) :] or [
                np.empty(shape, np.dtype(name)) for name, shape in forms
            ]
            given = hooks.workers.communicator.broadcast(rest, root) if rest else []
            hooks.consensus.any_of(False)
        if hooks.gradients.load is not None:
            hooks.gradients.load(trainer.trainable_variables, self._kept)
        taken = iter(given)
        for index, name, count in facts["callback_arrays"]:
            setattr(callbacks[index], name, [next(taken) for _ in range(count)])
        step.set_metrics(facts["steps"], list(taken))
        for callback, named in zip(callbacks, facts["callbacks"], strict=True):
            # Those begin their windows of steps, or their file, again.
            is_logger = isinstance(callback, keras.callbacks.CSVLogger)
            if is_logger or hasattr(callback, "_adopt_state"):
                named[1] = {}
        finished = facts["place"] is None
        where = "at its end" if finished else f"in epoch {facts['epoch'] + 1}"
        training_state.apply(trainer, hooks, callbacks, facts, self._place, every)
        hooks.log_once(
            "resumed",
            f"kerasdist: `fit` continues after step {facts['communicator_step']}, "
            f"{where}, from {self._file.path}",
        )
        return finished

    def _read(
        self, trainer: Any, variables: Sequence[Any], callbacks: Sequence[Any]
    ) -> tuple[int, dict[str, Any], list[Array]]:
        """Return the rank with the newest file, the facts, and that rank's arrays.

        Of that rank, the variables are set.
        """
        hooks = self._hooks
        communicator = hooks.workers.communicator
        known = self._file.facts()
        saved = np.array([0.0 if known is None else known["saved"]])
        times = [float(each[0]) for each in communicator.all_gather(saved)]
        root = times.index(max(times))
        answer: list[Any] = []
        values: list[Array] = []
        if communicator.rank == root:
            try:
                facts, values = self._file.read() or (None, [])
                answer = ["", facts]
            except SnapshotError as error:
                answer = [str(error), None]
        given: list[Any] = [*hooks.consensus.facts(answer).values(), ["", None]]
        fault, found = next(filter(None, given))
        if fault:
            raise SnapshotError(fault)
        if found is None:
            raise self._file.unusable("it isn't there any more")
        objection = _objection(found, trainer, variables, callbacks)
        objection = objection or self._find_place(found)
        objections = hooks.consensus.facts(objection)
        refused = next((text for text in objections.values() if text), "")
        if refused:
            raise self._file.unusable(refused)
        for variable, value in zip(variables, values, strict=False):
            for copy in _tf.local_results(variable):
                copy.assign(tf.convert_to_tensor(value, copy.dtype))
        return root, found, values

    def _find_place(self, facts: dict[str, Any]) -> str:
        """Move to the place in the data; return why that isn't possible, or ""."""
        if facts["place"] is None:
            return ""
        self._place = DataPlace(self._hooks)
        reason = self._place.move_to(facts["place"])
        if reason:
            return f"here are {reason}"
        if self._place.iterator.next_checksum() != facts["checksum"]:
            return "it is of other data, or of data in another order"
        return ""

    def end(self) -> None:
        """Remove the file, after `fit` has ended."""
        for callback in self._appending:
            callback.append, callback.append_header = False, True
        if not self.due:
            return
        try:
            self._file.remove()
            self._kept.unlink(missing_ok=True)
        except OSError as error:
            log.log_in_background(
                logging.WARNING,
                "kerasdist: %s can't be removed (%s); remove it before the next start "
                "of this script, which would continue from it",
                *(self._file.path, error.strerror or error),
            )


def _state(trainer: Any) -> list[Any]:
    """Return the variables that are the same on all workers."""
    metrics = [variable.value for variable in trainer.metrics_variables]
    parts = tf.VariableAggregation.SUM
    shared = [each for each in metrics if each.aggregation != parts]
    return [*state_to_give(trainer), *shared]


def _unknown(trainer: Any, iterator: Any) -> str:
    """Return why the next start can't continue; an empty text if it can."""
    if iterator is not None and not isinstance(iterator, RepeatableIterator):
        return "each worker's own data can't be continued from their middle"
    if any(getattr(layer, "stateful", False) for layer in trainer._flatten_layers()):
        return "the states of stateful layers aren't kept"
    return ""


def _data() -> list[int | None]:
    return [batches_of_fit(), batch_size_of_fit()]


def _metrics(trainer: Any) -> list[Any]:
    return [[v.dtype, list(v.shape)] for v in trainer.metrics_variables]


def _objection(
    facts: dict[str, Any],
    trainer: Any,
    variables: Sequence[Any],
    callbacks: Sequence[Any],
) -> str:
    """Return why this `fit` can't continue; an empty text if it can."""
    forms = [[v.dtype.name, list(v.shape)] for v in variables]
    if facts["arrays"][: len(forms)] != forms or facts["metrics"] != _metrics(trainer):
        return "it is of a model with other variables"
    names = [name for name, _ in facts["callbacks"]]
    present = [type(callback).__name__ for callback in callbacks]
    if names != present:
        return f"it is of a `fit` with the callbacks {names}, and here are {present}"
    for callback, (name, state) in zip(callbacks, facts["callbacks"], strict=True):
        if fault := unfit(callback, state):
            return f"its state of the callback {name} has another {fault}"
    for index, name, _ in facts["callback_arrays"]:
        mine = vars(callbacks[index]).get(name, 0) if index < len(callbacks) else 0
        if not (mine is None or isinstance(mine, list)):
            return f"it has arrays {name!r} of a callback that hasn't any"
    pairs = zip(facts["data"], _data(), strict=True)
    # Of some data the number of batches is known after the first epoch.
    if any(one != other and None not in (one, other) for one, other in pairs):
        return (
            f"it is of data with {facts['data'][0]} batches of {facts['data'][1]} "
            f"rows, and here are {_data()[0]} of {_data()[1]}"
        )
    return ""
