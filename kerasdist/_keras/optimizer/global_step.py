"""The global step count that schedules and warm-up read.

An optimizer counts its own steps in `iterations`. Others may have moved the weights:

    the steps are taken by                       steps in the weights
    one process, or synchronous workers          own
    asynchronous workers                         as their strategy counts them
    the former, after a backup of the latter     own + those that others had taken

The number of steps that others had taken is stored beside the optimizer when a backup
that contains it is restored (`backups`). `iterations` isn't changed: the optimizer's
moments belong to its own steps.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.protocols import dynamic_hooks, hooks_of
from kerasdist._tf.marks import OTHERS_STEPS


def own_steps(optimizer: Any) -> Any:
    """Return the variable in which an optimizer counts its steps; an integer, scalar.

    That isn't `iterations`: with gradient accumulation those are whole windows.
    """
    return optimizer._iterations.value


def device_beside(optimizer: Any) -> str:
    """Return the device of that variable, if it has one copy; else "".

    A graph that XLA compiles reads variables of one device, so others must be there,
    too.
    """
    counter = own_steps(optimizer)
    copies = getattr(counter, "values", (counter,))
    return str(copies[0].device) if len(copies) == 1 else ""


def shared_steps(optimizer: Any) -> Any | None:
    """Return the number of steps, some of them others'; int64, scalar, in any context.

    None if the optimizer has counted all of them itself.
    """
    dynamic = dynamic_hooks(getattr(optimizer, "_distribution_strategy", None))
    if dynamic is not None:
        return dynamic.weights.steps_of(optimizer)
    others = OTHERS_STEPS.get(optimizer)
    if others is None:
        return None
    own = tf.convert_to_tensor(own_steps(optimizer))
    return tf.cast(own, tf.int64) + others.read_value()


def steps_of(optimizer: Any) -> Any:
    """Return the number of an optimizer's steps, of all workers; int64, scalar."""
    steps = shared_steps(optimizer)
    if steps is None:
        steps = tf.convert_to_tensor(own_steps(optimizer))
    return tf.cast(steps, tf.int64)


def resume(trainer: Any, restored: bool, steps: int | None) -> None:
    """Set the step count at the start of `fit`; all synchronous workers call it alike.

    The chief's numbers count, since perhaps only the chief can read the file. Other
    ranks may have other weights until they get the chief's.

    Args:
        trainer: The model.
        restored: Whether a backup has been restored. If not, nothing changes.
        steps: How many steps were in its weights; None: those of the optimizer, whose
            count the backup had, too.
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
        before = int(hooks.consensus.of_chief(before))
    others = OTHERS_STEPS.get(optimizer)
    if before < 0 or (others is None and not before):
        return
    if others is None:
        # A variable: a step isn't traced again after another backup is restored.
        others = _tf.own_variable(0, tf.int64, device_beside(optimizer))
        OTHERS_STEPS.set(optimizer, others)
        if trainer.train_function is not None:
            # An earlier trace doesn't have the variable. Keras has made sure already
            # that there is a function.
            trainer.train_function = None
            trainer.make_train_function()
    others.assign(before)


def steps_with_others(trainer: Any) -> int | None:
    """Return the number of steps in a model's weights, on synchronous workers.

    None if the optimizer has counted all of them itself.
    """
    optimizer = _trained(trainer)
    others = OTHERS_STEPS.get(optimizer)
    if others is None or not int(others.numpy()):
        return None
    return int(steps_of(optimizer).numpy())


def _trained(trainer: Any) -> Any | None:
    """Return the optimizer that counts a model's steps; None if Keras knows none."""
    optimizer = getattr(trainer.optimizer, "inner_optimizer", trainer.optimizer)
    return optimizer if hasattr(optimizer, "_iterations") else None
