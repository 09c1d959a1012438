"""Tables that are read without being copied.

An update of some rows (`IndexedSlices`) makes TensorFlow copy the whole table at each
read from then on: a reader might hold the memory during the next update. The lookup
of an embedding drops it in the same step. `DisableCopyOnRead` makes reads share the
memory again. The next update of rows copies the table only if a tensor still shares it,
so no number changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist._tf.variables import of_tensorflow


def share_reads(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
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
                tf.raw_ops.DisableCopyOnRead(resource=table.handle)
