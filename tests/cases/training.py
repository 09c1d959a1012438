"""What cases have in common: data, a model, and training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Scope = Callable[[], contextlib.AbstractContextManager[Any]]
Numbers = dict[str, Any]
CASES: dict[str, Callable[[Scope], Numbers]] = {}


def case(function: Callable[[Scope], Numbers]) -> Callable[[Scope], Numbers]:
    CASES[function.__name__] = function
    return function


def data(rows: int = 51, features: int = 5, classes: int = 3) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, features)).astype("float32")
    return x, (x @ rng.normal(size=(features, classes))).argmax(1).astype("int64")


def mlp(features: int = 5, classes: int = 3, **last: Any) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(7, activation="tanh"),
            keras.layers.Dense(classes, **last),
        ]
    )


CROSSENTROPY = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


def train(
    scope: Scope,
    build: Callable[[], keras.Model] = mlp,
    compiled: Callable[[], dict[str, Any]] = dict,
    fit: dict[str, Any] | None = None,
    arrays: tuple[Any, ...] | None = None,
    then: Sequence[str] = ("evaluate", "predict"),
) -> Numbers:
    """Build, train without shuffling, evaluate, predict.

    `compiled` is called inside the scope, where metrics and optimizers belong. `then`:
    what follows the training. Each is a graph of its own, which takes as long as the
    training: a case whose subject is in neither leaves them out.
    """
    x, y = arrays or data()
    keras.utils.set_random_seed(1)
    with scope():
        model = build()
        model.compile(
            **{
                "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
                **CROSSENTROPY,
                "metrics": ["accuracy"],
                **compiled(),
            }
        )
    fit = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, **(fit or {})}
    history = model.fit(x, y, **fit)
    return {
        **results(model, x, y, fit.get("batch_size"), then),
        **{f"log {name}": values for name, values in history.history.items()},
    }


def results(
    model: keras.Model,
    x: Any,
    y: Any,
    batch_size: int | None = 16,
    then: Sequence[str] = ("evaluate", "predict"),
) -> Numbers:
    options = {"batch_size": batch_size, "verbose": 0}
    evaluated, predicted = {}, []
    if "evaluate" in then:
        evaluated = model.evaluate(x, y, return_dict=True, **options)
    if "predict" in then:
        predicted = model.predict(x, **options)
    return {
        **{f"weight {i}": w for i, w in enumerate(model.get_weights())},
        **{f"evaluated {name}": value for name, value in evaluated.items()},
        **{f"predicted {i}": p for i, p in enumerate(tf.nest.flatten(predicted))},
    }
