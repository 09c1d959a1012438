"""Training jobs that must give the same numbers on any number of workers.

A case is a function that builds a model inside `scope()`, trains it, and returns
numbers: weights, logs, evaluations, predictions. It's an ordinary Keras script: the
same function runs in one plain process and under a strategy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
) -> Numbers:
    """Build, train without shuffling, evaluate, predict.

    `compiled` is called inside the scope, where metrics and optimizers belong.
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
        **results(model, x, y, fit.get("batch_size")),
        **{f"log {name}": values for name, values in history.history.items()},
    }


def results(model: keras.Model, x: Any, y: Any, batch_size: int | None = 16) -> Numbers:
    evaluated = model.evaluate(x, y, batch_size=batch_size, verbose=0, return_dict=True)
    predicted = model.predict(x, batch_size=batch_size, verbose=0)
    return {
        **{f"weight {i}": w for i, w in enumerate(model.get_weights())},
        **{f"evaluated {name}": value for name, value in evaluated.items()},
        **{f"predicted {i}": p for i, p in enumerate(tf.nest.flatten(predicted))},
    }


# Batches and rows.


@case
def uneven_last_batch(scope: Scope) -> Numbers:
    return train(scope)


@case
def fewer_rows_than_replicas(scope: Scope) -> Numbers:
    return train(scope, arrays=data(17), fit={"batch_size": 4})


@case
def one_row_at_a_time(scope: Scope) -> Numbers:
    return train(scope, arrays=data(5), fit={"batch_size": 1})


@case
def first_batch_uneven(scope: Scope) -> Numbers:
    return train(scope, arrays=data(3), fit={"batch_size": 3})


@case
def even_batches(scope: Scope) -> Numbers:
    return train(scope, arrays=data(48), fit={"batch_size": 12})


# Optimizers.


def optimizer_case(name: str, make: Callable[[], Any], **fit: Any) -> None:
    def run(scope: Scope) -> Numbers:
        return train(scope, compiled=lambda: {"optimizer": make()}, fit=fit)

    CASES[name] = run


optimizers = keras.optimizers
optimizer_case("adam", lambda: optimizers.Adam(0.01))
optimizer_case("clipnorm", lambda: optimizers.SGD(0.1, clipnorm=0.05))
optimizer_case("global_clipnorm", lambda: optimizers.SGD(0.1, global_clipnorm=0.1))
optimizer_case("clipvalue", lambda: optimizers.SGD(0.1, clipvalue=0.01))
optimizer_case(
    "accumulation", lambda: optimizers.SGD(0.1, gradient_accumulation_steps=3)
)
optimizer_case("weight_decay", lambda: optimizers.AdamW(0.01, weight_decay=0.1))
optimizer_case(
    "average_of_weights",
    lambda: optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
    ),
)
optimizer_case("average_at_the_end", lambda: optimizers.SGD(0.1, use_ema=True))
optimizer_case(
    "all_of_it",
    lambda: optimizers.AdamW(
        0.01, global_clipnorm=0.5, use_ema=True, gradient_accumulation_steps=2
    ),
)
optimizer_case(
    "rate_schedule",
    lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
)
optimizer_case("loss_scale", lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)))


@case
def overflow_on_one_replica(scope: Scope) -> Numbers:
    """One huge sample: the step is skipped on all replicas, the scale halved."""
    x, _ = data(32)
    x[20] = 3e38
    keras.utils.set_random_seed(1)
    with scope():
        model = mlp()
        optimizer = optimizers.LossScaleOptimizer(
            optimizers.SGD(0.1), initial_scale=1024.0
        )
        model.compile(optimizer, keras.losses.MeanSquaredError())
    target = np.zeros((32, 3), "float32")
    target[20] = 3e38
    model.fit(x, target, batch_size=16, epochs=1, shuffle=False, verbose=0)
    scale = keras.ops.convert_to_numpy(optimizer.dynamic_scale)
    return {
        **{f"weight {i}": w for i, w in enumerate(model.get_weights())},
        "scale": scale,
    }


@case
def mixed_precision(scope: Scope) -> Numbers:
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        numbers = train(scope)
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    # bfloat16 has 8 bits: sums in another order differ in the last of them.
    return {f"coarse {name}": value for name, value in numbers.items()}


# Losses.


def loss_case(name: str, loss: Callable[[], Any], **more: Any) -> None:
    def run(scope: Scope) -> Numbers:
        x, y = data()
        target = keras.utils.to_categorical(y, 3)

        def compiled() -> dict[str, Any]:
            return {
                "loss": loss(),
                "optimizer": optimizers.SGD(0.01),
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
    return train(
        scope,
        build,
        arrays=(x, target),
        compiled=lambda: {
            "loss": {"kind": CROSSENTROPY["loss"], "size": "mse"},
            "loss_weights": {"kind": 1.0, "size": 0.3},
            "metrics": {"kind": ["accuracy"], "size": ["mae"]},
        },
    )


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


# Models.


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
def embedding(scope: Scope) -> Numbers:
    """Sparse gradients: repeated rows, rows that only one worker has."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 500, size=(51, 4)), rng.integers(0, 3, size=51)

    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((4,), dtype="int64"),
                keras.layers.Embedding(500, 6),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )

    return train(scope, build, arrays=(x, y), compiled=lambda: {"optimizer": "adam"})


@case
def accumulation_of_slices(scope: Scope) -> Numbers:
    """Open windows at the ends of epochs, clipping, replicas without rows."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 500, size=(17, 4)), rng.integers(0, 3, size=17)

    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((4,), dtype="int64"),
                keras.layers.Embedding(500, 6),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )

    return train(
        scope,
        build,
        arrays=(x, y),
        compiled=lambda: {
            "optimizer": optimizers.Adam(
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
            "optimizer": optimizers.SGD(0.1, gradient_accumulation_steps=2),
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
    second = train(scope)
    return {**first, **{f"second {name}": value for name, value in second.items()}}


# The loop.


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
        model.compile(optimizers.Adam(0.01), **CROSSENTROPY, metrics=["accuracy"])
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
        model.compile(optimizers.SGD(0.1), **CROSSENTROPY, metrics=["accuracy"])
    numbers: Numbers = {}
    for i, rows in enumerate([slice(0, 16), slice(16, 23), slice(3, 4)]):
        numbers[f"trained {i}"] = model.train_on_batch(x[rows], y[rows])
        numbers[f"tested {i}"] = model.test_on_batch(x[rows], y[rows])
        numbers[f"predicted on {i}"] = model.predict_on_batch(x[rows])
    return {**numbers, **results(model, x, y)}


# Kinds of data.


def batches(
    dataset: Callable[[Any, Any], Any], **fit: Any
) -> Callable[[Scope], Numbers]:
    def run(scope: Scope) -> Numbers:
        x, y = data()
        keras.utils.set_random_seed(1)
        with scope():
            model = mlp()
            model.compile(optimizers.SGD(0.1), **CROSSENTROPY, metrics=["accuracy"])
        options = {"epochs": 2, "verbose": 0, **fit}
        history = model.fit(dataset(x, y), **options)
        numbers = {f"log {n}": v for n, v in history.history.items()}
        return {**numbers, **results(model, x, y)}

    return run


def known(*arrays: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(16)


class Sequence(keras.utils.PyDataset):
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self.x, self.y = x, y

    def __len__(self) -> int:
        return -(-len(self.x) // 16)

    def __getitem__(self, index: int) -> Any:
        rows = slice(16 * index, 16 * index + 16)
        return self.x[rows], self.y[rows]


def from_generator(x: Any, y: Any) -> Any:
    def generate() -> Iterator[Any]:
        yield from zip(x, y, strict=True)

    spec = (tf.TensorSpec((5,), tf.float32), tf.TensorSpec((), tf.int64))
    return tf.data.Dataset.from_generator(generate, output_signature=spec).batch(16)


CASES["dataset"] = batches(known)
CASES["dataset_unknown_cardinality"] = batches(from_generator)
CASES["dataset_infinite"] = batches(
    lambda x, y: known(x, y).repeat(), steps_per_epoch=5
)
CASES["dataset_steps_per_epoch"] = batches(
    lambda x, y: known(x, y).repeat(3), steps_per_epoch=4
)
CASES["pydataset"] = batches(Sequence, shuffle=False)


class Sentences(keras.utils.PyDataset):
    """Batches of unequal numbers of rows and of unequal lengths of sequences."""

    def __init__(self, batches: int | None, **options: Any) -> None:
        super().__init__(**options)
        self.batches = batches

    @property
    def num_batches(self) -> int | None:
        return self.batches

    def __getitem__(self, index: int) -> Any:
        rng = np.random.default_rng(index)
        rows = (7, 4, 1, 8)[index % 4]
        words = {
            "words": rng.integers(0, 9, (rows, 3 + index % 3)),
            "extra": rng.normal(size=(rows, 2)).astype("float32"),
        }
        return words, rng.integers(0, 3, rows)


@case
def pydataset_of_sequences(scope: Scope) -> Numbers:
    keras.utils.set_random_seed(1)
    with scope():
        words, extra = keras.Input((None,), dtype="int64"), keras.Input((2,))
        mean = keras.layers.GlobalAveragePooling1D()(
            keras.layers.Embedding(9, 4)(words)
        )
        outputs = keras.layers.Dense(3)(keras.layers.Concatenate()([mean, extra]))
        model = keras.Model({"words": words, "extra": extra}, outputs)
        model.compile(
            optimizers.SGD(0.1), **CROSSENTROPY, weighted_metrics=["accuracy"]
        )
    fit = {"epochs": 2, "verbose": 0, "shuffle": False}
    histories = [
        model.fit(
            Sentences(7, workers=2),
            class_weight={0: 1.0, 1: 2.0, 2: 0.5},
            validation_data=Sentences(3),
            **fit,
        ),
        # Goes on in the second epoch where the first has stopped.
        model.fit(Sentences(5), steps_per_epoch=3, **fit),
        model.fit(Sentences(None), steps_per_epoch=3, **fit),
    ]
    evaluated = model.evaluate(Sentences(5, workers=3), verbose=0)
    return {
        **{f"weight {i}": w for i, w in enumerate(model.get_weights())},
        **{
            f"log {i} {name}": values
            for i, history in enumerate(histories)
            for name, values in history.history.items()
        },
        "evaluated": evaluated,
        "evaluated steps": model.evaluate(Sentences(None), steps=3, verbose=0),
        "predicted": model.predict(Sentences(5), verbose=0),
        "predicted one": model.predict(Sentences(1), verbose=0),
    }


CASES["dataset_with_weights"] = batches(
    lambda x, y: known(x, y, np.linspace(0.1, 2.0, 51)),
    validation_data=known(*data(23)),
)


@case
def distributed_dataset(scope: Scope) -> Numbers:
    """What `experimental_distribute_dataset` has returned already."""
    x, y = data()

    def distribute(dataset: Any) -> Any:
        with scope():
            if not tf.distribute.has_strategy():
                return dataset
            return tf.distribute.get_strategy().experimental_distribute_dataset(dataset)

    keras.utils.set_random_seed(1)
    with scope():
        model = mlp()
        model.compile(optimizers.SGD(0.1), **CROSSENTROPY, metrics=["accuracy"])
    history = model.fit(
        distribute(known(x, y)), validation_data=distribute(known(x, y)), verbose=0
    )
    return {
        **history.history,
        "evaluated": model.evaluate(distribute(known(x, y)), verbose=0),
        "predicted": model.predict(distribute(known(x)), verbose=0),
    }


@case
def kinds_of_evaluate_and_predict(scope: Scope) -> Numbers:
    x, y = data()
    keras.utils.set_random_seed(1)
    with scope():
        model = mlp()
        model.compile(**CROSSENTROPY, metrics=["accuracy"], steps_per_execution=3)
    numbers: Numbers = {}
    for name, kind in {
        "known": known,
        "unknown": from_generator,
        "pydataset": Sequence,
    }.items():
        numbers[f"evaluated {name}"] = model.evaluate(kind(x, y), verbose=0)
        numbers[f"predicted {name}"] = model.predict(kind(x, y), verbose=0)
    numbers["some"] = model.predict(known(x, y), steps=2, verbose=0)
    numbers["one"] = model.predict(x[:1], verbose=0)
    return numbers


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
