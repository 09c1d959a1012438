"""The optimizer slots of trained weights, found by building the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

# They don't touch rows without a gradient, and never make such a gradient dense.
_ROWS_ONLY = (keras.optimizers.SGD,)
# How many arrays of a weight's size an update has before it's done with one. One moment
# after the other needs two, but TensorFlow's threads compute them more or less at the
# same time: for a table of 77 MB with Adam two to four were measured.
_UPDATE_ARRAYS = 3


def copy_of(optimizer: Any) -> Any:
    """Return a copy of an optimizer that has no slots of weights yet.

    Args:
        optimizer: An optimizer, its name, or None.

    Returns:
        A new optimizer; None for None.

    Raises:
        ValueError: The optimizer can't be copied.
    """
    if optimizer is None:
        return None
    try:
        if isinstance(optimizer, str):
            return keras.optimizers.get(optimizer)
        return type(optimizer).from_config(optimizer.get_config())
    except Exception as error:
        raise ValueError(
            "A plan needs an optimizer that can be recreated from its configuration, "
            f"to count its slots. Received: optimizer={optimizer!r}; expected a "
            "`keras.optimizers.Optimizer` whose `get_config` returns the arguments of "
            "its constructor, or a name like 'adam'."
        ) from error


def slot_bytes(optimizer: Any, variables: Sequence[Any]) -> list[int]:
    """Build an optimizer; return the bytes of its slots for each variable.

    Slots are all of its variables that aren't scalars: moments, averages (EMA),
    accumulated gradients. To be called inside `without_weights`.

    Args:
        optimizer: From `copy_of`; None has no slots.
        variables: Keras variables.
    """
    if optimizer is None:
        return [0] * len(variables)
    # One of several equal variables is enough, which halves the time.
    keys = [_key(optimizer, variable) for variable in variables]
    chosen = dict(zip(keys, variables, strict=True))
    built = dict(zip(chosen, _build(optimizer, [*chosen.values()]), strict=True))
    return [built[key] for key in keys]


def _key(optimizer: Any, variable: Any) -> Any:
    """Return a key; variables with the same key get slots of the same size."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    kind = type(inner)
    # Muon depends on paths, and optimizers from outside of Keras may do so.
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
    # Adafactor's slots have other shapes than the weights.
    rest = [v for v in inner.variables if id(v) not in owned and len(v.shape)]
    total = sum(map(_bytes, rest))
    elements = sum(math.prod(v.shape) for v in variables) or 1
    return [
        counts[id(v)] + round(total * math.prod(v.shape) / elements) for v in variables
    ]


def gradient_is_dense(optimizer: Any, gradient: Any) -> bool:
    """Return whether a weight's gradient takes as much memory as the weight."""
    if not isinstance(gradient, tf.IndexedSlices):
        return True
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return not (type(inner) in _ROWS_ONLY and not inner.momentum)


def updates_at_once(optimizer: Any) -> int:
    """Return how many arrays of a weight's size exist while that weight is updated."""
    return 0 if optimizer is None else _UPDATE_ARRAYS


def _bytes(variable: Any) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
