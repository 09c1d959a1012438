"""Kinds of data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cases.training import CASES, CROSSENTROPY, Numbers, Scope, case, data, mlp, results


def batches(
    dataset: Callable[[Any, Any], Any], **fit: Any
) -> Callable[[Scope], Numbers]:
    def run(scope: Scope) -> Numbers:
        x, y = data()
        keras.utils.set_random_seed(1)
        with scope():
            model = mlp()
            model.compile(
                keras.optimizers.SGD(0.1), **CROSSENTROPY, metrics=["accuracy"]
            )
        options = {"epochs": 2, "verbose": 0, **fit}
        history = model.fit(dataset(x, y), **options)
        numbers = {f"log {n}": v for n, v in history.history.items()}
        # See `kinds_of_evaluate_and_predict`.
        return {**numbers, **results(model, x, y, then=[])}

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
            keras.optimizers.SGD(0.1), **CROSSENTROPY, weighted_metrics=["accuracy"]
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
        model.compile(keras.optimizers.SGD(0.1), **CROSSENTROPY, metrics=["accuracy"])
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
