"""SGD updates that read a gradient once, and write only the variables.

The means of several workers are in memory that is read elsewhere, too. TensorFlow
doesn't write to it, so `learning_rate * gradient` is put into new memory, as large as
all gradients; in one process it overwrites the gradient. For `keras.optimizers.SGD`
TensorFlow has one operation that does the whole update: the same products and sums,
element by element, so that the bits are Keras's own
(`tests/_keras/optimizer/test_fused_sgd.py`). With clipping or accumulation the last bit
may differ: in Keras's operations TensorFlow multiplies the rate by the scale first, and
the gradient by both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdist._keras.context import current


def sgd_step(
    original: Callable[..., Any],
    optimizer: Any,
    gradient: Any,
    variable: Any,
    learning_rate: Any,
) -> Any:
    """Replace `SGD.update_step`."""
    if not current.reduced or not _is_plain(gradient, variable):
        return original(optimizer, gradient, variable, learning_rate)
    rate = tf.cast(learning_rate, variable.dtype)
    if optimizer.momentum == 0:
        return tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle, alpha=rate, delta=gradient, use_locking=True
        )
    momentum = optimizer.momentums[optimizer._get_variable_index(variable)]
    accumulator = _same_device(momentum.value, variable)
    if accumulator is None:
        return original(optimizer, gradient, variable, learning_rate)
    return tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=accumulator.handle,
        lr=rate,
        grad=gradient,
        momentum=tf.cast(optimizer.momentum, variable.dtype),
        use_nesterov=optimizer.nesterov,
        use_locking=True,
    )


def _is_plain(gradient: Any, variable: Any) -> bool:
    """Return whether the operation accepts both; it doesn't accept slices."""
    return (
        isinstance(gradient, tf.Tensor)
        and isinstance(variable, tf.Variable)
        and not isinstance(variable, tf.distribute.DistributedValues)
        and gradient.dtype == variable.dtype
        and variable.dtype in (tf.float32, tf.float64)
    )


def _same_device(distributed: Any, variable: Any) -> Any | None:
    """Return the copy of a distributed variable on another variable's device.

    None if there is none, as for a placed model's optimizer that was built by hand.
    """
    copies = tf.distribute.get_strategy().experimental_local_results(distributed)
    return next((copy for copy in copies if copy.device == variable.device), None)
