"""The base class of callbacks that take part in a job."""

from __future__ import annotations

from typing import Any

import keras

from kerasdist._keras.elastic.state.callback_state import numbers_of_one
from kerasdist._keras.protocols import KerasHooks


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
