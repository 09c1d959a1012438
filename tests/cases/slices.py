"""Gradients that are slices of a table: of tokens, of constants, and both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from cases.training import CASES, CROSSENTROPY, Numbers, Scope, case, results, train

LENGTH = 5


class Lookups(keras.layers.Layer):
    """Tables that are looked up by the batch's tokens, by constants, and by both."""

    def __init__(self) -> None:
        super().__init__()
        self.words = keras.layers.Embedding(30, 4)
        self.positions = keras.layers.Embedding(LENGTH, 4)
        self.distances = keras.layers.Embedding(LENGTH, 4)
        self.kinds = keras.layers.Embedding(2 * LENGTH, 4)

    def call(self, x: Any) -> Any:
        rows, length = ops.shape(x)
        place = ops.arange(LENGTH)
        distance = ops.abs(place[:, None] - place[None, :])
        few = ops.convert_to_tensor([1, 7, 7, 2])
        tiled = ops.tile(ops.arange(length)[None], [rows, 1])
        return (
            self.words(x)
            + ops.mean(self.words(few), 0)
            # As long as the sequence, which isn't known when this is traced.
            + self.positions(ops.arange(length))
            + ops.mean(self.distances(distance), (0, 1))
            # Once for each row, beside once for all.
            + self.kinds(tiled)
            + ops.mean(self.kinds(ops.arange(LENGTH)), 0)
        )


def lookups() -> keras.Model:
    inputs = keras.Input((None,), dtype="int64")
    hidden = ops.tanh(Lookups()(inputs))
    return keras.Model(inputs, keras.layers.Dense(3)(ops.mean(hidden, 1)))


def sentences(rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 30, (rows, LENGTH)), rng.integers(0, 3, rows)


def unequal(scope: Scope, rows: int, of: int | None) -> Numbers:
    """Train with batches of 7 sequences, of another length each.

    Args:
        scope: As of each case.
        rows: How many there are in all.
        of: How many rows TensorFlow knows each batch to have, if it does.
    """
    x, y = sentences(rows)

    def batches() -> Iterator[Any]:
        for number, start in enumerate(range(0, rows, 7)):
            yield x[start : start + 7, : LENGTH - number], y[start : start + 7]

    spec = (tf.TensorSpec((of, None), tf.int64), tf.TensorSpec((of,), tf.int64))
    keras.utils.set_random_seed(1)
    with scope():
        model = lookups()
        model.compile(keras.optimizers.Adam(0.05, clipnorm=0.02), **CROSSENTROPY)
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    history = model.fit(data, verbose=0)
    return {**results(model, x, y, then=[]), "log": history.history["loss"]}


@case
def slices_adam_clipnorm(scope: Scope) -> Numbers:
    """Batches of sequences of unequal lengths."""
    return unequal(scope, 17, None)


@case
def slices_of_known_rows(scope: Scope) -> Numbers:
    """As many rows in each batch, and unequal lengths."""
    return unequal(scope, 14, 7)


def slices_case(name: str, optimizer: Callable[[], Any]) -> None:
    def run(scope: Scope) -> Numbers:
        return train(
            scope,
            lookups,
            arrays=sentences(17),
            compiled=lambda: {"optimizer": optimizer()},
            fit={"batch_size": 7},
            then=[],
        )

    CASES[f"slices_{name}"] = run


slices_case("rmsprop", lambda: keras.optimizers.RMSprop(0.05, global_clipnorm=0.05))
slices_case("adagrad", lambda: keras.optimizers.Adagrad(0.1))
slices_case("momentum", lambda: keras.optimizers.SGD(0.1, momentum=0.9))
slices_case(
    "accumulation",
    lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2),
)
slices_case(
    "loss_scale",
    lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.05), initial_scale=64.0
    ),
)


@case
def slices_of_sparse_input(scope: Scope) -> Numbers:
    """A kernel's slices are summed over the batch already."""
    rng = np.random.default_rng(0)
    x = (rng.uniform(size=(21, 12)) > 0.7).astype("float32")
    x[3] = 0
    y = rng.integers(0, 3, 21)
    keras.utils.set_random_seed(1)
    with scope():
        model = keras.Sequential(
            [keras.Input((12,), sparse=True), keras.layers.Dense(3)]
        )
        model.compile(
            keras.optimizers.Adam(0.05, clipnorm=0.1),
            **CROSSENTROPY,
        )
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y)).batch(8)
    history = model.fit(data, epochs=2, verbose=0)
    weights = {f"weight {i}": w for i, w in enumerate(model.get_weights())}
    return {**weights, "log": history.history["loss"]}


@case
def slices_in_a_loop(scope: Scope) -> Numbers:
    """A loop of one's own: the sum over the replicas."""
    x, y = sentences(12)
    keras.utils.set_random_seed(1)
    with scope():
        strategy = tf.distribute.get_strategy()
        model = lookups()
        optimizer = keras.optimizers.Adam(0.05)
        optimizer.build(model.trainable_variables)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        parts = strategy.experimental_distribute_dataset(data)

    def step(batch: Any) -> None:
        x, y = batch
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            loss = tf.reduce_sum(losses) / 4
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    @tf.function
    def run(batch: Any) -> None:
        strategy.run(step, args=(batch,))

    for batch in parts:
        run(batch)
    return {f"weight {i}": w for i, w in enumerate(model.get_weights())}
