"""SGD in one operation: the bits are those of Keras's own operations."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasdist._keras.context import setting
from kerasdist._keras.optimizer.fused_sgd import sgd_step

KINDS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
}


def three_steps(optimizer, step, dtype="float32"):
    rng = np.random.default_rng(0)
    first = rng.normal(size=1003).astype(dtype)
    variable = keras.Variable(first, dtype=dtype)
    optimizer.build([variable])
    for _ in range(3):
        sizes = 10.0 ** rng.integers(-3, 4, 1003)
        gradient = tf.constant((rng.normal(size=1003) * sizes).astype(dtype))
        with setting(reduced=True):
            step(gradient, variable.value, tf.constant(0.3))
    return np.array(variable)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_keras(kind, dtype):
    theirs = keras.optimizers.SGD(**KINDS[kind])
    ours = keras.optimizers.SGD(**KINDS[kind])

    def refuse(*arguments):
        raise RuntimeError(f"Keras's own operations were used: {arguments}")

    def step(*arguments):
        sgd_step(refuse, ours, *arguments)

    expected = three_steps(theirs, theirs.update_step, dtype)
    np.testing.assert_array_equal(three_steps(ours, step, dtype), expected)


@pytest.mark.parametrize(
    "gradient",
    [
        tf.IndexedSlices(tf.ones([1]), tf.constant([0]), [3]),
        tf.ones([3], tf.float64),
    ],
    ids=["slices", "another dtype"],
)
def test_what_the_operation_does_not_take_is_left_to_keras(gradient):
    given = []
    variable = tf.Variable(tf.zeros([3]))
    optimizer = keras.optimizers.SGD()
    with setting(reduced=True):
        sgd_step(lambda *a: given.append(a), optimizer, gradient, variable, 0.1)
    assert given == [(optimizer, gradient, variable, 0.1)]


def test_outside_of_our_strategies_it_is_left_to_keras():
    given = []
    variable = tf.Variable(tf.zeros([3]))
    optimizer = keras.optimizers.SGD()
    sgd_step(lambda *a: given.append(a), optimizer, tf.ones([3]), variable, 1.0)
    assert len(given) == 1


def test_a_slot_that_lies_elsewhere_is_left_to_keras():
    """An end of iteration in a step ends `fit` as if its data had ended."""
    given = []
    slot = SimpleNamespace(value=SimpleNamespace(device="/device:CPU:9"))
    optimizer = SimpleNamespace(
        momentum=0.9, momentums=[slot], _get_variable_index=lambda _: 0
    )
    variable = tf.Variable(tf.zeros([3]))
    with setting(reduced=True):
        sgd_step(lambda *a: given.append(a), optimizer, tf.ones([3]), variable, 0.1)
    assert len(given) == 1
