"""`fit`'s loop and what stands in it; `*_on_batch`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from cases.training import CROSSENTROPY, Numbers, Scope, case, data, mlp, results, train


@case
def steps_per_execution(scope: Scope) -> Numbers:
    return train(scope, compiled=lambda: {"steps_per_execution": 3})


@case
def run_eagerly(scope: Scope) -> Numbers:
    return train(scope, compiled=lambda: {"run_eagerly": True}, arrays=data(18))


@case
def validation(scope: Scope) -> Numbers:
    return train(
        scope, fit={"validation_split": 0.3, "validation_freq": 2, "epochs": 4}
    )


@case
def several_fits_and_initial_epoch(scope: Scope) -> Numbers:
    x, y = data()
    keras.utils.set_random_seed(1)
    with scope():
        model = mlp()
        model.compile(keras.optimizers.Adam(0.01), **CROSSENTROPY, metrics=["accuracy"])
    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    model.fit(x, y, epochs=1, **options)
    history = model.fit(x, y, epochs=3, initial_epoch=1, **options)
    return {**results(model, x, y), "log": history.history["loss"]}


@case
def on_batch(scope: Scope) -> Numbers:
    x, y = data(23)
    keras.utils.set_random_seed(1)
    with scope():
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), **CROSSENTROPY, metrics=["accuracy"])
    numbers: Numbers = {}
    for i, rows in enumerate([slice(0, 16), slice(16, 23), slice(3, 4)]):
        numbers[f"trained {i}"] = model.train_on_batch(x[rows], y[rows])
        numbers[f"tested {i}"] = model.test_on_batch(x[rows], y[rows])
        numbers[f"predicted on {i}"] = model.predict_on_batch(x[rows])
    return {**numbers, **results(model, x, y)}


@case
def callbacks_that_compute(scope: Scope) -> Numbers:
    """`evaluate` and `predict` in the midst of `fit`."""
    x, y = data()
    seen: list[Any] = []

    class Compute(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(self.model.evaluate(x, y, verbose=0))
            seen.append([float(self.model.predict(x, verbose=0).sum()), logs["loss"]])

    return {**train(scope, fit={"callbacks": [Compute()]}), "seen": np.array(seen)}


@case
def frozen_compiled_again_and_cloned(scope: Scope) -> Numbers:
    x, y = data()
    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(1)
    with scope():
        model = mlp()
        model.compile("sgd", **CROSSENTROPY)
    model.fit(x, y, **options)
    with scope():
        model.layers[0].trainable = False
        model.compile("adam", **CROSSENTROPY)
    model.fit(x, y, **options)
    with scope():
        other = keras.models.clone_model(model)
        other.set_weights(model.get_weights())
        other.compile("adam", **CROSSENTROPY)
    other.fit(x, y, **options)
    return {f"weight {i}": w for i, w in enumerate(other.get_weights())}
