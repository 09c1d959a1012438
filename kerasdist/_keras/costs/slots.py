"""What an optimizer keeps for the weights that it trains, found from itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

__all__ = ["copy_of", "gradient_is_dense", "slot_bytes", "updates_at_once"]

# They leave rows without a gradient as they are, and never make such a gradient dense.
_ROWS_ONLY = (keras.optimizers.SGD,)
# How many arrays of a weight's size an update computes before it's done with one. One
# moment after the other takes two; TensorFlow's threads compute them at the same time,
# more or less: for a table of 77 MB with Adam two to four were seen.
_UPDATE_ARRAYS = 3


def copy_of(optimizer: Any) -> Any:
    """Return an optimizer like this one that has no variables of weights yet.

    Args:
        optimizer: An optimizer, its name, or None.

    Returns:
        A new optimizer; None for None.

    Raises:
        ValueError: It can't be made.
    """
    if optimizer is None:
        return None
    try:
        if isinstance(optimizer, str):
            return keras.optimizers.get(optimizer)
        return type(optimizer).from_config(optimizer.get_config())
    except Exception as error:
        raise ValueError(
            "A plan needs an optimizer that can be made again from its configuration, "
            f"to see what it keeps. Received: optimizer={optimizer!r}; expected a "
            "`keras.optimizers.Optimizer` whose `get_config` returns the arguments of "
            "its constructor, or a name like 'adam'."
        ) from error


def slot_bytes(optimizer: Any, variables: Sequence[Any]) -> list[int]:
    """Build an optimizer; return what it keeps for each variable, in bytes.

    Moments, averages (EMA), accumulated gradients: all its variables that aren't
    scalars. To be called inside `without_weights`.

    Args:
        optimizer: From `copy_of`; None keeps nothing.
        variables: Keras variables.
    """
    if optimizer is None:
        return [0] * len(variables)
    # Of equal variables one is enough, which saves half of the time.
    keys = [_key(optimizer, variable) for variable in variables]
    chosen = dict(zip(keys, variables, strict=True))
    built = dict(zip(chosen, _build(optimizer, [*chosen.values()]), strict=True))
    return [built[key] for key in keys]


def _key(optimizer: Any, variable: Any) -> Any:
    """Variables with one key get equal slots."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    kind = type(inner)
    # Muon looks at paths, and what isn't Keras's may do so.
    if kind.__module__.partition(".")[0] != "keras" or kind.__name__ == "Muon":
        return id(variable)
    replaced = bool(getattr(variable, "overwrite_with_gradient", False))
    return tuple(variable.shape), variable.dtype, replaced


def _build(optimizer: Any, variables: Sequence[Any]) -> list[int]:
    if not variables:
        return []
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    counts = {id(variable): 0 for variable in variables}
    owned: set[int] = set()
    original = inner.add_variable_from_reference

    def add(reference: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(reference, *args, **kwargs)
        if id(reference) in counts:
            counts[id(reference)] += _bytes(made)
            owned.add(id(made))
        return made

    inner.add_variable_from_reference = add
    try:
        optimizer.build(list(variables))
    finally:
        del inner.add_variable_from_reference
    # Adafactor's are of other shapes than the weights.
    rest = [v for v in inner.variables if id(v) not in owned and len(v.shape)]
    total = sum(map(_bytes, rest))
    elements = sum(math.prod(v.shape) for v in variables) or 1
    return [
        counts[id(v)] + round(total * math.prod(v.shape) / elements) for v in variables
    ]


def gradient_is_dense(optimizer: Any, gradient: Any) -> bool:
    """Whether a weight's gradient takes as much memory as the weight."""
    if not isinstance(gradient, tf.IndexedSlices):
        return True
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return not (type(inner) in _ROWS_ONLY and not inner.momentum)


def updates_at_once(optimizer: Any) -> int:
    """How many arrays of a weight's size exist while that weight is updated."""
    return 0 if optimizer is None else _UPDATE_ARRAYS


def _bytes(variable: Any) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
