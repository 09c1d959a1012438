"""What a loss is, read from its graph: a mean over rows, a sum, or something else."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from scripts import with_prelude

from kerasdist._keras.global_batch import loss_kinds
from kerasdist._keras.global_batch.loss_kinds import CONSTANT, OTHER, ROWS, Kind
from workers import Workers

MEAN, SUM = Kind(0), Kind(1)
FEATURES, LENGTH = 5, 3
DENSE = keras.layers.Dense(4, kernel_regularizer="l2")
RECURRENT = keras.layers.LSTM(4, return_sequences=True)
ANCHORS = np.ones((4, 4), "float32")  # as many as rows, where these are known


def rows_of(x):
    return ops.mean(RECURRENT(DENSE(x)) ** 2, (1, 2))


def rows_number(x):
    return ops.cast(ops.shape(x)[0], "float32")


def sampled(x):
    """As in a variational autoencoder: as many random numbers as there are rows."""
    hidden = rows_of(x)
    return ops.mean(hidden + keras.random.normal((ops.shape(hidden)[0],), seed=1))


def of_a_mask(x):
    mask = ops.cast(x[:, :, 0] > 0, "float32")
    return ops.sum(ops.mean(DENSE(x), -1) * mask) / ops.maximum(ops.sum(mask), 1.0)


LOSSES = {
    "number per row": (rows_of, ROWS),
    "both halves": (lambda x: ops.concatenate([rows_of(x), rows_of(-x)]), ROWS),
    "mean": (lambda x: ops.mean(rows_of(x)), MEAN),
    "and weights": (lambda x: ops.mean(rows_of(x)) + DENSE.losses[0], MEAN),
    "per feature": (lambda x: ops.mean(ops.mean(x, (0, 1)) * 2.0), MEAN),
    "sum by number": (lambda x: ops.sum(rows_of(x)) / rows_number(x), MEAN),
    "random": (sampled, MEAN),
    "in a function": (lambda x: tf.function(tf.reduce_mean)(rows_of(x)), MEAN),
    "to anchors": (lambda x: ops.mean(ops.matmul(DENSE(x), ANCHORS)), MEAN),
    # More than Python's recursion goes deep.
    "many terms": (lambda x: sum([ops.mean(x)] * 400), MEAN),
    "sum": (lambda x: ops.sum(rows_of(x)), SUM),
    "sum by a constant": (lambda x: ops.sum(DENSE(x) ** 2) / 32.0, SUM),
    "times number": (lambda x: ops.mean(rows_of(x)) * rows_number(x), SUM),
    "sum in a function": (lambda x: tf.function(tf.reduce_sum)(rows_of(x)), SUM),
    "number": (rows_number, Kind(1, counted=True)),
    "its inverse": (lambda x: 2.0 / rows_number(x), Kind(-1, counted=True)),
    "weights": (lambda x: ops.sum(DENSE.kernel**2) ** 0.5, CONSTANT),
    "sum by places": (lambda x: ops.sum(x) / ops.cast(ops.size(x), "float32"), MEAN),
    "masked": (of_a_mask, "function"),
    "sum and mean": (lambda x: ops.sum(rows_of(x)) - ops.mean(x), "function"),
    "root of a mean": (lambda x: ops.sqrt(ops.mean(rows_of(x))), "function"),
    "product": (lambda x: ops.mean(rows_of(x)) * ops.sum(x), "function"),
    "pairs": (lambda x: ops.mean(rows_of(x)[:, None] * rows_of(x)[None, :]), OTHER),
    "some": (lambda x: ops.mean(tf.boolean_mask(x, x[:, 0, 0] > 0)), OTHER),
    "the largest": (lambda x: ops.max(rows_of(x)), loss_kinds.Extreme("max")),
    "the first": (lambda x: rows_of(x)[0], OTHER),
}


# Where a batch's shape is known, a number of rows may be any constant of the script.
CONSTANTS = {"times number": MEAN, "number": CONSTANT, "its inverse": CONSTANT}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        *((name, None) for name in LOSSES),
        *((name, 4) for name in (*CONSTANTS, "pairs")),
    ],
)
def test_a_loss_is_told_by_its_graph(name, known):
    compute, expected = LOSSES[name]
    if known is not None:
        expected = CONSTANTS.get(name, expected)
    for layer, features in ((DENSE, FEATURES), (RECURRENT, 4)):
        if not layer.built:
            layer.build((None, None, features))
    found = []

    # As Keras calls it. AutoGraph would take the analysis itself apart, for seconds.
    @tf.function(
        input_signature=[tf.TensorSpec((known, LENGTH, FEATURES), tf.float32)],
        autograph=False,
    )
    def step(x):
        kinds = loss_kinds.LossKinds(
            tf.shape(x)[0] if known is None else tf.constant(known)
        )
        loss = compute(x)
        kind = kinds.of(loss)
        if kind == OTHER and kinds.whole(loss, lambda values, _: values) is not None:
            kind = "function"
        found.append(kind)
        return 0

    step.get_concrete_function()
    assert found == [expected]


SAID = with_prelude("""
from keras import ops
strategy = kerasdist.RingStrategy()
x = np.random.default_rng(0).normal(size=(8, 5)).astype("float32")

class Largest(keras.layers.Layer):
    def call(self, x):
        self.add_loss(ops.max(x))
        return x

class Own(keras.Model):
    def train_step(self, x):
        with tf.GradientTape() as tape:
            rows = ops.mean(self(x), -1)
            loss = ops.mean(rows[:, None] * rows[None, :])
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": ops.mean(loss)}

def fit(name, loss=None, layer=lambda x: x, kind=keras.Model):
    print("BEGIN", name, flush=True)
    with strategy.scope():
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(2, kernel_regularizer="l2")(inputs)
        model = kind(inputs, layer(hidden))
        model.compile("sgd", loss)
    data = (x,) if kind is Own else (x, x[:, :2])
    for _ in range(2):
        model.fit(*data, batch_size=4, verbose=0)
    if name in ("ordinary", "function"):
        model.evaluate(*data, verbose=0)

fit("ordinary", "mse")
fit("function", lambda t, p: ops.max(t - p))
fit("add_loss", "mse", layer=Largest())
fit("train_step", kind=Own)
""")


@pytest.mark.soak
def test_what_is_not_known_is_said_once():
    first, second = Workers(SAID, 2).run()
    parts = re.split(r"^BEGIN (\w+)$", first.output, flags=re.MULTILINE)[1:]
    said = dict(zip(parts[::2], parts[1::2], strict=True))
    found = {
        name: re.findall("kerasdist: (.*) isn't known to be made of", text)
        for name, text in said.items()
    }
    assert found == {
        "ordinary": [],
        "function": [],
        "add_loss": ["A loss of `add_loss`"],
        "train_step": ["The loss of `train_step`"],
    }
    assert said["function"].count("kerasdist: the loss ") == 1
    assert "mixes the rows of a batch, or isn't known not to" in said["function"]
    assert "isn't known" not in second.output
