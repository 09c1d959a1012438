"""The number of steps that asynchronous workers have taken together.

Each worker has a count of its own, which belongs to its weights: it's the number of
steps in those that it received last. Schedules and warm-ups read it.

    steps = updates of the table * window + offset + own steps of an open window

The servers count the updates, beginning with 0 in each job; the offset is the
optimizer's number of steps before that, from which a resumed one continues. An
optimizer's own count, `iterations`, is that of its worker's steps, to which its moments
belong.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras import own_steps


class StepCount:
    """The step count of the optimizer of `fit`, and of optimizers before it.

    Args:
        device: The device in whose host's memory the counters are.
    """

    def __init__(self, device: str) -> None:
        self._device = _tf.host_of(device)
        # The updates of the table that all have opened.
        self._updates = _tf.own_variable(0, tf.int64, self._device)
        # With a reference, so that no other optimizer gets its id. Variables, so that a
        # step isn't traced again after training is resumed.
        self._offsets: dict[int, tuple[Any, Any]] = {}
        self._optimizer: Any = None
        self._begin = 0

    def note(self, updates: Any) -> None:
        """Record the number of updates by all workers; in any context."""
        self._updates.assign(tf.cast(updates, tf.int64))

    def begin(self, optimizer: Any, updates: int, steps: int | None) -> None:
        """Set the count at the start of `fit`; all workers call it alike.

        Args:
            optimizer: The optimizer of `fit`, or None.
            updates: How many updates the table has had.
            steps: How many steps all had taken where training is resumed; None: it
                isn't resumed, and a new optimizer has taken its own steps.
        """
        self._optimizer = optimizer
        if optimizer is None or (steps is None and id(optimizer) in self._offsets):
            return
        window = _window(optimizer)
        before = int(own_steps(optimizer).numpy()) if steps is None else steps
        self._set(optimizer, (before // window - updates) * window)

    def join(self, optimizer: Any, offset: int) -> None:
        """Set the count on a late worker: `offset` is that of the others."""
        self._optimizer = optimizer
        if optimizer is not None:
            self._set(optimizer, offset)

    def exclude_update(self) -> None:
        """Subtract an update that wasn't a step; all workers call it alike."""
        _, offset = self._offsets.get(id(self._optimizer), (None, None))
        if offset is not None:
            offset.assign_sub(_window(self._optimizer))

    def begin_epoch(self) -> None:
        """Record the beginning of an epoch, where all workers have the same count."""
        steps = self.of(self._optimizer)
        self._begin = 0 if steps is None else int(steps.numpy())

    def progress(self) -> tuple[int, int] | None:
        """Return the numbers of steps, in all and in this epoch, in the weights.

        None if not known, because no `fit` has used an optimizer.
        """
        steps = self.of(self._optimizer)
        if steps is None:
            return None
        known = int(steps.numpy())
        return known, known - self._begin

    def offset_of(self, optimizer: Any) -> int:
        """Return an optimizer's count before the first update of the table."""
        _, offset = self._offsets.get(id(optimizer), (None, None))
        return 0 if offset is None else int(offset.numpy())

    def of(self, optimizer: Any) -> Any | None:
        """Return the number of steps by all workers; int64, scalar, in any context.

        None for an optimizer that no `fit` has used.
        """
        _, offset = self._offsets.get(id(optimizer), (None, None))
        if offset is None:
            return None
        window = _window(optimizer)
        steps = self._updates.read_value() * window + offset.read_value()
        if window == 1:
            return steps
        own = tf.convert_to_tensor(own_steps(optimizer))
        return steps + tf.cast(own, tf.int64) % window

    def _set(self, optimizer: Any, offset: int) -> None:
        known = self._offsets.get(id(optimizer))
        if known is None:
            variable = _tf.own_variable(offset, tf.int64, self._device)
            self._offsets[id(optimizer)] = optimizer, variable
        else:
            known[1].assign(offset)


def _window(optimizer: Any) -> int:
    """Return how many steps of an optimizer are one update."""
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)
