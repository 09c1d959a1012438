"""One process that trains on data that take their time: see `run.py`.

python player.py MODE CONTROL
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import digits_model, serve

MODE, CONTROL = sys.argv[1:3]

import keras
import numpy as np
import tensorflow as tf

import kerasdist

BATCH, STEPS, SIDE = 64, 50, 100
strategy = None
if MODE != "plain":
    strategy = kerasdist.RingStrategy(shard="off" if MODE == "off" else "rows")
rank, size = (0, 1) if strategy is None else (strategy.rank, strategy.size)
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[rank % len(cores)]})
PART = size if MODE == "off" else 1

random = np.random.default_rng(0)
images = [
    tf.io.encode_png(random.integers(0, 64, (SIDE, SIDE, 3), dtype=np.uint8)).numpy()
    for _ in range(BATCH)
]
PNGS = np.array(images * STEPS)
X = random.random((len(PNGS), 64), dtype=np.float32)
Y = random.integers(0, 10, len(PNGS))


def decode(png: Any, label: Any) -> tuple[Any, Any]:
    image = tf.io.decode_png(png, channels=3)
    small = tf.image.resize(tf.ensure_shape(image, (SIDE, SIDE, 3)), (8, 8))
    return tf.reshape(tf.reduce_mean(small, axis=-1) / 64, (64,)), label


def decode_batch(pngs: Any, labels: Any) -> tuple[Any, Any]:
    spec = tf.TensorSpec((64,), tf.float32)
    each = tf.map_fn(lambda png: decode(png, 0)[0], pngs, fn_output_signature=spec)
    return each, labels


class Items(keras.utils.PyDataset):
    """Batches that are 20 ms away, as in a store behind a network."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        time.sleep(0.02 / PART)
        rows = slice(index * BATCH // PART, (index + 1) * BATCH // PART)
        return X[rows], Y[rows]


def data(kind: str) -> Any:
    if kind == "PyDataset":
        return Items()
    rows = tf.data.Dataset.from_tensor_slices((PNGS, Y))
    if MODE == "off":
        rows = rows.shard(size, rank)
    if kind == "map, batch":
        made = rows.map(decode).batch(BATCH // PART)
    else:
        made = rows.batch(BATCH // PART).map(decode_batch)
    return made.prefetch(tf.data.AUTOTUNE)


def model() -> Any:
    keras.utils.set_random_seed(1)
    return digits_model(keras, keras.optimizers.SGD(0.01), jit_compile=False)


if strategy is None:
    MODEL = model()
else:
    with strategy.scope():
        MODEL = model()
SETS: dict[str, Any] = {}


def answer(order: dict[str, Any]) -> Any:
    """Train for one epoch; return the seconds of a step, without the first ones."""
    begun: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            begun.append(time.perf_counter())

    if order["kind"] == "arrays":
        data_of_epoch: Any = {
            "x": X[: len(X) // PART],
            "y": Y[: len(Y) // PART],
            "batch_size": BATCH // PART,
        }
    else:
        data_of_epoch = {"x": SETS.setdefault(order["kind"], data(order["kind"]))}
    MODEL.fit(**data_of_epoch, verbose=0, callbacks=[Clock()])
    return (begun[-1] - begun[4]) / (len(begun) - 5)


serve(CONTROL, rank, answer)
