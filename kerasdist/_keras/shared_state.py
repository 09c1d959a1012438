"""The parts of a model's state that all workers must hold alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras.src import tree

from kerasdist._keras.elastic.finished_calls import numbers_of_one
from kerasdist._keras.global_batch.step_state import is_of_keras, plain_variables
from kerasdist._keras.learning_rate import optimizers_of
from kerasdist._keras.placement.layers import move
from kerasdist._keras.protocols import KerasHooks, hooks_of
from kerasdist._keras.training.optimizers import own_accumulators
from kerasdist._tf.variables import CHIEFS_STATE, facets_of

# The base class of callbacks that take part in a job.


class JobCallback(keras.callbacks.Callback):
    """A callback in which the workers communicate: it must be given to `fit` on all.

    Attributes:
        shares_state: Whether it has a `before_first_step`.
        never_stops: Whether its `on_train_batch_end` never stops the training: then the
            ranks don't need a collective after every step.
    """

    shares_state = False
    never_stops = False

    def resumed_after(self, batches: int) -> None:
        """Note how far a resumed epoch was; called when all callbacks have begun.

        Args:
            batches: Number of its batches that the optimizer has already taken.
        """

    def before_first_step(self, hooks: KerasHooks, variables: list[Any]) -> None:
        """Provide the state; called when all callbacks have begun.

        Args:
            hooks: The strategy's hooks.
            variables: The TensorFlow variables of everything that training changes.
        """

    def on_failure(self, error: BaseException) -> None:
        """Note the error with which `fit` ends."""

    def _state_for_newcomers(self) -> dict[str, Any]:
        """Return what a worker needs that joins before the present step, as JSON.

        By default all attributes that JSON has: they are the same on all workers.
        """
        return numbers_of_one(self)

    def _adopt_state(self, state: dict[str, Any]) -> None:
        """Continue from another worker's state, before the first step here.

        The present epoch has begun at the other workers already.
        """
        self.__dict__.update(state)


def _statistics(trainer: Any) -> list[Any]:
    """Return the variables that each replica keeps for itself, as BatchNormalization.

    Excluded are seed generators' (integers), the states of stateful layers, one per row
    of the replica (rows stay with their replica), and frozen weights, which were made
    to be trained and never change. Synchronized layers have the same statistics on all
    replicas, including those without rows.
    """
    shared: set[int] = set()
    # Then a synchronized layer computes with a part of this replica's rows, or with
    # those of this worker alone.
    strategy = trainer.distribute_strategy
    hooks = hooks_of(strategy)
    placer = facets_of(strategy).placer
    divided = placer is not None and placer.micro_batches > 1
    divided |= hooks is not None and hooks.local is not None
    for layer in trainer._flatten_layers():
        own = list(getattr(layer, "_trainable_variables", ()))
        if getattr(layer, "synchronized", False) and not divided:
            own += layer.non_trainable_variables
        own += _states_of_rows(layer)
        shared.update(id(variable) for variable in own)
    return [
        variable
        for variable in trainer.non_trainable_weights
        if "float" in str(variable.dtype)
        and id(variable) not in shared
        and not CHIEFS_STATE.get(variable)
    ]


def chiefs_state(trainer: Any) -> list[Any]:
    """Return TensorFlow's variables of layers, of which the chief's values count."""
    found = trainer.non_trainable_variables
    return [
        *(variable.value for variable in found if CHIEFS_STATE.get(variable)),
        *(each for each in _plain(trainer) if CHIEFS_STATE.get(each)),
    ]


def _plain(trainer: Any) -> list[Any]:
    """Return each `tf.Variable` that a script's layers hold."""
    found = {
        id(variable): variable
        for layer in trainer._flatten_layers()
        if not is_of_keras(layer)
        for _, variable in plain_variables(layer)
    }
    return list(found.values())


def _states_of_rows(layer: Any) -> list[Any]:
    """Return the states that a stateful recurrent layer keeps of each row."""
    if not getattr(layer, "stateful", False):
        return []
    states = tree.flatten(getattr(layer, "states", None))
    return [state for state in states if state is not None]


def statistics_of(trainer: Any) -> list[Any]:
    """Return TensorFlow's variables that each replica keeps for itself."""
    return [
        *(variable.value for variable in _statistics(trainer)),
        *(
            each
            for each in _plain(trainer)
            if each.dtype.is_floating and not CHIEFS_STATE.get(each)
        ),
    ]


def state_of(
    trainer: Any, *, only_weights: bool
) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return variables to be equal on all ranks when training begins, and others."""

    def named(some: list[Any]) -> list[tuple[str, Any]]:
        return [(getattr(v, "path", v.name), v.value) for v in some]

    if only_weights:
        return named([*trainer.trainable_weights, *_statistics(trainer)]), []
    variables, parts = _common(trainer)
    return named(variables), named(parts)


def _common(trainer: Any) -> tuple[list[Any], list[Any]]:
    """Return Keras's variables that are the same on all ranks, and gradients' sums.

    The latter each replica has added up by itself, like the metrics.
    """
    parts = [v for each in optimizers_of(trainer) for v in own_accumulators(each)]
    own = {id(variable) for variable in (*trainer.metrics_variables, *parts)}
    for layer in trainer._flatten_layers():
        own.update(id(state) for state in _states_of_rows(layer))
    return [v for v in _all_variables(trainer) if id(v) not in own], parts


def take_epoch(trainer: Any, hooks: KerasHooks, root: int) -> None:
    """Begin at a rank's epoch: perhaps only that rank has restored a backup."""
    epoch = hooks.consensus.of_chief(
        getattr(trainer, "_initial_epoch", None) or 0, root
    )
    # As Keras does: None or 0 leave the epoch to an argument of `fit`.
    trainer._initial_epoch = int(epoch) or None


def share_state(trainer: Any, hooks: KerasHooks, callbacks: Sequence[Any]) -> None:
    """Call `JobCallback.before_first_step`, on the workers' state.

    All ranks have the same callbacks, see `_keras.training.callbacks`.
    """
    found = [
        callback
        for callback in callbacks
        if isinstance(callback, JobCallback) and callback.shares_state
    ]
    if found:
        # Keras does that next; else they hold each worker's part of the last epoch.
        trainer.reset_metrics()
    for callback in found:
        callback.before_first_step(hooks, whole_state(trainer))


def whole_state(trainer: Any) -> list[Any]:
    """Return TensorFlow's variables of everything that training changes, each once."""
    variables = [variable.value for variable in _all_variables(trainer)]
    return [*variables, *_plain(trainer)]


def updated_state(trainer: Any) -> list[Any]:
    """Return TensorFlow's variables of everything that optimizers update."""
    return [v.value for v in _with_slots(trainer, trainer.trainable_variables)]


def state_to_give(trainer: Any) -> list[Any]:
    """Return TensorFlow's variables that a worker gets which joins in an epoch.

    Without the metrics and the gradients that each replica has added up by itself.
    """
    return [*(v.value for v in _common(trainer)[0]), *_plain(trainer)]


@contextlib.contextmanager
def copied_to(trainer: Any, device: str) -> Iterator[None]:
    """Train copies, on one device, of all variables that are elsewhere.

    Afterwards the originals are back, unchanged. Variables on that device aren't
    copied.

    Args:
        trainer: The model, of a strategy that places layers.
        device: The device's full name.
    """
    left = []
    try:
        for variable in _all_variables(trainer):
            if variable.value.device != device:
                left.append((variable, variable.value))
                with trainer.distribute_strategy.scope():
                    move(variable, device)
                # Optimizers recognize by it the variables they were built for.
                variable.value._unique_id = left[-1][1]._unique_id
        yield
    finally:
        for variable, value in left:
            variable._value = value


def _all_variables(trainer: Any) -> list[Any]:
    """Return Keras's variables of everything that training changes, each once."""
    return _with_slots(trainer, [*trainer.variables, *trainer.metrics_variables])


def _with_slots(trainer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return variables, and those of the optimizers behind them, each once."""
    slots = [v for each in optimizers_of(trainer) for v in each.variables]
    return list({id(variable): variable for variable in (*variables, *slots)}.values())
