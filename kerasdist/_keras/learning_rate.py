"""An optimizer's learning rate times a factor that a callback sets.

The optimizer keeps the rate that it was tuned with, its base rate: that is what is
saved with the model, restored, and agreed on by the ranks. The factor is applied where
the rate is read, also in a step's graph, from the number of the step:

    factor(step) = 1 + (target - 1) * min(step / warm-up steps, 1)

    used by                                     reads           sets
    the optimizer itself, in a step             base x factor
    scripts and their callbacks                 base x factor   the product
    LearningRateScheduler, ReduceLROnPlateau    base            base

So Keras's own schedulers work as in one process, whatever the order of callbacks.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from keras.ops import convert_to_numpy
from keras.src import backend
from keras.src.optimizers import base_optimizer

from kerasdist import _tf
from kerasdist._keras.context import current, setting
from kerasdist._keras.protocols import dynamic_hooks, hooks_of
from kerasdist._tf.patching import Original
from kerasdist._tf.variables import OTHERS_STEPS, SCALING, of_tensorflow

# The global step count that schedules and warm-up read.
#
# An optimizer counts its own steps in `iterations`. Others may have moved the weights:
#
#     the steps are taken by                       steps in the weights
#     one process, or synchronous workers          own
#     asynchronous workers                         as their strategy counts them
#     the former, after a backup of the latter     own + those that others had taken
#
# The number of steps that others had taken is stored beside the optimizer when a backup
# that contains it is restored. `iterations` isn't changed: the optimizer's
# moments belong to its own steps.


def own_steps(optimizer: Any) -> Any:
    """Return the variable in which an optimizer counts its steps; an integer, scalar.

    That isn't `iterations`: with gradient accumulation those are whole windows.
    """
    return optimizer._iterations.value


def device_of_steps(optimizer: Any) -> str:
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
        others = _tf.own_variable(0, tf.int64, device_of_steps(optimizer))
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


class Scaling:
    """The factor of one optimizer, in variables that a traced step reads.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        device = device_of_steps(optimizer)
        self._target = _tf.own_variable(1.0, tf.float32, device)
        self._steps = _tf.own_variable(0, tf.int64, device)
        self._shift = _tf.own_variable(0, tf.int64, device)

    def set(self, target: float, steps: int, shift: int) -> None:
        """Set the parameters of the factor.

        Args:
            target: The factor after the warm-up.
            steps: Number of steps of the warm-up.
            shift: The number to add to the optimizer's step count to get the number of
                warm-up steps that are done.
        """
        self._target.assign(target)
        self._steps.assign(steps)
        self._shift.assign(shift)

    @property
    def values(self) -> tuple[float, int, int]:
        """The arguments of the last `set`."""
        target, steps, shift = self._target, self._steps, self._shift
        return float(target.numpy()), int(steps.numpy()), int(shift.numpy())

    def factor(self, optimizer: Any) -> Any:
        """Return the factor of the next step; float32, scalar."""
        target = self._target.read_value()
        steps = self._steps.read_value()
        behind = steps_of(optimizer) + self._shift.read_value()
        # Integers, because float32 can't count beyond 16,777,216.
        behind = tf.clip_by_value(behind, tf.zeros_like(steps), steps)
        share = tf.cast(behind, tf.float32) / tf.cast(tf.maximum(steps, 1), tf.float32)
        return tf.where(steps > 0, 1.0 + (target - 1.0) * share, target)


def leaves(optimizer: Any) -> list[Any]:
    """Return the optimizers that take the steps: those that others wrap."""
    if optimizer is None:
        return []
    inner = getattr(optimizer, "inner_optimizer", None)
    parts = [inner] if inner is not None else getattr(optimizer, "optimizers", None)
    if parts is None:
        return [optimizer]
    return [leaf for part in parts for leaf in leaves(part)]


def optimizers_of(trainer: Any) -> list[Any]:
    """Return the optimizers of `compile`, and those in attributes of the model.

    The parts of a model with a `train_step` of its own may have an optimizer each, such
    as the generator and the discriminator of a GAN.
    """
    compiled = getattr(trainer, "optimizer", None)
    found = [] if compiled is None else [compiled]
    for held in vars(trainer).values():
        some: Any = held.values() if isinstance(held, dict) else held
        for each in some if isinstance(held, (dict, list, tuple)) else (held,):
            if isinstance(each, base_optimizer.BaseOptimizer) and not any(
                each is part for other in found for part in (other, *leaves(other))
            ):
                found.append(each)
    return found


def leaves_of(trainer: Any) -> list[Any]:
    """Return the optimizers that take a model's steps and have a rate, each once."""
    found: list[Any] = []
    for optimizer in optimizers_of(trainer):
        if hasattr(optimizer, "optimizers") and trainer.built:
            # It may choose an inner optimizer for each variable only now.
            optimizer.build(trainer.trainable_variables)
        found += [leaf for leaf in leaves(optimizer) if has_rate(leaf)]
    return list({id(leaf): leaf for leaf in found}.values())


def scaling_of(optimizer: Any) -> Scaling | None:
    """Return an optimizer's factor; None if it has none."""
    scaling: Scaling | None = SCALING.get(optimizer)
    return scaling


def make_scaling(optimizer: Any) -> Scaling:
    """Return an optimizer's factor, which is made if there is none."""
    scaling = scaling_of(optimizer) or Scaling(optimizer)
    SCALING.set(optimizer, scaling)
    return scaling


def has_rate(optimizer: Any) -> bool:
    """Return whether it's an optimizer of Keras's, with a learning rate."""
    return hasattr(optimizer, "_learning_rate")


def schedule_of(optimizer: Any) -> Any | None:
    """Return the `LearningRateSchedule` of an optimizer's rate; None for a number."""
    rate = optimizer._learning_rate
    return None if isinstance(rate, backend.Variable) else rate


def settable(trainer: Any) -> list[Any]:
    """Return the optimizers whose rate is a number, which callbacks may set."""
    return [each for each in leaves_of(trainer) if schedule_of(each) is None]


def rates_of(trainer: Any) -> dict[str, Any]:
    """Return what `set_rates` sets: the rates and scaling of a model's optimizers."""
    scalings = [scaling_of(each) for each in leaves_of(trainer)]
    return {
        "rates": [base_rate(each) for each in settable(trainer)],
        # The arguments of `Scaling.set`.
        "factors": [s and list(s.values) for s in scalings],
    }


def set_rates(trainer: Any, facts: dict[str, Any]) -> None:
    """Set the base rates and the scaling that another worker's model has."""
    for optimizer, rate in zip(settable(trainer), facts["rates"], strict=True):
        set_base_rate(optimizer, rate)
    for optimizer, factor in zip(leaves_of(trainer), facts["factors"], strict=True):
        scaling = scaling_of(optimizer)
        if scaling is not None and factor is not None:
            scaling.set(*factor)


def scaled(optimizer: Any, rate: Any) -> Any:
    """Return the rate that is read from an optimizer whose base rate is `rate`."""
    scaling = scaling_of(optimizer)
    if scaling is None or current.base_rate:
        return rate
    is_number = isinstance(rate, backend.Variable)
    rate = tf.convert_to_tensor(of_tensorflow(rate))
    rate = rate * tf.cast(scaling.factor(optimizer), rate.dtype)
    if is_number and tf.executing_eagerly():
        # Keras returns a variable here, and scripts assign to it.
        rate.assign = functools.partial(setattr, optimizer, "learning_rate")
    return rate


def set_rate(original: Original, optimizer: Any, rate: Any) -> None:
    """Replace the setter of a `learning_rate`: take it as it is read, multiplied."""
    scaling = scaling_of(optimizer)
    if scaling is not None and not current.base_rate and not callable(rate):
        rate = convert_to_numpy(rate)
        rate = float(rate) / float(scaling.factor(optimizer).numpy())
    original(optimizer, rate)


def base_rate(optimizer: Any) -> float:
    """Return the base rate of an optimizer; for a schedule its current value."""
    with setting(base_rate=True):
        return float(convert_to_numpy(optimizer.learning_rate))


def set_base_rate(optimizer: Any, rate: float) -> None:
    """Set the base rate of an optimizer that has no schedule."""
    with setting(base_rate=True):
        optimizer.learning_rate = rate


def on_base_rate(original: Original, self: Any, index: int, logs: Any = None) -> Any:
    """Replace callbacks that set rates: they see the base rate, the logs the rate."""
    optimizer = getattr(self.model, "optimizer", None)
    several = hasattr(optimizer, "optimizers")
    rates = {
        f"learning_rate_{leaf.name}" if several else "learning_rate": float(
            convert_to_numpy(leaf.learning_rate)
        )
        for leaf in leaves(optimizer)
        if scaling_of(leaf) is not None
    }
    with setting(base_rate=True):
        result = original(self, index, logs)
    for name in rates.keys() & (logs or {}).keys():
        logs[name] = rates[name]
    return result
