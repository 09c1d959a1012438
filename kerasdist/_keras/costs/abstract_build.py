"""Models without weights: variables that have a shape, but no memory.

Inside `without_weights` a model is built as always, by any of Keras's ways. Only what
its variables are made of differs: they have a handle of TensorFlow's, which takes
memory when it's first given a value, and it never is. Afterwards nothing is different:
the next layers get the names, and the next weights the values, that they'd have got.
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

__all__ = ["shapes_only", "without_weights"]

# So few elements are initialized: step counters, seeds, learning rates are read.
_FEW_ELEMENTS = 16


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Build models without weights in a `with` block, and leave no trace of them.

    Keras's names and seeds, Python's and NumPy's random numbers are afterwards what
    they were before.
    """
    state = global_state.GLOBAL_STATE_TRACKER
    # Until 3.15 settings were kept apart.
    settings = getattr(global_state, "GLOBAL_SETTINGS_TRACKER", None)
    kept = {name: _copy(value) for name, value in vars(state).items()}
    python, numpy = random.getstate(), np.random.get_state()
    # Made in here it would have no value.
    generator = kept.get("global_seed_generator")
    seeds = None if generator is None else tf.identity(generator.state.value)
    # A model's layers and a graph's operations are garbage at the end, not before.
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
    """A `with` block in which variables get no memory, in the default graph."""
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
    """The shape and dtype that a variable with this initial value has."""
    if callable(initial):
        # Keras's variables know theirs; the initializer needn't run.
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
