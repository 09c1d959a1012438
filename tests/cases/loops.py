import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from cases import training as jobs
from cases.training import CROSSENTROPY, Numbers, Scope, case, chain, data, mlp, train

# Rows that the batches divide into, or not.
for name, rows, batch_size in [
    ("uneven_last_batch", 51, 16),
    ("fewer_rows_than_replicas", 17, 4),
    ("one_row_at_a_time", 5, 1),
    ("first_batch_uneven", 3, 3),
    ("even_batches", 48, 12),
]:
    fit = {"batch_size": batch_size}
    jobs.CASES[name] = functools.partial(train, arrays=data(rows), fit=fit)


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
    model = jobs.compiled_in(
        scope, mlp, lambda: keras.optimizers.Adam(0.01), **jobs.CLASSES
    )
    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    model.fit(x, y, epochs=1, **options)
    history = model.fit(x, y, epochs=3, initial_epoch=1, **options)
    return jobs.results(model, x, y, history)


@case
def on_batch(scope: Scope) -> Numbers:
    x, y = data(23)
    model = jobs.compiled_in(scope, mlp, **jobs.CLASSES)
    numbers: Numbers = {}
    for i, rows in enumerate([slice(0, 16), slice(16, 23), slice(3, 4)]):
        numbers[f"trained {i}"] = model.train_on_batch(x[rows], y[rows])
        numbers[f"tested {i}"] = model.test_on_batch(x[rows], y[rows])
        numbers[f"predicted on {i}"] = model.predict_on_batch(x[rows])
    return {**numbers, **jobs.results(model, x, y)}


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
    model = jobs.compiled_in(scope, mlp, **CROSSENTROPY)
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
    return jobs.numbers_of(other)


def optimizer_case(name: str, make: Callable[[], Any], **fit: Any) -> None:
    def run(scope: Scope) -> Numbers:
        # Averages take the weights' places after the training.
        then = ["evaluate"] if make().use_ema else []
        return train(scope, compiled=lambda: {"optimizer": make()}, fit=fit, then=then)

    jobs.CASES[name] = run


o = keras.optimizers
optimizer_case("adam", lambda: o.Adam(0.01))
optimizer_case("clipnorm", lambda: o.SGD(0.1, clipnorm=0.05))
optimizer_case("global_clipnorm", lambda: o.SGD(0.1, global_clipnorm=0.1))
optimizer_case("clipvalue", lambda: o.SGD(0.1, clipvalue=0.01))
optimizer_case("accumulation", lambda: o.SGD(0.1, gradient_accumulation_steps=3))
optimizer_case("weight_decay", lambda: o.AdamW(0.01, weight_decay=0.1))
optimizer_case(
    "average_of_weights",
    lambda: o.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
)
optimizer_case("average_at_the_end", lambda: o.SGD(0.1, use_ema=True))
optimizer_case(
    "all_of_it",
    lambda: o.AdamW(
        0.01, global_clipnorm=0.5, use_ema=True, gradient_accumulation_steps=2
    ),
)
optimizer_case(
    "rate_schedule", lambda: o.SGD(o.schedules.ExponentialDecay(0.1, 2, 0.5))
)
optimizer_case("loss_scale", lambda: o.LossScaleOptimizer(o.SGD(0.1)))


@case
def overflow_on_one_replica(scope: Scope) -> Numbers:
    """One huge sample: the step is skipped on all replicas, the scale halved."""
    x, _ = data(32)
    x[20] = 3e38
    model = jobs.compiled_in(
        scope,
        mlp,
        lambda: o.LossScaleOptimizer(o.SGD(0.1), initial_scale=1024.0),
        "mse",
    )
    target = np.zeros((32, 3), "float32")
    target[20] = 3e38
    model.fit(x, target, batch_size=16, epochs=1, shuffle=False, verbose=0)
    scale = keras.ops.convert_to_numpy(model.optimizer.dynamic_scale)
    return jobs.numbers_of(model, scale=scale)


@case
def mixed_precision(scope: Scope) -> Numbers:
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        numbers = train(scope)
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    # bfloat16 has 8 bits: sums in another order differ in the last of them.
    return {f"coarse {name}": value for name, value in numbers.items()}


FIT: dict[str, Any] = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}


@case
def made_and_compiled_outside(scope: Scope) -> Numbers:
    """Transfer learning: a base that was built before, frozen, compiled again."""
    x, y = data()
    keras.utils.set_random_seed(1)
    base = chain((5,), layers.Dense(7, activation="tanh"))
    base.predict(x, verbose=0)  # what was traced must see the weights of later on
    base.trainable = False
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    with scope():
        model = keras.Sequential([base, layers.Dense(3)])
    model.compile(optimizer, **CROSSENTROPY, metrics=[accuracy])
    first = jobs.numbers_of(model, model.fit(x, y, **FIT))
    base.trainable = True
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, **CROSSENTROPY, metrics=["accuracy"])
    second = model.fit(x, y, **FIT, validation_data=(x, y))
    return {
        **jobs.results(model, x, y, second),
        **{f"first {name}": values for name, values in first.items()},
        "features": base.predict(x, verbose=0),
    }


@case
def metrics_of_a_train_step_made_outside(scope: Scope) -> Numbers:
    """A module's own tracker, and a `compile` of the model's own that makes another."""
    tracker = keras.metrics.Mean(name="loss")

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(3)

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
            self.own.apply(tape.gradient(loss, weights), weights)
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
    return jobs.numbers_of(model, model.fit(x, y, **FIT))
