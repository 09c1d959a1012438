"""Calls of a loaded SavedModel's functions in a scope. A hook, see `patches`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasdist._tf.marks import is_ours
from kerasdist._tf.variables import is_distributed


def call(
    original: Callable[..., Any], function: Any, args: Any, captured: Sequence[Any]
) -> Any:
    """Replace the call of a loaded function.

    Outside of a replica, such as at the top level of a script, TensorFlow doesn't know
    which replica's variables are meant, passes placeholders, and the call fails. All
    copies hold the same value, so this reads and writes the first one and copies it to
    the others. Within a replica TensorFlow traces the function once more.
    """
    ours = is_ours(tf.distribute.get_strategy())
    if not ours or not tf.distribute.in_cross_replica_context():
        return original(function, args, captured)
    variables = [c for c in captured if is_distributed(c)]
    handles = [c.values[0].handle if is_distributed(c) else c for c in captured]
    result = original(function, args, handles)
    for variable in variables:
        for copy in variable.values[1:]:
            copy.assign(variable.values[0])
    return result
