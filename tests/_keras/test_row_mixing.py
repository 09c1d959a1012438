"""Which functions of a batch compute each row by itself."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from cases import mixing
from kerasdist._keras.global_batch.row_mixing import (
    FUNCTION,
    MEAN,
    MIXED,
    ROWS,
    SUM,
    kind_of_function,
)

K = keras.ops
Y, P = tf.zeros((4, 3)), tf.zeros((4, 3))
TABLE = tf.ones((3, 2))

# Of these the numbers of several workers are compared with those of one process, too.
OF_CASES = {
    "variance": MIXED,
    "dice": FUNCTION,
    "tversky": FUNCTION,
    "f1": FUNCTION,
    "kappa": FUNCTION,
    "normalized_focal": FUNCTION,
    "prior": FUNCTION,
    "root": FUNCTION,
}
BY_ROW = {
    "squares": lambda y, p: K.square(y - p),
    "mean of a row": lambda y, p: K.mean(K.square(y - p), -1),
    "centred row": lambda y, p: p - K.mean(p, -1, keepdims=True),
    "softmax": lambda y, p: K.softmax(p) * y,
    "sorted row": lambda y, p: K.sort(p, -1),
    "largest of a row": lambda y, p: K.max(p, 1),
    "transposed twice": lambda y, p: K.transpose(K.transpose(p) * 2),
    "flat": lambda y, p: K.reshape(K.abs(y - p), (-1,)),
    "layer": lambda y, p: K.matmul(p, TABLE),
    "looked up": lambda y, p: K.take(TABLE, K.cast(y[:, 0], "int32"), 0),
    "one of a row": lambda y, p: p[:, 1],
    "crossentropy": lambda y, p: keras.losses.categorical_crossentropy(y, p),
    "logits": lambda y, p: tf.nn.softmax_cross_entropy_with_logits(y, p),
    "smoothed": lambda y, p: K.square(p - (0.9 * y + 0.1 / 3)),
    "of the shape": lambda y, p: K.where(y > 0, p, K.zeros_like(p)),
    "products": lambda y, p: tf.einsum("ni,ni->n", y, p),
    "batch of products": lambda y, p: K.matmul(y[:, None], p[:, :, None]),
    "summed along the row": lambda y, p: K.cumsum(p, 1),
    "joined": lambda y, p: K.concatenate([y, p], 1),
    "function": lambda y, p: tf.function(lambda a: K.square(a))(p),
}
REDUCED = {
    "mean": (MEAN, lambda y, p: K.mean(K.square(y - p))),
    "mean of sums": (MEAN, lambda y, p: K.mean(K.sum(K.abs(y - p), -1))),
    "sum": (SUM, lambda y, p: K.sum(y * p)),
    "sum by the size": (MEAN, lambda y, p: K.sum(y * p) / K.cast(K.size(p), "float32")),
    "ratio": (FUNCTION, lambda y, p: K.sum(y * p) / (K.sum(y) + 1)),
}
OF_SEVERAL = {
    "centred": lambda y, p: p - K.mean(p, 0),
    "mean of centred": lambda y, p: K.mean(K.square(p - K.mean(p, 0))),
    "softmax over rows": lambda y, p: K.softmax(p, 0),
    "sorted": lambda y, p: K.sort(p, 0),
    "summed along rows": lambda y, p: K.cumsum(p, 0),
    "backward": lambda y, p: p[::-1] * y,
    "rolled": lambda y, p: K.roll(p, 1, 0) * y,
    "flipped": lambda y, p: K.flip(p, 0) - y,
    "pairs": lambda y, p: K.matmul(y, K.transpose(p)),
    "row by row of pairs": lambda y, p: K.max(K.matmul(y, K.transpose(p)), 1),
    "their number": lambda y, p: p / K.cast(K.shape(p)[0], "float32"),
    "their places": lambda y, p: (
        p * K.cast(tf.range(tf.shape(p)[0]), "float32")[:, None]
    ),
    "largest": lambda y, p: K.max(K.abs(y - p)),
    "half of them": lambda y, p: K.mean(p[: K.shape(p)[0] // 2]),
    "joined below": lambda y, p: K.concatenate([y, p], 0),
    "reshaped": lambda y, p: K.reshape(K.transpose(p), (-1, 3)),
    "function": lambda y, p: tf.function(lambda a: a - K.mean(a, 0))(p),
    "unknown": lambda y, p: tf.numpy_function(lambda a: a, [p], tf.float32),
}


@pytest.mark.parametrize("function", mixing.FUNCTIONS, ids=lambda each: each.__name__)
def test_functions_of_the_cases(function):
    expected = OF_CASES.get(function.__name__, MIXED)
    assert kind_of_function(function, Y[:, :1], P[:, :1]) == expected


@pytest.mark.parametrize("name", BY_ROW)
def test_each_row_by_itself(name):
    assert kind_of_function(BY_ROW[name], Y, P) == ROWS


@pytest.mark.parametrize("name", REDUCED)
def test_means_sums_and_functions_of_them(name):
    expected, function = REDUCED[name]
    assert kind_of_function(function, Y, P) == expected


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_rows_that_are_made_of_several(name):
    assert kind_of_function(OF_SEVERAL[name], Y, P) == MIXED


def test_what_can_not_be_traced():
    assert kind_of_function(lambda y, p: float(p[0, 0]), Y, P) is None
