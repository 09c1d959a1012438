"""Functions of a SavedModel that was loaded in a scope. A hook, see `patches`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasdist._tf.variables import is_distributed

__all__ = ["call"]


def call(
    original: Callable[..., Any], function: Any, args: Any, captured: Sequence[Any]
) -> Any:
    """In place of the call of a loaded function.

    Outside of a replica, as in the lines of a script, TensorFlow gives it placeholders
    for its variables, since which replica's are meant isn't known, and the call ends
    with an error. Copies hold the same: here the first is read and written, and the
    others follow. A function that is traced here isn't run in a replica: TensorFlow
    traces it there again.
    """
    ours = hasattr(tf.distribute.get_strategy().extended, "timer")
    if not ours or not tf.distribute.in_cross_replica_context():
        return original(function, args, captured)
    variables = [c for c in captured if is_distributed(c)]
    handles = [c.values[0].handle if is_distributed(c) else c for c in captured]
    result = original(function, args, handles)
    for variable in variables:
        for copy in variable.values[1:]:
            copy.assign(variable.values[0])
    return result
