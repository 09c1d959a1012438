"""What cases have in common: data, a model, and training."""

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


def chain(shape: Sequence[int | None], *layers: Any, **options: Any) -> keras.Model:
    return keras.Sequential([keras.Input(shape, **options), *layers])


def mlp(features: int = 5, classes: int = 3, **last: Any) -> keras.Model:
    hidden = keras.layers.Dense(7, activation="tanh")
    return chain((features,), hidden, keras.layers.Dense(classes, **last))


class Penalty(keras.layers.Layer):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def call(self, x: Any) -> Any:
        self.add_loss(self.function(x))
        return x


def mean_of_squares(x: Any, axis: int | None = None) -> Any:
    return 0.01 * keras.ops.mean(keras.ops.square(x), axis)


CROSSENTROPY = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
CLASSES = {**CROSSENTROPY, "metrics": ["accuracy"]}


def descend(model: Any, loss_of: Callable[[], Any], optimizer: Any = None) -> Any:
    """A step of a script's own, as most write it; returns the loss."""
    with tf.GradientTape() as tape:
        loss = loss_of()
    weights = model.trainable_variables
    (optimizer or model.optimizer).apply(tape.gradient(loss, weights), weights)
    return loss


def numbers_of(model: Any, history: Any = None, **more: Any) -> Numbers:
    logs = history.history if history else {}
    return {
        **{f"weight {i}": w for i, w in enumerate(model.get_weights())},
        **{f"log {name}": values for name, values in logs.items()},
        **more,
    }


def compiled_in(
    scope: Scope,
    build: Callable[[], Any],
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1),
    *args: Any,
    **more: Any,
) -> Any:
    """A model that is built and compiled in the scope, where optimizers belong, too."""
    keras.utils.set_random_seed(1)
    with scope():
        model = build()
        model.compile(optimizer(), *args, **more)
    return model


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
        given = {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), **CLASSES}
        model.compile(**{**given, **compiled()})
    fit = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, **(fit or {})}
    history = model.fit(x, y, **fit)
    return results(model, x, y, history, fit["batch_size"], then)


def results(
    model: keras.Model,
    x: Any,
    y: Any,
    history: Any = None,
    batch_size: int = 16,
    then: Sequence[str] = ("evaluate", "predict"),
) -> Numbers:
    options = {"batch_size": batch_size, "verbose": 0}
    found = numbers_of(model, history)
    if "evaluate" in then:
        found["evaluated"] = model.evaluate(x, y, **options)
    if "predict" in then:
        predicted = tf.nest.flatten(model.predict(x, **options))
        found |= {f"predicted {i}": part for i, part in enumerate(predicted)}
    return found
