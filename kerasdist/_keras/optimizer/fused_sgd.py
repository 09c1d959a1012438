"""Updates that read a gradient once, and write nothing but what they update.

The means of several workers come in memory that others read, too. TensorFlow doesn't
write to it, so that `learning_rate * gradient` goes to new memory, as large as all
gradients; in one process it's written over the gradient. For `keras.optimizers.SGD`
TensorFlow has one operation that does all of an update: the same products and sums,
element by element, so that the bits are Keras's own
(`tests/_keras/optimizer/test_fused_sgd.py`). With clipping or accumulation the last one
may differ: of Keras's operations TensorFlow multiplies the rate with the scale first,
and the gradient with both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdist._keras.context import current

__all__ = ["sgd_step"]


def sgd_step(
    original: Callable[..., Any],
    optimizer: Any,
    gradient: Any,
    variable: Any,
    learning_rate: Any,
) -> Any:
    """In place of `SGD.update_step`."""
    if not current.reduced or not _is_plain(gradient, variable):
        return original(optimizer, gradient, variable, learning_rate)
    rate = tf.cast(learning_rate, variable.dtype)
    if optimizer.momentum == 0:
        return tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle, alpha=rate, delta=gradient, use_locking=True
        )
    momentum = optimizer.momentums[optimizer._get_variable_index(variable)]
    beside = _same_device(momentum.value, variable)
    if beside is None:
        return original(optimizer, gradient, variable, learning_rate)
    return tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=beside.handle,
        lr=rate,
        grad=gradient,
        momentum=tf.cast(optimizer.momentum, variable.dtype),
        use_nesterov=optimizer.nesterov,
        use_locking=True,
    )


def _is_plain(gradient: Any, variable: Any) -> bool:
    """Whether both are what the operation takes: as slices aren't."""
    return (
        isinstance(gradient, tf.Tensor)
        and isinstance(variable, tf.Variable)
        and not isinstance(variable, tf.distribute.DistributedValues)
        and gradient.dtype == variable.dtype
        and variable.dtype in (tf.float32, tf.float64)
    )


def _same_device(distributed: Any, variable: Any) -> Any | None:
    """The copy of a distributed variable that lies beside another variable.

    None if it's elsewhere: of a placed model's optimizer that was built by hand.
    """
    copies = tf.distribute.get_strategy().experimental_local_results(distributed)
    return next((copy for copy in copies if copy.device == variable.device), None)
