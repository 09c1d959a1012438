"""The state of a running `fit`, from which another process can continue it.

    facts       numbers and texts, as JSON: the place in the data, learning rates, what
                the callbacks have counted
    arrays      numpy arrays that callbacks keep, such as `EarlyStopping`'s weights
    variables   those of the model and its optimizers, which aren't handled here

A process that continues calls `begin`, `objection` and `apply` before the first step of
its `fit`, when the callbacks have begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kerasdist import _tf
from kerasdist._keras.context import current
from kerasdist._keras.data.uses import uses_of
from kerasdist._keras.elastic.state import callback_state
from kerasdist._keras.elastic.state.data_place import DataPlace
from kerasdist._keras.elastic.state.finished_calls import fits_of
from kerasdist._keras.optimizer.learning_rate import (
    base_rate,
    leaves_of,
    scaling_of,
    schedule_of,
    set_base_rate,
)
from kerasdist._keras.protocols import KerasHooks


def begin(callbacks: Sequence[Any]) -> None:
    """Note what `fit` begins with, before its first step."""
    current.callbacks = callbacks
    current.begun = callback_state.numbers_of(callbacks)


def collect(
    trainer: Any,
    hooks: KerasHooks,
    variables: Sequence[Any],
    iterator: Any,
    step: int,
) -> dict[str, Any]:
    """Return the facts about the present call of `fit`, between two steps.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        variables: The variables that belong to the state.
        iterator: The iterator of the step; None: the last epoch has ended.
        step: The number of the next step in the epoch.
    """
    place = None if iterator is None else DataPlace(hooks).facts(iterator, step)
    return {
        "fit": fits_of(hooks),
        "epoch": current.epoch,
        "place": place,
        "uses": uses_of(hooks).counts(),
        "orders": hooks.data.orders,
        "communicator_step": hooks.workers.communicator.step,
        "variables": _form(variables),
        "rates": [base_rate(each) for each in _settable(trainer)],
        "factors": [_factor(each) for each in leaves_of(trainer)],
        "callbacks": callback_state.changed(current.callbacks, current.begun),
    }


def objection(
    facts: dict[str, Any],
    hooks: KerasHooks,
    variables: Sequence[Any],
    callbacks: Sequence[Any],
) -> str:
    """Return why this worker can't continue; an empty text if it can.

    Args:
        facts: Those of `collect`.
        hooks: The hooks of the strategy of this worker's model.
        variables: The variables here.
        callbacks: The callbacks of this worker's `fit`.
    """
    mine = fits_of(hooks)
    if facts["fit"] != mine:
        return (
            f"call {facts['fit']} of `fit` at the others, which was call {mine} when "
            "this worker asked: started again, it may join"
        )
    if facts["variables"] != _form(variables):
        return "a model with other variables than the others'"
    names = [state[0] for state in facts["callbacks"]]
    if names != [type(callback).__name__ for callback in callbacks]:
        return "other callbacks than the others'"
    return ""


def apply(
    trainer: Any,
    hooks: KerasHooks,
    callbacks: Sequence[Any],
    facts: dict[str, Any],
    place: DataPlace,
    variables: Sequence[Any],
) -> None:
    """Continue from facts to which there's no objection.

    They are from within a step. So the beginnings of the epoch and of the step, of
    which `fit` calls the callbacks next, have been counted in them: before the step,
    their effects are undone.

    Args:
        trainer: The model. The others are in the midst of an epoch, and all of them
            communicate in its reset of metrics: `fit` skips that of the first epoch.
        hooks: The hooks of its strategy.
        callbacks: The callbacks of its `fit`, which have begun.
        facts: Those of `collect`.
        place: It has moved to the place of the facts.
        variables: The variables that belong to the state, and have its values.
    """
    _apply_counts(trainer, callbacks, facts)
    _apply_numbers(hooks, facts)
    values = [
        (copy, copy.read_value())
        for variable in variables
        for copy in _tf.local_results(variable)
    ]

    def undo_begins() -> None:
        for variable, value in values:
            variable.assign(value)
        _apply_counts(trainer, callbacks, facts, again=True)

    current.resumed = undo_begins
    trainer._initial_epoch = current.epoch = facts["epoch"]
    current.joined = True
    current.first_step = facts["place"]["step"]
    _skip_reset(trainer)
    place.resume()


def apply_finished(
    trainer: Any, hooks: KerasHooks, callbacks: Sequence[Any], facts: dict[str, Any]
) -> None:
    """Continue from facts of the end of the last epoch, as `apply`; nothing is trained.

    Args: See `apply`.
    """
    _apply_counts(trainer, callbacks, facts)
    _apply_numbers(hooks, facts)
    uses_of(hooks).catch_up(facts["uses"])
    leave_out_epochs(trainer)


def leave_out_epochs(trainer: Any) -> None:
    """Let `fit` train nothing, as if a backup had been restored at its end."""
    trainer._initial_epoch = current.epochs
    current.joined = True


def _apply_numbers(hooks: KerasHooks, facts: dict[str, Any]) -> None:
    hooks.data.orders = facts["orders"]
    hooks.workers.communicator.step = facts["communicator_step"]


def _apply_counts(
    trainer: Any,
    callbacks: Sequence[Any],
    facts: dict[str, Any],
    *,
    again: bool = False,
) -> None:
    """Set the learning rates, and what the callbacks have counted."""
    for optimizer, rate in zip(_settable(trainer), facts["rates"], strict=True):
        set_base_rate(optimizer, rate)
    for optimizer, factor in zip(leaves_of(trainer), facts["factors"], strict=True):
        scaling = scaling_of(optimizer)
        if scaling is not None and factor is not None:
            scaling.set(*factor)
    callback_state.adopt(callbacks, facts["callbacks"], again=again)


def _form(variables: Sequence[Any]) -> list[Any]:
    return [[list(v.shape), v.dtype.name] for v in variables]


def _settable(trainer: Any) -> list[Any]:
    return [each for each in leaves_of(trainer) if schedule_of(each) is None]


def _factor(optimizer: Any) -> list[float] | None:
    scaling = scaling_of(optimizer)
    return None if scaling is None else [scaling.target, scaling.steps, scaling.shift]


def _skip_reset(trainer: Any) -> None:
    """Leave out the reset of metrics at the begin of the next epoch."""
    own = vars(trainer)

    def reset_metrics() -> None:
        own.pop("reset_metrics", None)

    own["reset_metrics"] = reset_metrics
