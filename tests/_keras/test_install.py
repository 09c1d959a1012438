"""The hooks that are put around Keras's functions."""

from __future__ import annotations

import inspect

import keras
import numpy as np

from kerasdist._keras import install


class Doubled(keras.layers.Layer):
    """A layer without a constructor of its own."""

    def call(self, inputs):
        return 2 * inputs


def test_keras_can_ask_a_constructor_for_its_arguments(tmp_path):
    """Once `Layer.__init__` was seen as (*args, **kwargs), without a `self`.

    Keras takes the names of a layer's arguments from there, and failed with "list index
    out of range" where a layer had no constructor of its own; so did whatever saves
    weights, as `BackupAndRestore`: it makes a bare `Layer` to know its attributes.
    """
    install()
    names = inspect.getfullargspec(keras.layers.Layer.__init__).args
    assert names[0] == "self"
    assert Doubled(name="twice").name == "twice"
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), Doubled()])
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    before = model.get_weights()
    model.set_weights([w * 0 for w in before])
    model.load_weights(path)
    for mine, saved in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, saved)
