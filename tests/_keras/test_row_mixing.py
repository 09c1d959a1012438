import keras
import pytest
import tensorflow as tf

from kerasdist._keras.global_batch import row_mixing
from kerasdist._keras.global_batch.row_mixing import MEAN, kind_of_function

K = keras.ops
Y, P = tf.zeros((4, 3)), tf.zeros((4, 3))
TABLE = tf.ones((3, 2))

BY_ROW = {
    "squares": lambda y, p: K.square(y - p),
    "centred row": lambda y, p: p - K.mean(p, -1, keepdims=True),
    "sorted row": lambda y, p: K.sort(p, -1),
    "transposed twice": lambda y, p: K.transpose(K.transpose(p) * 2),
    "layer": lambda y, p: K.matmul(p, TABLE),
    "looked up": lambda y, p: K.take(TABLE, K.cast(y[:, 0], "int32"), 0),
    "one of a row": lambda y, p: p[:, 1],
    "crossentropy": lambda y, p: keras.losses.categorical_crossentropy(y, p),
    "batch of products": lambda y, p: K.matmul(y[:, None], p[:, :, None]),
    "summed along the row": lambda y, p: K.cumsum(p, 1),
    "function": lambda y, p: tf.function(lambda a: K.square(a))(p),
}
REDUCED = {
    "mean": (MEAN, lambda y, p: K.mean(K.square(y - p))),
    "mean of sums": (MEAN, lambda y, p: K.mean(K.sum(K.abs(y - p), -1))),
    "sum": (row_mixing.SUM, lambda y, p: K.sum(y * p)),
    "sum by the size": (MEAN, lambda y, p: K.sum(y * p) / K.cast(K.size(p), "float32")),
    "ratio": (row_mixing.FUNCTION, lambda y, p: K.sum(y * p) / (K.sum(y) + 1)),
}
OF_SEVERAL = {
    "mean of centred": lambda y, p: K.mean(K.square(p - K.mean(p, 0))),
    "sorted": lambda y, p: K.sort(p, 0),
    "summed along rows": lambda y, p: K.cumsum(p, 0),
    "backward": lambda y, p: p[::-1] * y,
    "pairs": lambda y, p: K.matmul(y, K.transpose(p)),
    "their number": lambda y, p: p / K.cast(K.shape(p)[0], "float32"),
    "their places": lambda y, p: (
        p * K.cast(tf.range(tf.shape(p)[0]), "float32")[:, None]
    ),
    "largest": lambda y, p: K.max(K.abs(y - p)),
    "joined below": lambda y, p: K.concatenate([y, p], 0),
    "function": lambda y, p: tf.function(lambda a: a - K.mean(a, 0))(p),
    "unknown": lambda y, p: tf.numpy_function(lambda a: a, [p], tf.float32),
}
ALL = {
    **{name: (row_mixing.ROWS, function) for name, function in BY_ROW.items()},
    **REDUCED,
    **{f"{name} of several": (row_mixing.MIXED, f) for name, f in OF_SEVERAL.items()},
}


@pytest.mark.parametrize("name", ALL)
def test_a_function_is_told_by_its_graph(name):
    expected, function = ALL[name]
    assert kind_of_function(function, Y, P) == expected


def test_what_can_not_be_traced():
    assert kind_of_function(lambda y, p: float(p[0, 0]), Y, P) is None
