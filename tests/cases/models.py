from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from cases import training as jobs
from cases.training import Numbers, Scope, case, chain, data, mlp, train


class Custom(keras.Model):
    """A plain mean loss, own metrics, nothing about replicas."""

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

    def loss_of(self, batch: Any, training: bool) -> Any:
        x, y = batch
        p = self(x, training=training)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, p))
        self.tracker.update_state(loss)
        self.right.update_state(y, p)
        return loss

    def train_step(self, batch: Any) -> Any:
        jobs.descend(self, lambda: self.loss_of(batch, training=True))
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, batch: Any) -> Any:
        self.loss_of(batch, training=False)
        return {m.name: m.result() for m in self.metrics}


@case
def custom_train_step(scope: Scope) -> Numbers:
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

    def build() -> keras.Model:
        inputs = keras.Input((5,))
        return Own(inputs, layers.Dense(3)(inputs))

    x, y = data(19)
    loss = "sparse_categorical_crossentropy"
    model = jobs.compiled_in(scope, build, lambda: "sgd", loss, metrics=["accuracy"])
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return {
        f"log {name}": np.array([tf.nest.flatten(v) for v in values], "float64")
        for name, values in history.items()
    }


def four_words(rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 500, size=(rows, 4)), rng.integers(0, 3, size=rows)


def embedded_words() -> keras.Model:
    parts = layers.Embedding(500, 6), layers.Flatten(), layers.Dense(3)
    return chain((4,), *parts, dtype="int64")


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
        return chain((5, 3), layers.Bidirectional(layers.LSTM(4)), layers.Dense(3))

    return train(scope, build, arrays=(x, y), fit={"batch_size": 8})


@case
def synchronized_batch_normalization(scope: Scope) -> Numbers:
    """Uneven parts, and in the last batch fewer rows than replicas."""

    def build() -> keras.Model:
        norm = layers.BatchNormalization(synchronized=True)
        return chain((5,), layers.Dense(7), norm, layers.Dense(3))

    return train(scope, build, arrays=data(49))


class Around(keras.Model):
    def __init__(self, inner: Any, last: Any) -> None:
        super().__init__()
        self.inner, self.last = inner, last

    def call(self, x: Any) -> Any:
        return self.last(self.inner(x))


@case
def several_models_nested_and_subclassed(scope: Scope) -> Numbers:
    def build() -> keras.Model:
        inner = Around(layers.Dense(4), layers.ReLU())
        return Around(inner, layers.Dense(3))

    first = train(scope, build)
    second = train(scope, then=[])
    return {**first, **{f"second {name}": value for name, value in second.items()}}


ROWS = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}


def unbuilt(*parts: Any) -> keras.Model:
    return keras.Sequential([*parts])


class Tracked(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def logs(self, loss: Any) -> Any:
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class Autoencoder(keras.Model):
    """Has no `call`, and halves that are built by their first call."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = unbuilt(layers.Dense(4, activation="tanh"))
        self.decoder = unbuilt(layers.Dense(5))
        self.spread = keras.metrics.Mean(name="spread")

    def loss_of(self, data: Any, training: bool) -> Any:
        # `train_on_batch` gives (x, y, sample_weight).
        x = data[0] if isinstance(data, tuple) else data
        code = self.encoder(x, training=training)
        spread = tf.reduce_mean(tf.square(code))
        self.spread.update_state(spread, tf.shape(x)[0])
        y_pred = self.decoder(code, training=training)
        return self.compute_loss(y=x, y_pred=y_pred) + 0.1 * spread

    def train_step(self, data: Any) -> Any:
        jobs.descend(self, lambda: self.loss_of(data, True))
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> Any:
        self.loss_of(data, False)
        return {metric.name: metric.result() for metric in self.metrics}


def adam() -> Any:
    return keras.optimizers.Adam(0.05)


@case
def autoencoder_without_call(scope: Scope) -> Numbers:
    x, _ = data()
    model = jobs.compiled_in(scope, Autoencoder, adam, loss="mse")
    tested = model.evaluate(x[:20], verbose=0, return_dict=True)
    first = model.fit(x, validation_data=(x[:7],), **ROWS).history
    history = model.fit(x, **ROWS)
    on_batch = model.train_on_batch(x[:9], return_dict=True)["spread"]
    return {
        **jobs.numbers_of(model, history, on_batch=on_batch, tested=tested["spread"]),
        **first,
        "decoded": model.decoder.predict(np.ones((3, 4)), verbose=0),
    }


@case
def validation_without_batches(scope: Scope) -> Numbers:
    """And a layer that no step calls, so that each step may be the one that builds."""

    def build() -> keras.Model:
        model = Autoencoder()
        model.never_called = layers.Dense(3)
        return model

    x, _ = data(16)
    model = jobs.compiled_in(scope, build, adam, loss="mse")
    none = tf.data.Dataset.from_tensor_slices((x[:0],)).batch(8)
    return dict(model.fit(x, validation_data=none, **ROWS).history)


class Game(keras.Model):
    """Two networks, each with an optimizer of its own; batches are dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.maker = (
            unbuilt(layers.Dense(6, activation="tanh"), layers.Dense(width))
            for width in (1, 5)
        )
        self.trackers = [keras.metrics.Mean(name=name) for name in ("c_loss", "m_loss")]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def compile(self, critic_optimizer: Any, maker_optimizer: Any, loss: Any) -> None:
        super().compile()
        self.critic_optimizer = critic_optimizer
        self.maker_optimizer = maker_optimizer
        self.loss_fn = loss

    def train_step(self, data: Any) -> Any:
        real, (noise,) = data["real"], data["noise"]
        rows = tf.shape(real)[0]
        ones, zeros = tf.ones((rows, 1)), tf.zeros((rows, 1))
        both = tf.concat([self.maker(noise), real], 0)
        truth = tf.concat([ones, zeros], 0)

        def made() -> Any:
            return self.loss_fn(zeros, self.critic(self.maker(noise)))

        def judged() -> Any:
            return self.loss_fn(truth, self.critic(both))

        losses = (
            jobs.descend(self.critic, judged, self.critic_optimizer),
            jobs.descend(self.maker, made, self.maker_optimizer),
        )
        for tracker, loss in zip(self.trackers, losses, strict=True):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}


@case
def two_optimizers_and_dictionaries(scope: Scope) -> Numbers:
    x, _ = data()
    noise = np.random.default_rng(1).normal(size=(51, 3)).astype("float32")
    keras.utils.set_random_seed(1)
    with scope():
        model = Game()
        model.compile(
            keras.optimizers.Adam(0.02),
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
    batches = tf.data.Dataset.from_tensor_slices({"real": x, "noise": (noise,)})
    history = model.fit(batches.batch(16), epochs=3, verbose=0)
    return jobs.numbers_of(
        model, history, steps=model.maker_optimizer.iterations.numpy()
    )


class Distances(layers.Layer):
    def call(self, anchor: Any, near: Any, far: Any) -> Any:
        def distance(a: Any, b: Any) -> Any:
            return keras.ops.sum(keras.ops.square(a - b), -1)

        return distance(anchor, near), distance(anchor, far)


class Triplets(Tracked):
    """Its `call` takes what Keras takes for x, y and weights."""

    def __init__(self) -> None:
        super().__init__()
        inputs = [keras.Input((5,)) for _ in range(3)]
        embed = chain((5,), layers.Dense(4, "tanh"))
        outputs = Distances()(*[embed(each) for each in inputs])
        self.network = keras.Model(inputs, outputs)

    def call(self, inputs: Any) -> Any:
        return self.network(inputs)

    def train_step(self, data: Any) -> Any:
        def loss_of() -> Any:
            near, far = self.network(data)
            return tf.reduce_mean(tf.maximum(near - far + 0.5, 0.0))

        return self.logs(jobs.descend(self.network, loss_of, self.optimizer))


@case
def triplets_in_a_tuple(scope: Scope) -> Numbers:
    x, _ = data()
    model = jobs.compiled_in(scope, Triplets, adam, weighted_metrics=["mae"])
    arrays = (x, np.roll(x, 1, 0) * 0.5, np.roll(x, 2, 1))
    batches = tf.data.Dataset.from_tensor_slices(arrays).batch(16)
    return jobs.numbers_of(model, model.fit(batches, epochs=2, verbose=0))


def trained_variables(model: Any) -> Numbers:
    """Without states and statistics, which each replica has for its own rows."""
    trained = enumerate(model.trainable_variables)
    return {f"weight {i}": keras.ops.convert_to_numpy(v) for i, v in trained}


@case
def stateful_rows(scope: Scope) -> Numbers:
    """Row i of a batch goes on where row i of the one before has ended."""

    def build() -> keras.Model:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        states = layers.GRU(3, stateful=True)
        return chain((4, 3), states, layers.Dense(1), batch_size=12 // replicas)

    x = np.random.default_rng(0).normal(size=(36, 4, 3)).astype("float32")
    model = jobs.compiled_in(scope, build, loss="mse")
    fit = {"batch_size": 12, "shuffle": False, "verbose": 0}
    losses = model.fit(x, x[:, 0, :1], epochs=2, **fit).history["loss"]
    losses += model.fit(x, x[:, 1, :1], **fit).history["loss"]
    predicted = model.predict(x, batch_size=12, verbose=0)
    return {**trained_variables(model), "losses": losses, "predicted": predicted}


@case
def inputs_of_the_whole_batch(scope: Scope) -> Numbers:
    """`keras.Input` with the global batch's size, of which nothing in the model knows.

    It was refused, although Keras never compares it with the rows that there are.
    """

    def build() -> keras.Model:
        norm = layers.BatchNormalization(synchronized=True)
        return chain((4,), norm, layers.Dense(1), batch_size=16)

    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    model = jobs.compiled_in(scope, build, loss="mse")
    logs = model.fit(x, x[:, :1], validation_split=0.2, **ROWS).history
    return {**trained_variables(model), **logs}


class HalfLabelled(Tracked):
    """Learns from rows with labels and from rows without, which are twice as many."""

    def __init__(self) -> None:
        super().__init__()
        self.network = unbuilt(layers.Dense(3))
        self.probe = keras.optimizers.SGD(0.1)

    def train_step(self, data: Any) -> Any:
        (unlabelled, _), (x, y) = data
        with tf.GradientTape(persistent=True) as tape:
            spread = tf.reduce_mean(tf.square(self.network(unlabelled)))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(
                y, self.network(x)
            )
        weights = self.network.trainable_weights
        self.optimizer.apply(tape.gradient(spread, weights), weights)
        self.probe.apply(tape.gradient(loss, weights), weights)
        return self.logs(loss)


@case
def zipped_batches_of_two_sizes(scope: Scope) -> Numbers:
    x, y = data(36)
    model = jobs.compiled_in(scope, HalfLabelled)
    unlabelled = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    labelled = tf.data.Dataset.from_tensor_slices((x[::2], y[::2])).batch(6)
    pairs = tf.data.Dataset.zip((unlabelled, labelled))
    return jobs.numbers_of(model, model.fit(pairs, verbose=0))
