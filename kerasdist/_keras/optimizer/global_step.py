"""How many steps an optimizer has behind it: what schedules and warm-ups go by.

An optimizer counts its own, in `iterations`. Others may have moved the weights, too:

    who takes steps                              steps in the weights
    one process, or workers in step              own
    workers that don't wait for each other       as their strategy counts them
    the former, after a backup of the latter     own + those that others had taken

What others had taken is a number beside the optimizer, which it gets where a backup is
restored that says so (`backups`). `iterations` stays what it was: the optimizer's
moments are of its own steps.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.protocols import dealing_hooks, hooks_of

__all__ = [
    "device_beside",
    "own_steps",
    "resume",
    "shared_steps",
    "steps_of",
    "steps_with_others",
]

_ATTRIBUTE = "_kerasdist_others"


class _Others:
    """How many steps others had taken; not a variable of the optimizer's.

    Args:
        optimizer: Whose.
    """

    def __init__(self, optimizer: Any) -> None:
        # In a variable: a graph of a step isn't traced again where another backup is
        # restored.
        self.steps = _tf.own_variable(0, tf.int64, device_beside(optimizer))


def own_steps(optimizer: Any) -> Any:
    """The variable in which an optimizer counts its steps; an integer, scalar.

    Not its `iterations`: with gradient accumulation those are whole windows.
    """
    return optimizer._iterations.value


def device_beside(optimizer: Any) -> str:
    """Where that variable is, if it has one copy; else "".

    What XLA compiles reads one device's variables: others belong beside it.
    """
    counter = own_steps(optimizer)
    copies = getattr(counter, "values", (counter,))
    return str(copies[0].device) if len(copies) == 1 else ""


def shared_steps(optimizer: Any) -> Any | None:
    """Number of steps, where some are others'; int64, scalar, in any context.

    None: the optimizer has counted all of them itself.
    """
    hooks = dealing_hooks(getattr(optimizer, "_distribution_strategy", None))
    if hooks is not None:
        return hooks.steps_of(optimizer)
    others: _Others | None = getattr(optimizer, _ATTRIBUTE, None)
    if others is None:
        return None
    own = tf.convert_to_tensor(own_steps(optimizer))
    return tf.cast(own, tf.int64) + others.steps.read_value()


def steps_of(optimizer: Any) -> Any:
    """Number of steps behind an optimizer, of all workers; int64, scalar."""
    steps = shared_steps(optimizer)
    if steps is None:
        steps = tf.convert_to_tensor(own_steps(optimizer))
    return tf.cast(steps, tf.int64)


def resume(trainer: Any, restored: bool, steps: int | None) -> None:
    """`fit` begins, on workers that are in step; all of them call it alike.

    The chief's numbers count: perhaps only the chief can read the file. Other ranks
    may have another's weights until they get the chief's.

    Args:
        trainer: The model.
        restored: Whether a backup has been restored. If not, all is as it was.
        steps: How many steps were in its weights; None: those of the optimizer, whose
            count it had, too.
    """
    optimizer = _trained(trainer)
    if optimizer is None:
        return
    before = -1
    if restored:
        own = int(own_steps(optimizer).numpy())
        before = 0 if steps is None else max(steps - own, 0)
    hooks = hooks_of(trainer.distribute_strategy)
    if hooks is not None:
        before = int(hooks.of_chief(before))
    others: _Others | None = getattr(optimizer, _ATTRIBUTE, None)
    if before < 0 or (others is None and not before):
        return
    if others is None:
        others = _Others(optimizer)
        setattr(optimizer, _ATTRIBUTE, others)
        if trainer.train_function is not None:
            # What was traced before doesn't know of it. Keras has seen to it already
            # that there is a function.
            trainer.train_function = None
            trainer.make_train_function()
    others.steps.assign(before)


def steps_with_others(trainer: Any) -> int | None:
    """Number of steps that are in a model's weights, on workers that are in step.

    None: the optimizer has counted all of them itself.
    """
    optimizer = _trained(trainer)
    others: _Others | None = getattr(optimizer, _ATTRIBUTE, None)
    if others is None or not int(others.steps.numpy()):
        return None
    return int(steps_of(optimizer).numpy())


def _trained(trainer: Any) -> Any | None:
    """What counts a model's steps; None: nothing that Keras knows."""
    optimizer = getattr(trainer.optimizer, "inner_optimizer", trainer.optimizer)
    return optimizer if hasattr(optimizer, "_iterations") else None
