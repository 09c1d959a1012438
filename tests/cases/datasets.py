from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from cases import training as jobs
from cases.training import CROSSENTROPY, Numbers, Scope, case, chain, data, mlp, train


def batches(dataset: Callable[..., Any], **fit: Any) -> Callable[[Scope], Numbers]:
    def run(scope: Scope) -> Numbers:
        model = jobs.compiled_in(scope, mlp, **jobs.CLASSES)
        options = {"epochs": 2, "verbose": 0, **fit}
        # The rest is in `kinds_of_evaluate_and_predict`.
        return jobs.numbers_of(model, model.fit(dataset(*data()), **options))

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


jobs.CASES["dataset"] = batches(known)
jobs.CASES["dataset_unknown_cardinality"] = batches(from_generator)
jobs.CASES["dataset_infinite"] = batches(
    lambda x, y: known(x, y).repeat(), steps_per_epoch=5
)
jobs.CASES["dataset_steps_per_epoch"] = batches(
    lambda x, y: known(x, y).repeat(3), steps_per_epoch=4
)
jobs.CASES["pydataset"] = batches(Sequence, shuffle=False)


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
    def build() -> keras.Model:
        words, extra = keras.Input((None,), dtype="int64"), keras.Input((2,))
        mean = layers.GlobalAveragePooling1D()(layers.Embedding(9, 4)(words))
        outputs = layers.Dense(3)(layers.Concatenate()([mean, extra]))
        return keras.Model({"words": words, "extra": extra}, outputs)

    model = jobs.compiled_in(
        scope, build, **CROSSENTROPY, weighted_metrics=["accuracy"]
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
    logs = {f"{i}": list(h.history.values()) for i, h in enumerate(histories)}
    return {
        **jobs.numbers_of(model, **logs),
        "evaluated": evaluated,
        "evaluated steps": model.evaluate(Sentences(None), steps=3, verbose=0),
        "predicted": model.predict(Sentences(5), verbose=0),
        "predicted one": model.predict(Sentences(1), verbose=0),
    }


jobs.CASES["dataset_with_weights"] = batches(
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

    model = jobs.compiled_in(scope, mlp, **jobs.CLASSES)
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
    model = jobs.compiled_in(scope, mlp, **jobs.CLASSES, steps_per_execution=3)
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


LENGTH = 5


class Lookups(layers.Layer):
    """Tables that are looked up by the batch's tokens, by constants, and by both."""

    def __init__(self) -> None:
        super().__init__()
        self.words = layers.Embedding(30, 4)
        self.positions = layers.Embedding(LENGTH, 4)
        self.distances = layers.Embedding(LENGTH, 4)
        self.kinds = layers.Embedding(2 * LENGTH, 4)

    def call(self, x: Any) -> Any:
        rows, length = ops.shape(x)
        place = ops.arange(LENGTH)
        distance = ops.abs(place[:, None] - place[None, :])
        few = ops.convert_to_tensor([1, 7, 7, 2])
        tiled = ops.tile(ops.arange(length)[None], [rows, 1])
        return (
            self.words(x)
            + ops.mean(self.words(few), 0)
            # As long as the sequence, which isn't known when this is traced.
            + self.positions(ops.arange(length))
            + ops.mean(self.distances(distance), (0, 1))
            # Once for each row, beside once for all.
            + self.kinds(tiled)
            + ops.mean(self.kinds(ops.arange(LENGTH)), 0)
        )


def lookups() -> keras.Model:
    inputs = keras.Input((None,), dtype="int64")
    hidden = ops.tanh(Lookups()(inputs))
    return keras.Model(inputs, layers.Dense(3)(ops.mean(hidden, 1)))


def sentences(rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 30, (rows, LENGTH)), rng.integers(0, 3, rows)


def unequal(scope: Scope, rows: int, of: int | None) -> Numbers:
    """Train with batches of 7 sequences, of another length each.

    Args:
        scope: As of each case.
        rows: How many there are in all.
        of: How many rows TensorFlow knows each batch to have, if it does.
    """
    x, y = sentences(rows)

    def batches() -> Iterator[Any]:
        for number, start in enumerate(range(0, rows, 7)):
            yield x[start : start + 7, : LENGTH - number], y[start : start + 7]

    spec = (tf.TensorSpec((of, None), tf.int64), tf.TensorSpec((of,), tf.int64))

    def clipping() -> Any:
        return keras.optimizers.Adam(0.05, clipnorm=0.02)

    model = jobs.compiled_in(scope, lookups, clipping, **CROSSENTROPY)
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    return jobs.numbers_of(model, model.fit(data, verbose=0))


@case
def slices_adam_clipnorm(scope: Scope) -> Numbers:
    """Batches of sequences of unequal lengths."""
    return unequal(scope, 17, None)


@case
def slices_of_known_rows(scope: Scope) -> Numbers:
    """As many rows in each batch, and unequal lengths."""
    return unequal(scope, 14, 7)


def slices_case(name: str, optimizer: Callable[[], Any]) -> None:
    def run(scope: Scope) -> Numbers:
        return train(
            scope,
            lookups,
            arrays=sentences(17),
            compiled=lambda: {"optimizer": optimizer()},
            fit={"batch_size": 7},
            then=[],
        )

    jobs.CASES[f"slices_{name}"] = run


slices_case("rmsprop", lambda: keras.optimizers.RMSprop(0.05, global_clipnorm=0.05))
slices_case("adagrad", lambda: keras.optimizers.Adagrad(0.1))
slices_case("momentum", lambda: keras.optimizers.SGD(0.1, momentum=0.9))
slices_case(
    "accumulation", lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2)
)
slices_case(
    "loss_scale",
    lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.05), initial_scale=64.0
    ),
)


@case
def slices_of_sparse_input(scope: Scope) -> Numbers:
    """A kernel's slices are summed over the batch already."""
    rng = np.random.default_rng(0)
    x = (rng.uniform(size=(21, 12)) > 0.7).astype("float32")
    x[3] = 0
    y = rng.integers(0, 3, 21)
    model = jobs.compiled_in(
        scope,
        lambda: chain((12,), layers.Dense(3), sparse=True),
        lambda: keras.optimizers.Adam(0.05, clipnorm=0.1),
        **CROSSENTROPY,
    )
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y)).batch(8)
    return jobs.numbers_of(model, model.fit(data, epochs=2, verbose=0))


@case
def slices_in_a_loop(scope: Scope) -> Numbers:
    """A loop of one's own: the sum over the replicas."""
    x, y = sentences(12)
    keras.utils.set_random_seed(1)
    with scope():
        strategy = tf.distribute.get_strategy()
        model = lookups()
        optimizer = keras.optimizers.Adam(0.05)
        optimizer.build(model.trainable_variables)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        parts = strategy.experimental_distribute_dataset(data)

    def step(batch: Any) -> None:
        x, y = batch

        def loss_of() -> Any:
            logits = model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, True)
            return tf.reduce_sum(losses) / 4

        jobs.descend(model, loss_of, optimizer)

    @tf.function
    def run(batch: Any) -> None:
        strategy.run(step, args=(batch,))

    for batch in parts:
        run(batch)
    return jobs.numbers_of(model)
