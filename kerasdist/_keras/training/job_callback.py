"""The base class of callbacks that take part in a job."""

from __future__ import annotations

from typing import Any

import keras

from kerasdist._keras.protocols import KerasHooks

__all__ = ["JobCallback"]


class JobCallback(keras.callbacks.Callback):
    """A callback in which the workers communicate: it must be given to `fit` on all.

    Attributes:
        shares_state: Whether it has a `before_first_step`.
        never_stops: Whether its `on_train_batch_end` never stops the training: then the
            ranks don't need a collective after every step.
        _takes_newcomers: Whether a worker may join an elastic job inside `fit`.
    """

    shares_state = False
    never_stops = False
    _takes_newcomers = True

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
