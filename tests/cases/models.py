"""Models, and steps of their own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cases.training import Numbers, Scope, case, data, mlp, train


@case
def custom_train_step(scope: Scope) -> Numbers:
    """A plain mean loss, own metrics, nothing about replicas."""

    class Custom(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.tracker = keras.metrics.Mean(name="loss")
            self.right = keras.metrics.SparseCategoricalAccuracy(name="right")

        @property
        def metrics(self) -> list[Any]:
            return [self.tracker, self.right]

        def call(self, x: Any) -> Any:
            return self.inner(x)

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                p = self(x, training=True)
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)
                )
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(
                zip(gradients, self.trainable_variables, strict=True)
            )
            self.tracker.update_state(loss)
            self.right.update_state(y, p)
            return {m.name: m.result() for m in self.metrics}

        def test_step(self, batch: Any) -> Any:
            x, y = batch
            p = self(x, training=False)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, p))
            self.tracker.update_state(loss)
            self.right.update_state(y, p)
            return {m.name: m.result() for m in self.metrics}

    return train(scope, Custom)


@case
def logs_of_any_structure(scope: Scope) -> Numbers:
    """Metrics in metrics, under other names, and numbers that are no metric's."""

    class Own(keras.Model):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                p = self(x, training=True)
                loss = self.compute_loss(x, y, p)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, p)
            results = {metric.name: metric.result() for metric in self.metrics}
            return {**results, "in": {"loss": results["loss"], "last": loss, "n": 3}}

    x, y = data(19)
    keras.utils.set_random_seed(1)
    with scope():
        inputs = keras.Input((5,))
        model = Own(inputs, keras.layers.Dense(3)(inputs))
        model.compile(
            "sgd", loss="sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return {
        f"log {name}": np.array([tf.nest.flatten(v) for v in values], "float64")
        for name, values in history.items()
    }


def four_words(rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 500, size=(rows, 4)), rng.integers(0, 3, size=rows)


def embedded_words() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int64"),
            keras.layers.Embedding(500, 6),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


@case
def embedding(scope: Scope) -> Numbers:
    """Sparse gradients: repeated rows, rows that only one worker has."""
    return train(
        scope,
        embedded_words,
        arrays=four_words(51),
        compiled=lambda: {"optimizer": "adam"},
    )


@case
def accumulation_of_slices(scope: Scope) -> Numbers:
    """Open windows at the ends of epochs, clipping, replicas without rows."""
    return train(
        scope,
        embedded_words,
        arrays=four_words(17),
        compiled=lambda: {
            "optimizer": keras.optimizers.Adam(
                0.01, global_clipnorm=0.1, gradient_accumulation_steps=3
            )
        },
        fit={"batch_size": 4},
    )


@case
def run_eagerly_with_shares(scope: Scope) -> Numbers:
    """Each step asks anew for the rows of the global batch; some parts are empty."""

    def compiled() -> dict[str, Any]:
        return {
            "optimizer": keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
            "loss": keras.losses.MeanSquaredError(reduction="sum"),
            "run_eagerly": True,
        }

    x, y = data(9)
    return train(
        scope,
        arrays=(x, keras.utils.to_categorical(y, 3)),
        compiled=compiled,
        fit={"batch_size": 4},
    )


@case
def recurrent(scope: Scope) -> Numbers:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(21, 5, 3)).astype("float32"), rng.integers(0, 3, size=21)

    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((5, 3)),
                keras.layers.Bidirectional(keras.layers.LSTM(4)),
                keras.layers.Dense(3),
            ]
        )

    return train(scope, build, arrays=(x, y), fit={"batch_size": 8})


@case
def synchronized_batch_normalization(scope: Scope) -> Numbers:
    """Uneven parts, and in the last batch fewer rows than replicas."""

    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(7),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(3),
            ]
        )

    return train(scope, build, arrays=data(49))


@case
def several_models_nested_and_subclassed(scope: Scope) -> Numbers:
    class Inner(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(4, activation="relu")

        def call(self, x: Any) -> Any:
            return self.dense(x)

    class Outer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.last = keras.layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.last(self.inner(x))

    first = train(scope, Outer)
    second = train(scope, then=[])
    return {**first, **{f"second {name}": value for name, value in second.items()}}
