"""One process that trains when it is told to: `player.py MODE MODEL CONTROL RANK`.

A worker or server of a job of kerasdist, a plain Keras process, or, with MODE
"tensorflow", a task of TensorFlow's ParameterServerStrategy. See `run.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import is_async, make_strategy, serve

# What a `fit` begins with is no step: it is as long for one step as for a thousand.
WARM_UP = 3
# Different batches: an epoch goes through them again and again.
BATCHES = 16
# Features, units of the hidden layers, rows of a worker's batch.
MODELS = {
    "digits": (64, (128, 64), 32),
    "mlp": (784, (1024, 1024, 1024, 1024), 128),
}


def build(keras: Any, model: str, **options: Any) -> Any:
    features, hidden, _ = MODELS[model]
    layers = [keras.layers.Dense(units, activation="relu") for units in hidden]
    made = keras.Sequential([keras.Input((features,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile("sgd", loss, **options)
    return made


def batches(model: str) -> tuple[Any, Any]:
    """Inputs of shape `(BATCHES, batch, features)` and labels `(BATCHES, batch)`."""
    features, _, batch = MODELS[model]
    generator = np.random.default_rng(0)
    x = generator.random((BATCHES, batch, features), dtype=np.float32)
    return x, generator.integers(0, 10, (BATCHES, batch))


def keras_3(mode: str, model: str, rank: int) -> tuple[int, Any]:
    """This worker's rank, and what it does when it is given an order."""
    strategy = make_strategy(mode)
    import keras

    with contextlib.nullcontext() if strategy is None else strategy.scope():
        made = build(keras, model, jit_compile=False)
    size = 1 if strategy is None else strategy.size
    # In step the workers share a batch; else each takes one of its own.
    shared = 1 if is_async(mode) else size
    x, y = (values.reshape(-1, *values.shape[2:]) for values in batches(model))
    rows = len(y) // BATCHES

    class Timer(keras.callbacks.Callback):
        """When this worker's steps ended, but for the first ones."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            self.ended = time.perf_counter()
            if self.steps == WARM_UP:
                self.began = self.ended

    def answer(order: dict[str, Any]) -> Any:
        steps = order["steps"] + WARM_UP * size
        chosen = np.arange(steps * rows) % len(y)
        timer = Timer()
        made.fit(
            x[chosen],
            y[chosen],
            batch_size=rows * shared,
            shuffle=False,
            verbose=0,
            callbacks=[timer],
        )
        measured = timer.steps - WARM_UP
        rate = measured / (timer.ended - timer.began) if measured > 0 else 0.0
        return {"steps_per_second": rate, "steps": timer.steps}

    return (rank if strategy is None else strategy.rank), answer


def tensorflow(model: str, execution: int) -> tuple[int, Any]:
    """As `keras_3`, for a task of TensorFlow's strategy on legacy Keras."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    kind, index = resolver.task_type, resolver.task_id
    if kind != "chief":
        threads = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=1, inter_op_parallelism_threads=2
        )
        server = tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=kind,
            task_index=index,
            protocol="grpc",
            config=threads,
        )
        rank = (
            1
            + index
            + (resolver.cluster_spec().num_tasks("worker") if kind == "ps" else 0)
        )
        return rank, lambda order: server.target
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    import tf_keras

    with strategy.scope():
        made = build(tf_keras, model, steps_per_execution=execution)
    x, y = batches(model)

    def data(context: Any) -> Any:
        # Whole batches, ready made: nothing is left to do for a step.
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat().prefetch(2)

    class Timer(tf_keras.callbacks.Callback):
        """When the last epoch began and ended."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.ended = time.perf_counter()

    def answer(order: dict[str, Any]) -> Any:
        timer, steps = Timer(), -(-order["steps"] // execution) * execution
        # Its callbacks can't see batches: a first epoch for what a `fit` begins with.
        made.fit(
            tf_keras.utils.experimental.DatasetCreator(data),
            epochs=2,
            steps_per_epoch=steps,
            verbose=0,
            callbacks=[timer],
        )
        rate = steps / (timer.ended - timer.began)
        return {"steps_per_second": rate, "steps": 2 * steps}

    return 0, answer


def main() -> None:
    mode, model, control, *more = sys.argv[1:]
    if mode == "tensorflow":
        rank, answer = tensorflow(model, int(more[0]))
    else:
        rank, answer = keras_3(mode, model, int(more[0]))
    serve(control, rank, answer)
    if mode == "tensorflow":
        os._exit(0)  # its servers don't end by themselves


if __name__ == "__main__":
    main()
