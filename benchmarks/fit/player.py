"""One process that trains when it is told to: see `run.py`.

python player.py MODE MODEL CONTROL RANK SIZE
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import serve

MODE, MODEL, CONTROL = sys.argv[1:4]
TASK = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
RANK, SIZE = TASK.get("index", int(sys.argv[4])), int(sys.argv[5])
CORES = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORES[RANK % len(CORES)]})

import numpy as np
import tensorflow as tf

if MODE == "multi_worker_mirrored":  # TensorFlow's, which Keras 3 can't use
    # Before anything else of TensorFlow is used.
    strategy: Any = tf.distribute.MultiWorkerMirroredStrategy()
    import tf_keras as keras
else:
    import keras

    strategy = None
    if MODE == "ring":
        import kerasdist
        from kerasdist.collectives import fused_buffer
        from kerasdist.collectives.fused_buffer import in_buckets

        if os.environ.get("FIT_NUMPY"):
            fused_buffer.compiled_combine = None
        options = json.loads(os.environ.get("RING_OPTIONS", "{}"))
        strategy = kerasdist.RingStrategy(**options)
    elif MODE == "placed":
        import kerasdist

        strategy = kerasdist.ModelParallelStrategy({".*": "CPU:0"})
    elif MODE == "one_device":
        strategy = tf.distribute.OneDeviceStrategy("CPU:0")

Dense = keras.layers.Dense
TABLE_ROWS = 1_000_000
LOSS = keras.losses.SparseCategoricalCrossentropy


def mlp() -> tuple[list[Any], tuple[int, ...], int]:
    """784 -> 4 x 1024 -> 10: 4 million parameters."""
    hidden = [Dense(1024, activation="relu") for _ in range(4)]
    return [*hidden, Dense(10)], (784,), 128


def deep() -> tuple[list[Any], tuple[int, ...], int]:
    """40 layers of 384: 6 million parameters in many small gradients."""
    hidden = [Dense(384, activation="relu") for _ in range(40)]
    return [*hidden, Dense(10)], (384,), 64


def convnet() -> tuple[list[Any], tuple[int, ...], int]:
    """Five convolutions of 256 filters on 8 x 8: much computing for 2.4 million."""
    layers = [
        keras.layers.Conv2D(256, 3, padding="same", activation="relu") for _ in range(5)
    ]
    return [*layers, keras.layers.GlobalAveragePooling2D(), Dense(10)], (8, 8, 3), 16


def cnn() -> tuple[list[Any], tuple[int, ...], int]:
    """Three small convolutions on 28 x 28 images."""
    layers = []
    for filters in (16, 32, 64):
        layers += [
            keras.layers.Conv2D(filters, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
        ]
    return [*layers, keras.layers.Flatten(), Dense(10)], (28, 28, 1), 64


def lstm() -> tuple[list[Any], tuple[int, ...], int]:
    """128 units over 32 steps of 64 features."""
    return [keras.layers.LSTM(128), Dense(10)], (32, 64), 64


def embedding() -> tuple[list[Any], tuple[int, ...], int]:
    """50,000 x 64, of which 20 rows per sample: sparse gradients."""
    return (
        [
            keras.layers.Embedding(50_000, 64),
            keras.layers.GlobalAveragePooling1D(),
            Dense(128, activation="relu"),
            Dense(10),
        ],
        (20,),
        256,
    )


def digits() -> tuple[list[Any], tuple[int, ...], int]:
    """The model of `examples/digits.py`: a step of a millisecond or less."""
    layers = [Dense(128, activation="relu"), Dense(64, activation="relu"), Dense(10)]
    return layers, (64,), 32


class TwoTables(keras.layers.Layer):
    """The means of ten rows of each of two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Embedding(TABLE_ROWS, 16)
        self.second = keras.layers.Embedding(TABLE_ROWS, 16)

    def call(self, ids: Any) -> Any:
        # TensorFlow's: legacy Keras has no `keras.ops`.
        means = [
            tf.reduce_mean(self.first(ids[:, :10]), axis=1),
            tf.reduce_mean(self.second(ids[:, 10:]), axis=1),
        ]
        return tf.concat(means, axis=1)


def tables() -> tuple[list[Any], tuple[int, ...], int]:
    """Two tables of 1,000,000 x 16, of each of which 10 rows per sample."""
    return [TwoTables(), Dense(64, activation="relu"), Dense(10)], (20,), 256


MODELS = {
    **{f.__name__: f for f in (mlp, deep, convnet, cnn, lstm, embedding, digits)},
    "tables_adam": tables,
    "tables_adagrad": tables,
}
# All others have SGD.
OPTIMIZERS = {"digits": "adam", "tables_adam": "adam", "tables_adagrad": "adagrad"}


def build() -> tuple[Any, Any, int]:
    make = MODELS[MODEL]
    dtype = "int32" if make in (embedding, tables) else "float32"
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        layers, shape, batch = make()
        model = keras.Sequential([keras.Input(shape, dtype=dtype), *layers])
        model.compile(
            OPTIMIZERS.get(MODEL, "sgd"),
            LOSS(from_logits=True),
            metrics=["accuracy"] if make is digits else [],
            jit_compile="FIT_JIT" in os.environ,
        )
    generator = np.random.default_rng(0)
    if MODEL == "embedding":
        x = generator.integers(0, 50_000, (batch * 16, *shape), dtype=np.int32)
    elif make is tables:  # few ids are frequent, as words and customers are
        ids = generator.zipf(1.2, (batch * 16, *shape)) - 1
        x = (ids % TABLE_ROWS).astype(np.int32)
    else:
        x = generator.random((batch * 16, *shape), dtype=np.float32)
    y = generator.integers(0, 10, len(x))
    return model, (x, y), batch


MODEL_, DATA, BATCH = build()


# What a `fit` begins with is no step: it is as long for one step as for a thousand.
WARM_UP = 3


class Timer(keras.callbacks.Callback):
    """Seconds, processor seconds and page faults of all steps after the first ones.

    Looks only at where steps begin: where they end it could stop the training, and
    workers agree on that, by a collective for each step.
    """

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == WARM_UP:
            self.usage = resource.getrusage(resource.RUSAGE_SELF)
            self.began = time.perf_counter()
        elif batch == self.params["steps"] - 1:
            self.stop()

    def stop(self) -> None:
        seconds = time.perf_counter() - self.began
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.result = {
            "seconds": seconds,
            "cpu": usage.ru_utime
            + usage.ru_stime
            - self.usage.ru_utime
            - self.usage.ru_stime,
            "faults": usage.ru_minflt - self.usage.ru_minflt,
        }


def answer(order: dict[str, Any]) -> Any:
    """Train for some steps; return what each took, or what one of them did."""
    if order.get("trace"):
        return trace()
    if "bucket_size" in order:
        use_buckets(order["bucket_size"])
    steps, timer = order["steps"], Timer()
    steps += WARM_UP + 1  # the last one's beginning is the end of what is timed
    workers = SIZE if strategy is not None else 1
    rows = np.arange(steps * BATCH * workers) % len(DATA[0])
    MODEL_.fit(
        *(values[rows] for values in DATA),
        batch_size=BATCH * workers,
        epochs=1,
        shuffle=False,
        verbose=0,
        callbacks=[timer],
    )
    per_step = {name: value / order["steps"] for name, value in timer.result.items()}
    found = {**per_step, "examples": BATCH / per_step["seconds"]}
    if MODE == "ring":
        size = found["bucket_size"] = strategy.extended.workers.bucket_size
        sizes = [4 * math.prod(each.shape) for each in MODEL_.trainable_variables]
        found["buckets"] = in_buckets(sizes, size)
        found["bytes"] = strategy.extended.workers.memories.figures().get("bytes_after")
    return found


FUNCTIONS: dict[int, Any] = {}


def use_buckets(size: int) -> None:
    """Take the next steps with buckets of another size, traced once for each."""
    strategy.extended.workers.bucket_size = size
    MODEL_.train_function = FUNCTIONS.get(size)
    FUNCTIONS[size] = MODEL_.make_train_function() or MODEL_.train_function


def trace() -> list[tuple[str, float, float]]:
    """What one step did, by TensorFlow's profiler: what, from and to, in ms."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    rows = np.arange(3 * BATCH * SIZE) % len(DATA[0])
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        MODEL_.fit(
            *(values[rows] for values in DATA), batch_size=BATCH * SIZE, verbose=0
        )
        tf.profiler.experimental.stop()
        (path,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
    found = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                begin = (line.timestamp_ns + event.offset_ps / 1e3) / 1e6
                end = begin + event.duration_ps / 1e9
                if "kerasdist_collective" in name:
                    found.append(("all-reduce", begin, end))
                elif "gradient_tape" in name and "MatMul" in name:
                    found.append(("backward pass", begin, end))
                elif "FusedMatMul" in name:
                    found.append(("forward pass", begin, end))
    found.sort(key=lambda event: event[1])
    # The last step begins with the last of the forward pass's five layers' first.
    forward = [i for i, event in enumerate(found) if event[0] == "forward pass"]
    return found[forward[-5] :] if len(forward) >= 5 else found


serve(CONTROL, RANK, answer)
