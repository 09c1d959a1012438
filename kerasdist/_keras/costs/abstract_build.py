"""Models without weights: variables that have a shape, but no memory.

Inside `without_weights` a model is built as usual, by any of Keras's ways. Only its
variables differ: they have a TensorFlow handle, which takes memory when it first gets a
value, and it never gets one. Afterwards everything is as before: the next layers get
the names, and the next weights the values, that they would have got without it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state

from kerasdist import _tf

# Variables this small are initialized: step counters, seeds, learning rates are read.
_FEW_ELEMENTS = 16


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Build models without weights in a `with` block, and leave no trace of them.

    Afterwards Keras's names and seeds, and Python's and NumPy's random numbers, are
    what they were before.
    """
    state = global_state.GLOBAL_STATE_TRACKER
    # Until 3.15 settings were stored separately.
    settings = getattr(global_state, "GLOBAL_SETTINGS_TRACKER", None)
    kept = {name: _copy(value) for name, value in vars(state).items()}
    python, numpy = random.getstate(), np.random.get_state()
    # A generator created inside would have no value.
    generator = kept.get("global_seed_generator")
    seeds = None if generator is None else tf.identity(generator.state.value)
    # Garbage (a model's layers, a graph's operations) is collected once, at the end.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with shapes_only():
            yield
    finally:
        if collecting:
            gc.enable()
        # `keras.backend.clear_session` replaces both.
        global_state.GLOBAL_STATE_TRACKER = state
        if settings is not None:
            global_state.GLOBAL_SETTINGS_TRACKER = settings
        vars(state).clear()
        vars(state).update(kept)
        if generator is not None:
            generator.state.assign(seeds)
        random.setstate(python)
        np.random.set_state(numpy)


def shapes_only() -> Any:
    """Create variables without memory, in the default graph; a context manager."""
    return tf.variable_creator_scope(_create)


def _copy(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _create(create: Callable[..., Any], **kwargs: Any) -> Any:
    shape, dtype = _spec(kwargs["initial_value"], kwargs.get("dtype"))
    if shape.num_elements() is not None and shape.num_elements() <= _FEW_ELEMENTS:
        return create(**kwargs)
    return _tf.variable_without_value(
        shape, dtype, bool(kwargs.get("trainable")), kwargs.get("name") or "variable"
    )


def _spec(initial: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the shape and dtype of a variable with this initial value."""
    if callable(initial):
        # Keras's variables have them as attributes; the initializer isn't called.
        for cell in getattr(initial, "__closure__", None) or ():
            variable = cell.cell_contents
            if isinstance(variable, keras.Variable):
                return tf.TensorShape(variable.shape), tf.as_dtype(dtype)
        with tf.__internal__.FuncGraph("initial_value").as_default():
            initial = tf.convert_to_tensor(initial(), dtype)
            return initial.shape, initial.dtype
    if not hasattr(initial, "shape") or not hasattr(initial, "dtype"):
        initial = np.asarray(initial)
    return tf.TensorShape(initial.shape), tf.as_dtype(dtype or initial.dtype)
