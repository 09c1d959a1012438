from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasdist._keras.context import setting
from kerasdist._keras.training.weight_updates import adagrad_step, sgd_step

KINDS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
}


def three_steps(optimizer, step, dtype="float32", slices=False):
    rng = np.random.default_rng(0)
    first = rng.normal(size=1003).astype(dtype)
    variable = keras.Variable(first, dtype=dtype)
    optimizer.build([variable])
    for _ in range(3):
        sizes = 10.0 ** rng.integers(-3, 4, 1003)
        gradient = tf.constant((rng.normal(size=1003) * sizes).astype(dtype))
        if slices:
            indices = tf.constant(rng.integers(0, 300, 1003))
            gradient = tf.IndexedSlices(gradient, indices, tf.constant([1003]))
        with setting(reduced=True):
            step(gradient, variable.value, tf.constant(0.3))
    return np.array(variable)


def refuse(*arguments):
    raise RuntimeError(f"Keras's own operations were used: {arguments}")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_keras(kind, dtype):
    theirs = keras.optimizers.SGD(**KINDS[kind])
    ours = keras.optimizers.SGD(**KINDS[kind])

    def step(*arguments):
        sgd_step(refuse, ours, *arguments)

    expected = three_steps(theirs, theirs.update_step, dtype)
    np.testing.assert_array_equal(three_steps(ours, step, dtype), expected)


def test_rows_of_adagrad_have_the_bits_of_keras():
    theirs, ours = keras.optimizers.Adagrad(), keras.optimizers.Adagrad()
    expected = three_steps(theirs, tf.function(theirs.update_step), slices=True)

    def step(*arguments):
        adagrad_step(refuse, ours, *arguments)

    found = three_steps(ours, tf.function(step), slices=True)
    np.testing.assert_array_equal(found, expected)


def test_what_the_operation_does_not_take_is_left_to_keras():
    variable, ones = tf.Variable(tf.zeros([3])), tf.ones([3])
    sgd = keras.optimizers.SGD()
    # A slot that lies elsewhere: an end of iteration in a step ends `fit` as if its
    # data had ended.
    elsewhere = SimpleNamespace(
        momentum=0.9,
        momentums=[SimpleNamespace(value=SimpleNamespace(device="/device:CPU:9"))],
        _get_variable_index=lambda _: 0,
    )
    for optimizer, gradient, reduced in (
        (sgd, tf.IndexedSlices(tf.ones([1]), tf.constant([0]), [3]), True),
        (sgd, tf.ones([3], tf.float64), True),
        (sgd, ones, False),  # outside of our strategies
        (elsewhere, ones, True),
    ):
        given = []
        with setting(reduced=reduced):
            sgd_step(
                lambda *x, to=given: to.append(x), optimizer, gradient, variable, 0.1
            )
        assert given == [(optimizer, gradient, variable, 0.1)]
