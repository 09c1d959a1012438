from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from cases import training as jobs
from cases.training import CROSSENTROPY, Numbers, Scope, case, chain, data, mlp, train


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

        # What follows is without weights.
        then = [] if "sample_weight" in more else ["evaluate"]
        return train(scope, arrays=(x, target), compiled=compiled, fit=more, then=then)

    jobs.CASES[name] = run


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
    return train(scope, fit={"class_weight": {0: 0.5, 1: 1.0, 2: 3.0}}, then=[])


@case
def regularization_and_add_loss(scope: Scope) -> Numbers:
    def build() -> keras.Model:
        l2 = keras.regularizers.L2
        hidden = layers.Dense(
            7, kernel_regularizer=l2(0.1), activity_regularizer=l2(0.01)
        )
        return chain((5,), hidden, jobs.Penalty(jobs.mean_of_squares), layers.Dense(3))

    return train(scope, build, then=["evaluate"])


def slow() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.SGD(0.01)}


@case
def number_per_row(scope: Scope) -> Numbers:
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
            penalty = jobs.Penalty(lambda x: jobs.mean_of_squares(x, -1))
            hidden = penalty(layers.Dense(7)(inputs))
            return kind(inputs, layers.Dense(3)(hidden))

        return model

    numbers: Numbers = {}
    for kind in (keras.Model, Own):
        found = train(scope, build(kind), compiled=slow, then=["evaluate"])
        numbers |= {f"{kind.__name__} {name}": n for name, n in found.items()}
    return numbers


def of_valid(t: Any, p: Any) -> Any:
    valid = keras.ops.cast(t[:, :1] < 0.5, "float32")
    return keras.ops.sum(valid * (t - p) ** 2) / keras.ops.maximum(
        keras.ops.sum(valid), 1.0
    )


def comparable(numbers: Numbers) -> Numbers:
    """What has been trained, without logs of single outputs where they are odd."""
    if keras.__version__.startswith(("3.14.", "3.15.")):
        return numbers
    # From 3.16 on one process weighs the loss of an output by the batch's rows in steps
    # that were traced with a known number of them, and by 1 in others, as in an epoch's
    # short last one: no number to be equal to.
    return {name: n for name, n in numbers.items() if not name.endswith("_loss")}


@case
def losses_of_one_number(scope: Scope) -> Numbers:
    """Loss functions that reduce the rows themselves, with weights and without.

    And one that doesn't.
    """
    functions = {
        "rows": lambda t, p: keras.ops.mean((t - p) ** 2, -1),
        "mean": lambda t, p: keras.ops.mean((t - p) ** 2),
        "sum": lambda t, p: keras.ops.sum((t - p) ** 2),
        "root": lambda t, p: keras.ops.sqrt(keras.ops.mean((t - p) ** 2)),
        "valid": of_valid,
        "dice": keras.losses.Dice(),
    }
    x, y = data(19)
    target = keras.utils.to_categorical(y, 3)

    # One model: each loss has an output, so weights, of its own.
    def build() -> keras.Model:
        inputs = keras.Input((5,))
        hidden = layers.Dense(7, activation="tanh")(inputs)
        heads = {name: layers.Dense(3, name=name)(hidden) for name in functions}
        return keras.Model(inputs, heads)

    numbers = train(
        scope,
        build,
        arrays=(x, dict.fromkeys(functions, target)),
        compiled=lambda: {
            "loss": functions,
            "optimizer": keras.optimizers.SGD(0.01),
            "metrics": None,
        },
        fit={
            "batch_size": 8,
            "epochs": 1,
            "sample_weight": dict.fromkeys(functions, np.linspace(0.1, 2.0, 19)),
        },
        then=["evaluate"],
    )
    return comparable(numbers)


@case
def sums_in_add_loss(scope: Scope) -> Numbers:
    """Sums over rows, by themselves and beside means; ratios; and of weights."""

    class Sums(layers.Layer):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x: Any) -> Any:
            ops = keras.ops
            self.add_loss(0.02 * ops.sum(x * self.scale))
            self.add_loss(0.01 * ops.sum(ops.abs(x)) + 0.1 * ops.mean(x))
            some = ops.cast(x > 0, "float32")
            self.add_loss(ops.sum(x * self.scale * some) / (ops.sum(some) + 1e-9))
            self.add_loss(0.1 * ops.sum(ops.square(self.scale)))
            return x

    def build() -> keras.Model:
        hidden = layers.Dense(7, activity_regularizer="l2")
        return chain((5,), hidden, Sums(), layers.Dense(3))

    return train(scope, build, compiled=slow, then=["evaluate"])


@case
def losses_of_own_steps(scope: Scope) -> Numbers:
    """Sums, means that are written as sums, several terms, functions of them."""

    class Own(keras.Model):
        kind = ""

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            target = keras.ops.one_hot(y, 3)
            loss = jobs.descend(
                self, lambda: self.loss_of(x, target, self(x, training=True))
            )
            for metric in self.metrics:
                metric.update_state(loss)
            return {
                **{metric.name: metric.result() for metric in self.metrics},
                "last": loss,
                "in": {"rows": keras.ops.shape(x)[0]},
            }

        def loss_of(self, x: Any, y: Any, p: Any) -> Any:
            rows = keras.ops.mean((y - p) ** 2, -1)
            kernel = self.trainable_weights[0]
            if self.kind == "sum":
                return tf.nn.compute_average_loss(rows, global_batch_size=8)
            if self.kind == "average":
                regularization = tf.nn.scale_regularization_loss(tf.nn.l2_loss(kernel))
                return tf.nn.compute_average_loss(rows) + regularization
            if self.kind == "object":
                total = keras.losses.MeanSquaredError(reduction="sum")(y, p)
                return total / keras.ops.cast(keras.ops.shape(x)[0], "float32")
            if self.kind == "function":
                return tf.function(tf.reduce_sum)(rows)
            mean, total = keras.ops.mean(rows), keras.ops.sum(rows)
            if self.kind == "terms":
                return 0.1 * (mean + 0.1 * total) + 0.01 * keras.ops.sum(kernel**2)
            return keras.ops.sqrt(mean) * keras.ops.mean(keras.ops.abs(kernel))

    numbers: Numbers = {}
    x, y = data(19)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    kinds = ["sum", "average", "object", "function", "terms", "root"]
    of_known_size = ["average", "object"]

    def build() -> keras.Model:
        inputs = keras.Input((5,))
        hidden = layers.Dense(4, activation="tanh")(inputs)
        return Own(inputs, layers.Dense(3)(hidden))

    for kind in kinds + of_known_size:
        model = jobs.compiled_in(scope, build, lambda: keras.optimizers.SGD(0.01))
        model.kind = kind
        if f"{kind} weight 0" in numbers:
            kind = f"{kind} of batches of a known size"
            history = model.fit(batches, verbose=0)
            del history.history["rows"]  # a number of Python's, a replica's own
        else:
            history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        for name, found in jobs.numbers_of(model, history).items():
            flat = np.array(tf.nest.flatten(found), "float64")
            numbers[f"{kind} {name}"] = flat
    return numbers


@case
def masked_sequence(scope: Scope) -> Numbers:
    rng = np.random.default_rng(0)
    x = rng.integers(1, 20, size=(21, 6))
    for row, length in enumerate(rng.integers(1, 6, size=21)):
        x[row, length:] = 0
    y = rng.integers(0, 4, size=(21, 6))

    def build() -> keras.Model:
        words = layers.Embedding(20, 8, mask_zero=True)
        states = layers.GRU(8, return_sequences=True)
        return chain((6,), words, states, layers.Dense(4), dtype="int64")

    return train(scope, build, arrays=(x, y), fit={"batch_size": 8})


def two_heads(hidden: Callable[[Any], Any]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        inputs = keras.Input((5,))
        heads = {"kind": 3, "size": 1}
        features = hidden(inputs)
        outputs = {n: layers.Dense(w, name=n)(features) for n, w in heads.items()}
        return keras.Model(inputs, outputs)

    return build


def of_two_heads(**more: Any) -> dict[str, Any]:
    return {
        "loss": {"kind": CROSSENTROPY["loss"], "size": "mse"},
        "metrics": {"kind": ["accuracy"], "size": ["mae"]},
        **more,
    }


@case
def several_outputs(scope: Scope) -> Numbers:
    x, y = data()
    numbers = train(
        scope,
        two_heads(lambda x: layers.Dense(7, activation="tanh")(x)),
        arrays=(x, {"kind": y, "size": x.sum(1, keepdims=True)}),
        compiled=lambda: of_two_heads(loss_weights={"kind": 1.0, "size": 0.3}),
    )
    return comparable(numbers)


@case
def one_row_and_several_losses(scope: Scope) -> Numbers:
    """Most replicas have no row to build the losses from."""

    def hidden(inputs: Any) -> Any:
        features = layers.Dense(7, kernel_regularizer="l2")(inputs)
        return jobs.Penalty(jobs.mean_of_squares)(features)

    x, y = data(3)
    return train(
        scope,
        two_heads(hidden),
        arrays=(x, {"kind": y, "size": x.sum(1)}),
        compiled=of_two_heads,
        fit={"batch_size": 1},
    )


@case
def many_metrics(scope: Scope) -> Numbers:
    x, y = data()
    names = ("AUC", "Precision", "Recall", "MeanSquaredError", "BinaryAccuracy")
    return train(
        scope,
        lambda: mlp(classes=1, activation="sigmoid"),
        arrays=(x, (y == 1).astype("float32")[:, None]),
        compiled=lambda: {
            "loss": "binary_crossentropy",
            "metrics": [getattr(keras.metrics, name)() for name in names],
            "weighted_metrics": ["mae"],
        },
        fit={"sample_weight": np.linspace(0.5, 1.5, 51)},
        then=["evaluate"],
    )
