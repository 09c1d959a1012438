"""Models whose own step is all that says what their parts are called with."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cases.training import Numbers, Scope, case, data

ROWS = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}


class Autoencoder(keras.Model):
    """Has no `call`, and halves that are built by their first call."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.layers.Dense(4, activation="tanh")])
        self.decoder = keras.Sequential([keras.layers.Dense(5)])
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
        with tf.GradientTape() as tape:
            loss = self.loss_of(data, True)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> Any:
        self.loss_of(data, False)
        return {metric.name: metric.result() for metric in self.metrics}


@case
def autoencoder_without_call(scope: Scope) -> Numbers:
    x, _ = data()
    keras.utils.set_random_seed(1)
    with scope():
        model = Autoencoder()
        model.compile(keras.optimizers.Adam(0.05), loss="mse")
    tested = model.evaluate(x[:20], verbose=0, return_dict=True)
    logs = model.fit(x, validation_data=(x[:7],), **ROWS).history
    logs |= model.fit(x, **ROWS).history
    logs["on batch"] = model.train_on_batch(x[:9], return_dict=True)["spread"]
    return {
        **{f"weight {i}": w for i, w in enumerate(model.get_weights())},
        **{f"log {name}": values for name, values in logs.items()},
        "tested": tested["spread"],
        "decoded": model.decoder.predict(np.ones((3, 4)), verbose=0),
    }


@case
def validation_without_batches(scope: Scope) -> Numbers:
    """And a layer that no step calls, so that each step may be the one that builds."""
    x, _ = data(16)
    keras.utils.set_random_seed(1)
    with scope():
        model = Autoencoder()
        model.never_called = keras.layers.Dense(3)
        model.compile(keras.optimizers.Adam(0.05), loss="mse")
    none = tf.data.Dataset.from_tensor_slices((x[:0],)).batch(8)
    history = model.fit(x, validation_data=none, **ROWS).history
    return {f"log {name}": np.array(values) for name, values in history.items()}


class Game(keras.Model):
    """Two networks, each with an optimizer of its own; batches are dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = keras.Sequential(
            [keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)]
        )
        self.maker = keras.Sequential(
            [keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(5)]
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
        made = self.maker(noise)
        with tf.GradientTape() as tape:
            judged = self.critic(tf.concat([made, real], 0))
            critic_loss = self.loss_fn(tf.concat([ones, zeros], 0), judged)
        weights = self.critic.trainable_weights
        gradients = tape.gradient(critic_loss, weights)
        self.critic_optimizer.apply(gradients, weights)
        with tf.GradientTape() as tape:
            maker_loss = self.loss_fn(zeros, self.critic(self.maker(noise)))
        weights = self.maker.trainable_weights
        gradients = tape.gradient(maker_loss, weights)
        self.maker_optimizer.apply(gradients, weights)
        losses = (critic_loss, maker_loss)
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
    logs = model.fit(batches.batch(16), epochs=3, verbose=0).history
    return {
        **{f"weight {i}": w for i, w in enumerate(model.get_weights())},
        **{f"log {name}": values for name, values in logs.items()},
        "steps": int(model.maker_optimizer.iterations.numpy()),
    }


class Distances(keras.layers.Layer):
    def call(self, anchor: Any, near: Any, far: Any) -> Any:
        def distance(a: Any, b: Any) -> Any:
            return keras.ops.sum(keras.ops.square(a - b), -1)

        return distance(anchor, near), distance(anchor, far)


class Triplets(keras.Model):
    """Its `call` takes what Keras takes for x, y and weights."""

    def __init__(self, network: keras.Model) -> None:
        super().__init__()
        self.network = network
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def call(self, inputs: Any) -> Any:
        return self.network(inputs)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            near, far = self.network(data)
            loss = tf.reduce_mean(tf.maximum(near - far + 0.5, 0.0))
        weights = self.network.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@case
def triplets_in_a_tuple(scope: Scope) -> Numbers:
    x, _ = data()
    keras.utils.set_random_seed(1)
    with scope():
        inputs = [keras.Input((5,)) for _ in range(3)]
        embed = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh")])
        outputs = Distances()(*[embed(each) for each in inputs])
        model = Triplets(keras.Model(inputs, outputs))
        model.compile(keras.optimizers.Adam(0.02), weighted_metrics=["mae"])
    arrays = (x, np.roll(x, 1, 0) * 0.5, np.roll(x, 2, 1))
    batches = tf.data.Dataset.from_tensor_slices(arrays).batch(16)
    logs = model.fit(batches, epochs=2, verbose=0).history
    return {
        **{f"weight {i}": w for i, w in enumerate(model.get_weights())},
        "log": logs["loss"],
    }


@case
def stateful_rows(scope: Scope) -> Numbers:
    """Row i of a batch goes on where row i of the one before has ended."""
    x = np.random.default_rng(0).normal(size=(36, 4, 3)).astype("float32")
    keras.utils.set_random_seed(1)
    with scope():
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        inputs = keras.Input((4, 3), batch_size=12 // replicas)
        states = keras.layers.GRU(3, stateful=True)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(states))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    fit = {"batch_size": 12, "shuffle": False, "verbose": 0}
    losses = model.fit(x, x[:, 0, :1], epochs=2, **fit).history["loss"]
    losses += model.fit(x, x[:, 1, :1], **fit).history["loss"]
    trained = {f"weight {i}": v for i, v in enumerate(model.trainable_variables)}
    return {
        **{name: keras.ops.convert_to_numpy(v) for name, v in trained.items()},
        "losses": losses,
        "predicted": model.predict(x, batch_size=12, verbose=0),
    }


@case
def inputs_of_the_whole_batch(scope: Scope) -> Numbers:
    """`keras.Input` with the global batch's size, of which nothing in the model knows.

    It was refused, although Keras never compares it with the rows that there are.
    """
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    keras.utils.set_random_seed(1)
    with scope():
        inputs = keras.Input((4,), batch_size=16)
        hidden = keras.layers.BatchNormalization(synchronized=True)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    fit = {"batch_size": 16, "shuffle": False, "verbose": 0, "epochs": 2}
    losses = model.fit(x, x[:, :1], validation_split=0.2, **fit).history
    trained = {f"weight {i}": v for i, v in enumerate(model.trainable_variables)}
    return {
        **{name: keras.ops.convert_to_numpy(v) for name, v in trained.items()},
        **losses,
    }


class HalfLabelled(keras.Model):
    """Learns from rows with labels and from rows without, which are twice as many."""

    def __init__(self) -> None:
        super().__init__()
        self.network = keras.Sequential([keras.layers.Dense(3)])
        self.probe = keras.optimizers.SGD(0.1)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

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
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@case
def zipped_batches_of_two_sizes(scope: Scope) -> Numbers:
    x, y = data(36)
    keras.utils.set_random_seed(1)
    with scope():
        model = HalfLabelled()
        model.compile(keras.optimizers.SGD(0.1))
    unlabelled = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    labelled = tf.data.Dataset.from_tensor_slices((x[::2], y[::2])).batch(6)
    logs = model.fit(tf.data.Dataset.zip((unlabelled, labelled)), verbose=0).history
    return {
        **{f"weight {i}": w for i, w in enumerate(model.get_weights())},
        "log": logs["loss"],
    }
