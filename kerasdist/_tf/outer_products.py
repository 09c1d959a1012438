"""Gradients of matrices as the rows that they are computed from.

The gradient of a `Dense` kernel is one matrix product in a step's graph, of the layer's
inputs and the gradients of its outputs; a layer that is called several times adds up
several of them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def factors_of(gradient: Any) -> tuple[Any, Any] | None:
    """Return two matrices whose product, of the first one transposed, is a gradient.

    Args:
        gradient: A tensor of shape `(m, n)`.

    Returns:
        Tensors of shapes `(rows, m)` and `(rows, n)` and the gradient's dtype. None if
        it isn't computed in that way, which a regularizer of the kernel, a table that
        is tied to it, and eager or compiled steps prevent.
    """
    if isinstance(gradient, tf.__internal__.EagerTensor) or gradient.shape.rank != 2:
        return None
    products = _products(gradient)
    if products is None:
        return None
    pairs = []
    for product in products:
        left, right = product.inputs
        if not product.get_attr("transpose_a"):
            left = tf.transpose(left)
        if product.get_attr("transpose_b"):
            right = tf.transpose(right)
        for factor, columns in zip((left, right), gradient.shape, strict=True):
            factor.set_shape([None, columns])
        pairs.append((tf.cast(left, gradient.dtype), tf.cast(right, gradient.dtype)))
    if len(pairs) == 1:
        return pairs[0]
    lefts, rights = zip(*pairs, strict=True)
    return tf.concat(lefts, 0), tf.concat(rights, 0)


def _products(tensor: Any) -> list[Any] | None:
    """Return the matrix products whose sum a tensor is; None if it's another one."""
    found: list[Any] = []
    waiting = [tensor]
    while waiting:
        operation = waiting.pop().op
        if operation.graph is not tensor.graph:
            return None
        if operation.type == "MatMul":
            found.append(operation)
        elif operation.type in ("Identity", "Cast", "AddN", "AddV2"):
            waiting += operation.inputs
        else:
            return None
    return found
