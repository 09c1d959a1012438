"""Steps of models that were compiled with `jit_compile=True`.

Keras lets XLA compile all of a step. Here the strategy does, around the exchange: see
`kerasdist._tf.compiled`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerasdist._keras.context import setting
from kerasdist._keras.protocols import KerasHooks
from kerasdist._tf.marks import COMPILED


def make_compiled(
    trainer: Any,
    hooks: KerasHooks,
    step: Callable[[Any], Any],
    original: Callable[..., Callable[[Any], Any]],
) -> Callable[[Any], Any]:
    """Return a function that takes steps, compiled by XLA if the model is to be.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        step: A step of one replica.
        original: Keras's function that makes it.

    Raises:
        ValueError: The job is elastic.
    """
    if trainer.jit_compile is not True or is_alone(hooks):
        return original(trainer, step)
    if hooks.elastic is not None and not hooks.elastic.is_fixed:
        raise ValueError(
            "XLA can't compile the steps of an elastic job. Received: jit_compile=True "
            "in `compile`, and a strategy with elastic=True. Give `compile` "
            "jit_compile=False, or the strategy elastic=False."
        )
    COMPILED.set(step, True)
    trainer.jit_compile = False  # Keras would compile the communication
    try:
        with setting(compiled=True):
            return original(trainer, step)
    finally:
        trainer.jit_compile = True


def is_alone(hooks: KerasHooks) -> bool:
    """Return whether a step never communicates, so that XLA compiles all of it."""
    return (
        hooks.workers.replicas == 1 and hooks.elastic is None and hooks.dynamic is None
    )
