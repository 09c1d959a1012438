"""Models on devices: what is checked before they are used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdist._keras.placed_layers import placer_of, prepare

__all__ = ["compile_model", "make_function", "name_the_lost"]


def compile_model(
    original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
) -> Any:
    """In place of `compile`: what is built already goes where it belongs.

    Before an optimizer knows the variables.
    """
    result = original(trainer, *args, **kwargs)
    placer = placer_of(trainer.distribute_strategy)
    if placer is not None:
        _check(trainer)
        with trainer.distribute_strategy.scope():
            prepare(trainer, placer)
    return result


def make_function(
    original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
) -> Any:
    """In place of `make_train_function` and its like, called before the first step."""
    placer = placer_of(trainer.distribute_strategy)
    if placer is not None:
        _check(trainer)
        with trainer.distribute_strategy.scope():
            prepare(trainer, placer)
    return original(trainer, *args, **kwargs)


def name_the_lost(
    original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
) -> Any:
    """In place of what trains or uses a model: says which worker was lost."""
    try:
        return original(trainer, *args, **kwargs)
    except tf.errors.OpError as error:
        extended = trainer.distribute_strategy.extended
        failure = getattr(extended, "failure", lambda error: None)(error)
        if failure is None:
            raise
        raise failure from error


def _check(trainer: Any) -> None:
    if trainer.jit_compile is True:
        raise ValueError(
            "XLA compiles a step for one device, and would undo the placement. "
            "Received: jit_compile=True under ModelParallelStrategy. Compile the "
            "model with jit_compile=False (or 'auto')."
        )
    if trainer.run_eagerly or tf.config.functions_run_eagerly():
        warnings.warn(
            "With run_eagerly=True numbers are right, but a part of the backward pass "
            "runs on the device of what comes after it, devices wait for each other, "
            "and `placement_report()` has nothing to tell. Use it to find faults, and "
            "compile with run_eagerly=False for training.",
            stacklevel=5,
        )
