"""The loops of `fit`, `evaluate` and `predict`, around their steps.

    fit ── begin_training ── before_first_step ── steps ─────── finish_epoch ── ...
           makes the step    all hold the same    `trainer`     sums over workers

`evaluate` and `predict` print by `on_chief_only`.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras.src.utils import io_utils

from kerasdist._keras.chief_failover import ChiefFailover, take_over
from kerasdist._keras.context import current, setting
from kerasdist._keras.data.arrays import uses_of
from kerasdist._keras.data.epoch_iterators import ending_threads_after_error
from kerasdist._keras.data.pydataset import closing_readers
from kerasdist._keras.elastic.evaluation import renew_prediction, repeated
from kerasdist._keras.elastic.finished_calls import (
    adopt,
    calls_of,
    changed,
    numbers_of_one,
    plain,
    refuse_newcomer,
)
from kerasdist._keras.elastic.joining import depart, join
from kerasdist._keras.elastic.step import ContinuableStep
from kerasdist._keras.elastic.training_state import leave_out_epochs
from kerasdist._keras.file_writers import note_own_files
from kerasdist._keras.placement.trainer import failure_behind
from kerasdist._keras.preemption import Resumption, in_fit
from kerasdist._keras.protocols import (
    KerasHooks,
    hooks_of,
    timer_of,
    translating,
)
from kerasdist._keras.shared_state import (
    JobCallback,
    chiefs_state,
    share_state,
    state_of,
    statistics_of,
    take_epoch,
)
from kerasdist._keras.training.logs import numbers_of, whole_logs
from kerasdist._keras.training.optimizers import open_window
from kerasdist._keras.training.weight_updates import embedding_tables, moves_all_rows
from kerasdist._keras.unscoped_models import warn_if_outside
from kerasdist._tf.patching import Original
from kerasdist.transport import log

# The check that all workers look up the same words.
#
# A vocabulary that a script makes of a `set` has another order in each process, unless
# all have the same PYTHONHASHSEED.


def check_vocabularies(trainer: Any, hooks: KerasHooks) -> None:
    """Check the lookup layers before the first step; all workers call it alike.

    Raises:
        ValueError: The workers' vocabularies differ. All workers raise it.
    """
    mine = {
        layer.name: _digest(layer.get_vocabulary())
        for layer in trainer._flatten_layers()
        if callable(getattr(layer, "get_vocabulary", None))
    }
    if not mine:
        return
    every = hooks.consensus.facts(mine)
    first = every[min(every)]
    layers = sorted({n for each in every.values() for n in each if each != first})
    differing = [
        name
        for name in layers
        if any(e.get(name) != first.get(name) for e in every.values())
    ]
    if differing:
        ranks = [rank for rank, each in sorted(every.items()) if each != first]
        raise ValueError(
            "The workers look up words in different vocabularies. Received: the layers "
            f"{differing} of ranks {ranks} have other words, or another order, than "
            f"rank {min(every)}'s. Give all workers the same list: sort it "
            "(`sorted(set(words))`; the order of a `set` differs between processes). "
            "Or set the environment variable PYTHONHASHSEED to one number on all "
            "workers, as `kerasdist run` does."
        )


def _digest(words: Any) -> str:
    return hashlib.sha256(json.dumps(list(words), default=str).encode()).hexdigest()


# The progress bar of a job in which another worker may become the chief.


class ChiefProgressBar(keras.callbacks.ProgbarLogger):
    """A progress bar that only the present chief shows.

    A new chief shows it from the present step on.

    Args:
        rank: Returns this worker's rank, which may change.
    """

    # As the one that Keras adds: callbacks may be called in the background.
    async_safe = True

    def __init__(self, rank: Callable[[], int]) -> None:
        self._rank = rank
        self._given = 1
        # The number of the epoch whose line wasn't printed.
        self._unseen: int | None = None
        super().__init__()

    @property
    def verbose(self) -> Any:
        """The script's on the chief, else 0."""
        return self._given if self._rank() == 0 else 0

    @verbose.setter
    def verbose(self, value: Any) -> None:
        self._given = value

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_epoch_begin`."""
        self._unseen = None if self.verbose else epoch
        super().on_epoch_begin(epoch, logs)

    def _update_progbar(self, batch: int, logs: Any = None) -> None:
        self._appear()
        super()._update_progbar(batch, logs)

    def _finalize_progbar(self, logs: Any) -> None:
        self._appear()
        super()._finalize_progbar(logs)

    def _appear(self) -> None:
        """Show a bar that was begun before this worker became the chief."""
        if self.progbar is None or self.progbar.verbose == self.verbose:
            return
        self.progbar.verbose = self.verbose
        if self._unseen is not None and self.epochs > 1:
            io_utils.print_msg(f"Epoch {self._unseen + 1}/{self.epochs}")
        self._unseen = None


def show_on_chief(arguments: dict[str, Any], rank: Callable[[], int]) -> bool:
    """Add such a progress bar to the arguments of `fit`, `evaluate` or `predict`.

    Args:
        arguments: The arguments, which are changed.
        rank: Returns this worker's rank.

    Returns:
        Whether this was possible: not if a bar is among the script's own callbacks.
    """
    given = arguments.get("callbacks")
    if arguments.get("verbose", "auto") == 0:
        return True
    if isinstance(given, keras.callbacks.CallbackList):
        # An evaluation in `fit`, with its callbacks.
        return any(isinstance(each, ChiefProgressBar) for each in given.callbacks)
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    found = [each for each in found if each is not None]
    if any(isinstance(each, keras.callbacks.ProgbarLogger) for each in found):
        return False
    arguments["callbacks"] = [*found, ChiefProgressBar(rank)]
    return True


def without_bars(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks other than progress bars.

    Those belong to the state of the training, and are the same on all workers. A bar is
    often shown on the chief alone, by `verbose=2 if strategy.is_chief else 0`.
    """
    bar = keras.callbacks.ProgbarLogger
    return [each for each in callbacks if not isinstance(each, bar)]


def finish_epoch(original: Original, trainer: Any, logs: Any) -> Any:
    """Replace `_get_metrics_result_or_logs`: return an epoch's logs of all workers.

    Metric state is summed over the workers as it's read. Logs that Keras leaves
    unchanged are reduced, see `logs`, and so are the statistics that each replica keeps
    for itself.
    """
    hooks = hooks_of(trainer.distribute_strategy)
    if hooks is None:
        return original(trainer, logs)
    dynamic = hooks.dynamic
    statistics = statistics_of(trainer)
    if dynamic is not None and current.fitting and not current.evaluating:
        dynamic.end_epoch(statistics)
        dynamic.weights.average_own(open_window(trainer.optimizer))
        # A worker that took no step has no logs.
        return numbers_of(original(trainer, whole_logs(trainer, hooks, logs)))
    step = None if current.evaluating else _continuable_step_of(trainer)

    def read() -> tuple[Any, Any]:
        found = original(trainer, logs)
        return found, numbers_of(found)

    found, result = read() if step is None else step.read_metrics(read)
    if hooks.workers.replicas == 1:
        return result
    if hooks.local is not None and current.fitting and not current.evaluating:
        hooks.local.end_epoch(trainer)
    hooks.consensus.average(statistics)
    flush_accumulators(hooks, trainer)
    if current.fitting and not current.evaluating:
        if left := chiefs_state(trainer):
            hooks.state.share(left, 0)
        hooks.state.check(*state_of(trainer, only_weights=False), epoch=current.epoch)
        hooks.data.end_epoch()
    return whole_logs(trainer, hooks, logs) if found is logs else result


def flush_accumulators(hooks: KerasHooks, trainer: Any) -> None:
    """Set open accumulators to their mean over the replicas of one window."""
    # Asynchronous workers' windows are their own: others may have no open one.
    average = hooks.consensus.average
    if hooks.dynamic is not None:
        average = hooks.dynamic.weights.average_own
    average(open_window(trainer.optimizer))


def begin_training(original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `make_train_function`: warn of a model created outside of the scope."""
    hooks = hooks_of(trainer.distribute_strategy)
    warn_if_outside(trainer)
    alone = contextlib.nullcontext() if hooks is None else hooks.workers.local_step()
    with setting(training=True), alone:
        made = original(trainer, *args, **kwargs)
    step = None if hooks is None else _continuable_step_of(trainer)
    if step is not None:
        step.begin()
    return made


def before_first_step(trainer: Any, callbacks: Sequence[Any]) -> Any:
    """Make all workers hold the same state, after `fit`'s callbacks have begun.

    Callbacks that have a method of this name may provide the state.

    Returns:
        The logs at the end of this `fit`, if it trains nothing because the workers that
        this one is to join have finished it, or those before a preemption; else None.
    """
    hooks = hooks_of(trainer.distribute_strategy)
    if hooks is None:
        return None
    elastic = hooks.elastic
    if elastic is not None:
        callbacks = without_bars(callbacks)
        current.callbacks = callbacks
        current.begun = [numbers_of_one(callback) for callback in callbacks]
        calls = calls_of(hooks, elastic)
        if elastic.joining:
            finished = calls.find("fit", hooks)
            if finished is not None:
                adopt(callbacks, finished)
                leave_out_epochs(trainer)
                return _last_logs(trainer)
            step = _continuable_step_of(trainer)
            join(trainer, hooks, elastic, callbacks, step)
            calls.begin_fit()
            return None
        calls.begin_fit()
        resumption: Resumption | None = current.resumption
        step = _continuable_step_of(trainer)
        if resumption is not None and resumption.due and step is not None:
            ended = resumption.resume(trainer, callbacks, step)
            return _last_logs(trainer) if ended else None
    dynamic = hooks.dynamic
    has_own_state = dynamic is not None and dynamic.has_own_state()
    if hooks.local is not None:
        hooks.local.end_epoch(trainer)  # after `train_on_batch`
    share_state(trainer, hooks, callbacks)
    note_own_files(hooks, callbacks)
    check_vocabularies(trainer, hooks)
    hooks.state.check(*state_of(trainer, only_weights=has_own_state))
    take_epoch(trainer, hooks, 0)
    current.epoch = getattr(trainer, "_initial_epoch", None) or current.epoch
    if dynamic is not None:
        optimizer = trainer.optimizer
        weights = trainer.trainable_weights
        tables = embedding_tables(trainer)
        dynamic.weights.begin_fit(
            [v.value for v in weights],
            getattr(optimizer, "inner_optimizer", optimizer),
            [id(v) in tables and not moves_all_rows(optimizer, v) for v in weights],
        )
    if hooks.workers.rank == 0 and current.fitting > 1:
        log.info("%s", _start_line(hooks, trainer))
    if dynamic is None and hooks.data.length_unknown:
        hooks.log_once(
            "ends of data",
            "The number of batches isn't known: `optimizer.iterations` counts the "
            "steps that were taken. Plain Keras counts the end of data, too, in "
            "each epoch, which changes Adam's updates. See docs/limits.md.",
        )
    return None


def _last_logs(trainer: Any) -> dict[str, Any]:
    """Return the logs at the end of a `fit` that trains nothing here."""
    return {
        name: values[-1] for name, values in trainer.history.history.items() if values
    }


def fit(original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `fit`: the start-up line, the chief's progress bar, the lost worker."""
    hooks = hooks_of(trainer.distribute_strategy)
    is_measurable = timer_of(trainer.distribute_strategy) is not None
    if hooks is None and not is_measurable:
        return original(trainer, *args, **kwargs)
    bound = inspect.signature(original).bind(trainer, *args, **kwargs)
    arguments = bound.arguments
    if is_measurable and current.replace_callbacks is not None and not current.fitting:
        given = arguments.get("callbacks") or []
        listed = list(given) if isinstance(given, (list, tuple)) else [given]
        arguments["callbacks"] = current.replace_callbacks(trainer, listed)
    if hooks is None:
        with _reporting_failure(trainer, arguments):
            return original(*bound.args, **bound.kwargs)
    _hide_progress_bar(hooks, arguments)
    facts: dict[str, Any] = {
        "data_pending": hooks.dynamic is not None,
        "fitting": 1 if arguments.get("verbose", "auto") == 0 else 2,
        "joined": False,
        "resumed": None,
        "epoch": arguments.get("initial_epoch", 0),
        "callbacks": (),
        "begun": (),
        "epochs": arguments.get("epochs", 1),
        "iterator": None,
    }
    is_outermost = not current.fitting
    if hooks.elastic is not None:
        if is_outermost:
            calls_of(hooks, hooks.elastic).fits += 1
        _note_data(hooks, arguments)
        facts["succession"] = ChiefFailover(hooks, hooks.elastic)
        facts["resumption"] = None
        if is_outermost and hooks.checkpoint is not None:
            facts["resumption"] = Resumption(hooks, hooks.elastic)
    with (
        ending_threads_after_error(),
        setting(**facts),
        closing_readers(),
        translating(hooks.workers.failure),
        in_fit(hooks),
    ):
        initial = getattr(trainer, "_initial_epoch", None)
        try:
            with _reporting_failure(trainer, arguments):
                result = original(*bound.args, **bound.kwargs)
            if hooks.elastic is not None:
                # After it the chief's files are complete, or it has been lost.
                hooks.consensus.any_of(False)
                take_over()
                if is_outermost and not hooks.elastic.joining:
                    states = changed(current.callbacks, current.begun)
                    calls_of(hooks, hooks.elastic).finish("fit", hooks, states)
                if current.resumption is not None:
                    current.resumption.end()
            return result
        finally:
            if current.joined:
                trainer._initial_epoch = initial


def _note_data(hooks: KerasHooks, arguments: dict[str, Any]) -> None:
    """Note the datasets that Keras is given, which all workers do alike."""
    validation = arguments.get("validation_data")
    if isinstance(validation, (list, tuple)):
        validation = validation[0] if validation else None
    for data in (arguments.get("x"), validation):
        uses_of(hooks).of(data)


@contextlib.contextmanager
def _reporting_failure(trainer: Any, arguments: dict[str, Any]) -> Iterator[None]:
    """Call `JobCallback.on_failure` when `fit` raises."""
    try:
        yield
    except Exception as error:
        given = arguments.get("callbacks") or ()
        given = getattr(given, "callbacks", given)
        for callback in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(callback, JobCallback):
                # An error in a callback must not hide the first one.
                with contextlib.suppress(Exception):
                    callback.on_failure(failure_behind(trainer, error) or error)
        raise


def on_chief_only(original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `evaluate` and `predict`: only the chief shows the progress bar."""
    hooks = hooks_of(trainer.distribute_strategy)
    if hooks is None:
        with setting(evaluating=True):
            return original(trainer, *args, **kwargs)
    bound = inspect.signature(original).bind(trainer, *args, **kwargs)
    elastic = None if current.fitting else hooks.elastic
    if elastic is not None and elastic.joining:
        name = original.__name__
        if name != "evaluate":
            refuse_newcomer(hooks, name)
        _note_data(hooks, bound.arguments)
        return calls_of(hooks, elastic).find(name, hooks)
    _hide_progress_bar(hooks, bound.arguments)
    args, kwargs = bound.args, bound.kwargs

    def call(rebuild: bool) -> Any:
        if rebuild and "_use_cached_eval_dataset" in kwargs:
            kwargs["_use_cached_eval_dataset"] = False
        renew_prediction(trainer, hooks)
        return original(*args, **kwargs)

    def retrace() -> None:
        trainer.test_function = trainer.predict_function = None

    with (
        ending_threads_after_error(),
        setting(data_pending=False, evaluating=True),
        closing_readers(),
        translating(hooks.workers.failure),
    ):
        if hooks.dynamic is not None:
            return hooks.dynamic.evaluate(call, retrace)
        if hooks.local is not None:
            hooks.local.end_epoch(trainer)
        result = repeated(hooks.elastic, lambda: call(False))
        if elastic is not None and original.__name__ == "evaluate":
            calls_of(hooks, elastic).finish("evaluate", hooks, plain(result))
        return result


def _hide_progress_bar(hooks: KerasHooks, arguments: dict[str, Any]) -> None:
    """Turn the progress bar off on all ranks but the chief."""
    shown = hooks.elastic is not None and show_on_chief(
        arguments, lambda: hooks.workers.rank
    )
    if hooks.workers.rank > 0 and not shown:
        arguments["verbose"] = 0


def after_epoch(trainer: Any) -> None:
    """Let workers leave after the last epoch, in a job that can be continued.

    No step follows that would do it. All workers call it alike.
    """
    hooks = hooks_of(trainer.distribute_strategy)
    step = _continuable_step_of(trainer)
    if hooks is None or step is None or current.resumption is None:
        return
    ends = trainer.stop_training or current.epoch >= current.epochs
    if ends and hooks.elastic is not None and hooks.elastic.ask()[1]:
        depart(trainer, hooks, step, None, 0)


def _continuable_step_of(trainer: Any) -> ContinuableStep | None:
    function = trainer.train_function
    found = None if function is None else inspect.unwrap(function)
    return found if isinstance(found, ContinuableStep) else None


def _start_line(hooks: KerasHooks, trainer: Any) -> str:
    parts = [(hooks.dynamic or hooks).data.describe()]
    try:
        rate = float(keras.ops.convert_to_numpy(trainer.optimizer.learning_rate))
        parts.append(f"learning rate {rate:g}")
    except (AttributeError, TypeError, ValueError):
        pass
    if hooks.gradients.words:
        parts.append(hooks.gradients.words)
    return "kerasdist: " + ", ".join(parts)
