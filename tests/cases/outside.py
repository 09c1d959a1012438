"""Optimizers, metrics and layers that are created outside of the scope."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from cases.training import CROSSENTROPY, Numbers, Scope, case, data, results

FIT: dict[str, Any] = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}


@case
def made_and_compiled_outside(scope: Scope) -> Numbers:
    """Transfer learning: a base that was built before, frozen, compiled again."""
    x, y = data()
    keras.utils.set_random_seed(1)
    base = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(7, activation="tanh")]
    )
    base.predict(x, verbose=0)  # what was traced must see the weights of later on
    base.trainable = False
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    with scope():
        model = keras.Sequential([base, keras.layers.Dense(3)])
    model.compile(optimizer, **CROSSENTROPY, metrics=[accuracy])
    first = model.fit(x, y, **FIT).history
    base.trainable = True
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, **CROSSENTROPY, metrics=["accuracy"])
    second = model.fit(x, y, **FIT, validation_data=(x, y)).history
    return {
        **results(model, x, y),
        **{f"first {name}": values for name, values in first.items()},
        **{f"second {name}": values for name, values in second.items()},
        "features": base.predict(x, verbose=0),
    }


@case
def metrics_of_a_train_step_made_outside(scope: Scope) -> Numbers:
    """A module's own tracker, and a `compile` of the model's own that makes another."""
    tracker = keras.metrics.Mean(name="loss")

    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def compile(self, optimizer: Any) -> None:
            super().compile()
            self.own = optimizer
            self.seen = keras.metrics.SparseCategoricalAccuracy(name="seen")

        def train_step(self, given: Any) -> Any:
            inputs, targets = given
            with tf.GradientTape() as tape:
                outputs = self(inputs)
                loss = CROSSENTROPY["loss"](targets, outputs)
            weights = self.trainable_variables
            gradients = tape.gradient(loss, weights)
            self.own.apply_gradients(zip(gradients, weights, strict=True))
            tracker.update_state(loss, sample_weight=tf.shape(inputs)[0])
            self.seen.update_state(targets, outputs)
            return {"loss": tracker.result(), "seen": self.seen.result()}

        @property
        def metrics(self) -> list[Any]:
            return [tracker, self.seen]

    x, y = data()
    keras.utils.set_random_seed(1)
    with scope():
        model = Own()
    model.compile(keras.optimizers.Adam(0.01))
    history = model.fit(x, y, **FIT).history
    return {
        **{f"weight {i}": w for i, w in enumerate(model.get_weights())},
        **{f"log {name}": values for name, values in history.items()},
    }
