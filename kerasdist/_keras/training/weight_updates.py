"""The updates of weights by the gradients of all workers.

They have the bits of Keras's own, and are the same on all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.context import current
from kerasdist._keras.protocols import KerasHooks
from kerasdist._tf.compiled_step import length_step
from kerasdist._tf.patching import Original
from kerasdist._tf.variables import current_facets, of_tensorflow, share_reads

# SGD updates that read a gradient once, and write only the variables.
#
# The means of several workers are in memory that is read elsewhere, too. TensorFlow
# doesn't write to it, so `learning_rate * gradient` is put into new memory, as large as
# all gradients; in one process it overwrites the gradient. For `keras.optimizers.SGD`
# TensorFlow has one operation that does the whole update: the same products and sums,
# element by element, so that the bits are Keras's own
# (`tests/_keras/optimizer/test_weight_updates.py`). With clipping or accumulation the
# last bit may differ: in Keras's operations TensorFlow multiplies the rate by the scale
# first, and the gradient by both.


def sgd_step(
    original: Original, optimizer: Any, gradient: Any, variable: Any, learning_rate: Any
) -> Any:
    """Replace `SGD.update_step`: one operation, no memory for intermediate results."""
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


# Updates of rows in the order of their slices.
#
# The slices of all workers may have one index several times. TensorFlow's threads share
# the slices of `scatter_sub`, each adding some of them: the order of those of one row,
# and so the last bit of their sum, differs between workers, and weights would drift
# apart. `ResourceScatterNdSub` takes slices in their order on a CPU, in one thread. On
# a GPU neither has an order: see `strategies.reduce.consensus`.


def update_rows(original: Original, optimizer: Any, variable: Any, value: Any) -> Any:
    """Replace functions of `TFOptimizer`: slices of a row are in one order everywhere.

    These are `assign_add` and `assign_sub`.
    """
    adds = original.__name__ == "assign_add"
    update = (
        tf.raw_ops.ResourceScatterNdAdd if adds else tf.raw_ops.ResourceScatterNdSub
    )
    hooks: KerasHooks | None = None
    if isinstance(value, tf.IndexedSlices) and current.reduced and not _tf.in_xla():
        hooks = current_facets().hooks
    table = of_tensorflow(variable)
    if hooks is None or not _is_on_cpu(table):
        return original(optimizer, variable, value)
    if _is_large(table) and tf.inside_function() and not _tf.in_parts():
        value = update_compiled(update, table, value)
    if not hooks.updates_alike:
        return original(optimizer, variable, value)
    return update(
        ref=table.handle,
        indices=value.indices[:, tf.newaxis],
        updates=tf.cast(value.values, table.dtype),
    )


def _is_on_cpu(table: Any) -> bool:
    return (
        isinstance(table, tf.Variable)
        and not isinstance(table, tf.distribute.DistributedValues)
        and ":GPU:" not in table.device
    )


# Many slices of a large table, updated by a loop that XLA compiles.
#
# It makes the same sums in the same order as TensorFlow's operations, in a fraction of
# the time (`benchmarks/row_updates`). XLA compiles again for each number of slices,
# which takes 0.1 s. So it gets the largest of the eight numbers between two powers of
# two; the rest, an eighth at the most, is TensorFlow's.

LEAST_SLICES = 2048
_LEAST_BYTES = 1 << 20


def _is_large(table: Any) -> bool:
    is_float = table.dtype in (tf.float32, tf.float64)
    return is_float and _tf.bytes_of(table) >= _LEAST_BYTES


def update_compiled(update: Callable[..., Any], table: Any, slices: Any) -> Any:
    """Update rows of a table by the first slices, compiled; return the other slices."""

    @tf.function(jit_compile=True, autograph=False)
    def compiled(indices: Any, values: Any) -> None:
        update(ref=table.handle, indices=indices[:, tf.newaxis], updates=values)

    def update_some() -> Any:
        count = length - length % length_step(length)
        compiled(indices[:count], tf.cast(values[:count], table.dtype))
        return count

    indices, values = slices.indices, slices.values
    length = tf.shape(indices)[0]
    # XLA leaves out slices outside of the table, TensorFlow raises an error.
    inside = tf.reduce_all((indices >= 0) & (indices < table.shape[0]))
    count = tf.cond((length >= LEAST_SLICES) & inside, update_some, lambda: 0)
    return tf.IndexedSlices(values[count:], indices[count:], slices.dense_shape)


def adagrad_step(
    original: Original, optimizer: Any, gradient: Any, variable: Any, learning_rate: Any
) -> Any:
    """Replace `Adagrad.update_step`: only the rows that have gradients are read.

    Keras divides by the roots of the whole table, of which it then takes these rows. It
    also looks for zeros among all roots; with an epsilon there are none.
    """
    rows = isinstance(gradient, tf.IndexedSlices) and _is_on_cpu(variable)
    if not (rows and current.reduced and optimizer.epsilon > 0) or _tf.in_xla():
        return original(optimizer, gradient, variable, learning_rate)
    slot = optimizer._accumulators[optimizer._get_variable_index(variable)]
    accumulator = _same_device(slot.value, variable)
    if accumulator is None:
        return original(optimizer, gradient, variable, learning_rate)
    indices, shape = gradient.indices, gradient.dense_shape
    values = tf.cast(gradient.values, variable.dtype)
    optimizer.assign_add(slot, tf.IndexedSlices(tf.square(values), indices, shape))
    roots = tf.sqrt(accumulator.sparse_read(indices) + optimizer.epsilon)
    # Between the two, or TensorFlow makes them a product with `rsqrt`: other bits.
    roots = tf.ensure_shape(roots, values.shape)
    step = tf.cast(learning_rate, variable.dtype) * values / roots
    return optimizer.assign_sub(variable, tf.IndexedSlices(step, indices, shape))


# Tables that are read without being copied.
#
# The lookup of an embedding drops what it has read in the same step, so the next update
# of rows finds nothing that shares the table's memory. No number changes.


def share_tables(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Let the next step read the tables of which rows were updated without a copy.

    Call it after the update, in a step of one replica.

    Args:
        gradients: Tensors, IndexedSlices or None.
        variables: The Keras variable of each.
    """
    if _tf.in_xla() or _tf.in_parts():  # XLA's updates don't make reads copy
        return
    for gradient, variable in zip(gradients, variables, strict=False):
        if isinstance(gradient, tf.IndexedSlices):
            (table,) = _tf.local_results(of_tensorflow(variable))
            if isinstance(table, tf.Variable):
                share_reads(table)


# The rows of a table that an optimizer moves in a step.
#
# The gradient of an embedding is IndexedSlices: some of its rows. Keras's optimizers
# differ in the rows that they change:
#
#     the given rows    a row without a gradient stays as it is, to the bit: SGD,
#                       RMSprop, Adagrad, Adadelta, Adafactor
#     some rows         momentum moves a row for long after its last gradient: Adam and
#                       all others; also what accumulates gradients or takes averages
#     all rows          weight decay
#
# The changed rows are given by the slices' indices in the first case; in the second
# they can only be found by comparison.

# Without momentum, their steps are a product with the gradient.
_FOLLOW_GRADIENTS = (
    keras.optimizers.Adadelta,
    keras.optimizers.Adafactor,
    keras.optimizers.Adagrad,
    keras.optimizers.RMSprop,
    keras.optimizers.SGD,
)


def touched_rows(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
) -> list[Any | None]:
    """Return for each variable indices of all rows that a step moves; None: not known.

    Args:
        optimizer: The optimizer that updates, not one that wraps it.
        gradients: What it's given: tensors, IndexedSlices or None.
        variables: One for each gradient.

    Returns:
        Integer tensors of shape `(n,)`, with repetitions; or None.
    """
    return [
        gradient.indices
        if isinstance(gradient, tf.IndexedSlices) and _follows(optimizer, variable)
        else None
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def moves_all_rows(optimizer: Any, variable: Any) -> bool:
    """Return whether an optimizer, if any, moves all rows of a variable each step."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not getattr(optimizer, "weight_decay", None):
        return False
    return bool(optimizer._use_weight_decay(variable.value))


def embedding_tables(trainer: Any) -> set[int]:
    """Return the ids of the Keras variables in which Embedding layers look up rows.

    Tables that are also multiplied with as a whole are excluded: all of their rows get
    gradients.
    """
    return {
        id(variable)
        for layer in trainer._flatten_layers()
        if isinstance(layer, keras.layers.Embedding)
        and not getattr(layer, "tie_weights", False)
        for variable in layer._trainable_variables
    }


def _follows(optimizer: Any, variable: Any) -> bool:
    """Return whether an optimizer leaves rows without a gradient unchanged."""
    return (
        # Subclasses are excluded, since they may do anything.
        type(optimizer) in _FOLLOW_GRADIENTS
        and not getattr(optimizer, "momentum", 0)
        and not optimizer.weight_decay
        and not optimizer.gradient_accumulation_steps
        and not (optimizer.use_ema and optimizer.ema_overwrite_frequency)
        and getattr(variable, "constraint", None) is None
        and not getattr(variable, "overwrite_with_gradient", False)
    )
