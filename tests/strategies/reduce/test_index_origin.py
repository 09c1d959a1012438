"""Where the indices of slices come from: what several replicas do with them."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from kerasdist.strategies.reduce.sparse_parts import FIXED, KEYED, ROWS, parts_of

CHOSEN = tf.Variable([[0, 1], [1, 0]], trainable=False)


@tf.function
def called(table, indices):
    return ops.take(table, indices, axis=0)


def sparse(table, x):
    rows = ops.shape(x)[0]
    one_hot = tf.sparse.from_dense(tf.one_hot(x[:, 0], 9) + tf.zeros([rows, 1]))
    one_hot.set_shape([None, 9])
    return ops.matmul(one_hot, table)


def deep(table, x):
    # The number of positions is known of the input alone.
    hidden = tf.nn.conv1d(tf.gather(table, x), tf.ones((3, 4, 2)), 2, "SAME")
    return ops.take(table, ops.arange(ops.shape(hidden)[1]), axis=0)


def perhaps(table, x):
    # As a replica's batch is filled that has no rows.
    x = tf.cond(tf.shape(x)[0] > 0, lambda: x, lambda: tf.zeros_like(x))
    return ops.take(table, ops.arange(ops.shape(x)[1]), axis=0)


gather, take = tf.gather, functools.partial(ops.take, axis=0)
LOOKUPS = {
    "arange": (lambda t, x: take(t, ops.arange(7)), [FIXED]),
    "variable": (lambda t, x: tf.gather(t, CHOSEN), [FIXED]),
    "in a function": (lambda t, x: called(t, tf.constant([1, 1, 2])), [FIXED]),
    "in a branch": (
        lambda t, x: tf.gather(
            t, tf.cond(CHOSEN[0, 0] > 0, lambda: tf.range(3), lambda: tf.range(1, 4))
        ),
        [FIXED],
    ),
    "known length": (lambda t, x: take(t, ops.arange(ops.shape(x[:, :3])[1])), [KEYED]),
    "length of what is deep inside": (deep, [KEYED]),
    "length of what may be another": (perhaps, [KEYED]),
    "sparse input": (sparse, [KEYED]),
    "unique": (lambda t, x: tf.gather(t, tf.unique(tf.reshape(x, [-1]))[0]), [KEYED]),
    "tokens": (lambda t, x: ops.take(t, x, axis=0), [ROWS]),
    "tokens of a unique": (
        lambda t, x: tf.gather(t, tf.gather(*tf.unique(tf.reshape(x, [-1])))),
        [ROWS],
    ),
    "once for each row": (
        lambda t, x: take(t, ops.tile(ops.arange(3)[None], [ops.shape(x)[0], 1])),
        [ROWS],
    ),
    "number of the row": (lambda t, x: take(t, ops.arange(ops.shape(x)[0])), [ROWS]),
    "tiled for a known number of rows": (
        lambda t, x: tf.gather(t, tf.tile(tf.range(3)[None], [4, 1])),
        [ROWS],
    ),
    "random": (lambda t, x: gather(t, tf.random.uniform([3], 0, 9, tf.int32)), [ROWS]),
    "both": (
        lambda t, x: ops.sum(take(t, x)) + ops.sum(take(t, ops.arange(4))),
        [FIXED, ROWS],
    ),
    "one vector of both": (
        lambda t, x: tf.gather(t, tf.concat([tf.range(3), tf.reshape(x, [-1])], 0)),
        [FIXED, ROWS],
    ),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_parts_are_told_by_the_graph(name):
    look_up, expected = LOOKUPS[name]
    table = tf.Variable(tf.reshape(tf.range(36.0), (9, 4)))
    found = []

    @tf.function(input_signature=[tf.TensorSpec((None, None), tf.int32)])
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(look_up(tf.convert_to_tensor(table), x) ** 2)
        slices = tape.gradient(loss, table)
        parts = parts_of(slices)
        found.extend(part.kind for part in parts)
        # The parts are the whole, in whichever order.
        whole = tf.math.unsorted_segment_sum(slices.values, slices.indices, 9)
        some = [part.slices for part in parts]
        apart = [tf.math.unsorted_segment_sum(p.values, p.indices, 9) for p in some]
        return whole, tf.add_n(apart)

    whole, apart = step(tf.constant([[1, 2, 8], [1, 0, 8]]))
    assert sorted(found) == sorted(expected)
    np.testing.assert_allclose(apart, whole, rtol=1e-6)
