"""Losses, weights of samples, and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cases.training import CASES, CROSSENTROPY, Numbers, Scope, case, data, mlp, train


def loss_case(name: str, loss: Callable[[], Any], **more: Any) -> None:
    def run(scope: Scope) -> Numbers:
        x, y = data()
        target = keras.utils.to_categorical(y, 3)

        def compiled() -> dict[str, Any]:
            return {
                "loss": loss(),
                "optimizer": keras.optimizers.SGD(0.01),
                "metrics": ["mae"],
            }

        return train(scope, arrays=(x, target), compiled=compiled, fit=more)

    CASES[name] = run


loss_case("loss_mean", lambda: keras.losses.MeanSquaredError(reduction="mean"))
loss_case("loss_sum", lambda: keras.losses.MeanSquaredError(reduction="sum"))
loss_case("loss_function", lambda: lambda t, p: keras.ops.mean((t - p) ** 2, -1))
loss_case(
    "loss_sample_weight",
    lambda: keras.losses.MeanSquaredError(),
    sample_weight=np.linspace(0.1, 2.0, 51),
)
loss_case(
    "loss_mean_with_sample_weight",
    lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    sample_weight=np.linspace(0.1, 2.0, 51),
)


@case
def class_weight(scope: Scope) -> Numbers:
    return train(scope, fit={"class_weight": {0: 0.5, 1: 1.0, 2: 3.0}})


@case
def regularization_and_add_loss(scope: Scope) -> Numbers:
    class Penalty(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x)))
            return x

    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(
                    7,
                    kernel_regularizer=keras.regularizers.L2(0.1),
                    activity_regularizer=keras.regularizers.L2(0.01),
                ),
                Penalty(),
                keras.layers.Dense(3),
            ]
        )

    return train(scope, build)


@case
def number_per_row(scope: Scope) -> Numbers:
    """Keras sums what `add_loss` is given, and a tape what it differentiates."""

    class Penalty(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x), -1))
            return x

    class Own(keras.Model):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                p = self(x, training=True)
                loss = keras.losses.sparse_categorical_crossentropy(y, p, True)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return self.compute_metrics(x, y, p)

    def build(kind: Any) -> Callable[[], keras.Model]:
        def model() -> keras.Model:
            inputs = keras.Input((5,))
            hidden = Penalty()(keras.layers.Dense(7)(inputs))
            return kind(inputs, keras.layers.Dense(3)(hidden))

        return model

    numbers: Numbers = {}
    for kind in (keras.Model, Own):
        found = train(
            scope,
            build(kind),
            compiled=lambda: {"optimizer": keras.optimizers.SGD(0.01)},
        )
        numbers |= {f"{kind.__name__} {name}": n for name, n in found.items()}
    return numbers


@case
def masked_sequence(scope: Scope) -> Numbers:
    rng = np.random.default_rng(0)
    x = rng.integers(1, 20, size=(21, 6))
    for row, length in enumerate(rng.integers(1, 6, size=21)):
        x[row, length:] = 0
    y = rng.integers(0, 4, size=(21, 6))

    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int64"),
                keras.layers.Embedding(20, 8, mask_zero=True),
                keras.layers.GRU(8, return_sequences=True),
                keras.layers.Dense(4),
            ]
        )

    return train(scope, build, arrays=(x, y), fit={"batch_size": 8})


@case
def several_outputs(scope: Scope) -> Numbers:
    x, y = data()

    def build() -> keras.Model:
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(7, activation="tanh")(inputs)
        return keras.Model(
            inputs,
            {
                "kind": keras.layers.Dense(3, name="kind")(hidden),
                "size": keras.layers.Dense(1, name="size")(hidden),
            },
        )

    target = {"kind": y, "size": x.sum(1, keepdims=True)}
    numbers = train(
        scope,
        build,
        arrays=(x, target),
        compiled=lambda: {
            "loss": {"kind": CROSSENTROPY["loss"], "size": "mse"},
            "loss_weights": {"kind": 1.0, "size": 0.3},
            "metrics": {"kind": ["accuracy"], "size": ["mae"]},
        },
    )
    if not keras.__version__.startswith(("3.14.", "3.15.")):
        # From 3.16 on one process weighs the loss of an output by the batch's rows in
        # steps that were traced with a known number of them, and by 1 in others, as in
        # an epoch's short last one: no number to be equal to.
        parts = ("kind_loss", "size_loss")
        numbers = {k: v for k, v in numbers.items() if not k.endswith(parts)}
    return numbers


@case
def many_metrics(scope: Scope) -> Numbers:
    x, y = data()
    return train(
        scope,
        lambda: mlp(classes=1, activation="sigmoid"),
        arrays=(x, (y == 1).astype("float32")[:, None]),
        compiled=lambda: {
            "loss": "binary_crossentropy",
            "metrics": [
                keras.metrics.AUC(),
                keras.metrics.Precision(),
                keras.metrics.Recall(),
                keras.metrics.MeanSquaredError(),
                keras.metrics.BinaryAccuracy(),
            ],
            "weighted_metrics": ["mae"],
        },
        fit={"sample_weight": np.linspace(0.5, 1.5, 51)},
    )
