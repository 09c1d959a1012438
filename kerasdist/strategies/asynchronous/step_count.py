"""How many steps asynchronous workers have taken together, as each of them knows it.

The count goes with the weights: it says how many steps are in those that a worker has
received last. Schedules and warm-ups are asked for it.

    steps = updates of the table * window + offset + own steps of an open window

The servers count the updates, beginning with 0 in each job; the offset is what an
optimizer had behind it before, and one that is resumed goes on from there. An
optimizer's own count, `iterations`, is that of its worker's steps, of which its moments
are.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras import own_steps

__all__ = ["StepCount"]


class StepCount:
    """The count of the optimizer that `fit` trains with, and of those before it.

    Args:
        device: Name of the device whose host's memory has what is counted.
    """

    def __init__(self, device: str) -> None:
        self._device = _tf.host_of(device)
        # Of the table that all have opened.
        self._updates = _tf.own_variable(0, tf.int64, self._device)
        # With a reference: no other optimizer gets its id. In variables: a graph of a
        # step isn't traced again where training is resumed.
        self._offsets: dict[int, tuple[Any, Any]] = {}
        self._optimizer: Any = None
        self._begin = 0

    def note(self, updates: Any) -> None:
        """This worker has heard of so many updates by all; in any context."""
        self._updates.assign(tf.cast(updates, tf.int64))

    def begin(self, optimizer: Any, updates: int, steps: int | None) -> None:
        """`fit` begins; all workers call it alike.

        Args:
            optimizer: What it trains with, or None.
            updates: How many updates the table has had.
            steps: How many steps all had taken where training is resumed; None: it
                isn't, and an optimizer that is new has taken its own.
        """
        self._optimizer = optimizer
        if optimizer is None or (steps is None and id(optimizer) in self._offsets):
            return
        window = _window(optimizer)
        before = int(own_steps(optimizer).numpy()) if steps is None else steps
        self._set(optimizer, (before // window - updates) * window)

    def join(self, optimizer: Any, offset: int) -> None:
        """The same for a worker that comes later: the others' offset is `offset`."""
        self._optimizer = optimizer
        if optimizer is not None:
            self._set(optimizer, offset)

    def leave_out(self) -> None:
        """An update of the table wasn't a step; all workers call it alike."""
        _, offset = self._offsets.get(id(self._optimizer), (None, None))
        if offset is not None:
            offset.assign_sub(_window(self._optimizer))

    def begin_epoch(self) -> None:
        """Here all workers have the same count."""
        steps = self.of(self._optimizer)
        self._begin = 0 if steps is None else int(steps.numpy())

    def progress(self) -> tuple[int, int] | None:
        """Number of steps in all, and in this epoch, that are in the weights."""
        steps = self.of(self._optimizer)
        if steps is None:
            return None
        known = int(steps.numpy())
        return known, known - self._begin

    def offset_of(self, optimizer: Any) -> int:
        """What an optimizer's count was before the first update of the table."""
        _, offset = self._offsets.get(id(optimizer), (None, None))
        return 0 if offset is None else int(offset.numpy())

    def of(self, optimizer: Any) -> Any | None:
        """Number of steps by all workers; int64, scalar, in any context.

        None for an optimizer that isn't that of a `fit`.
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
    """How many steps of an optimizer are one update."""
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)
