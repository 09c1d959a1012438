"""One process that trains on data that take their time: see `run.py`.

python player.py MODE CONTROL
"""

from __future__ import annotations

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

BATCH, SECONDS, WORKERS = 64, 0.02, 4
strategy = None
if MODE == "ring":
    strategy = kerasdist.RingStrategy()
elif MODE == "off":
    strategy = kerasdist.RingStrategy(shard="off")
RANK = 0 if strategy is None else strategy.rank
random = np.random.default_rng(0)
x = random.random((BATCH * 50, 64), dtype=np.float32)
y = random.integers(0, 10, len(x))


def model() -> Any:
    keras.utils.set_random_seed(1)
    return digits_model(keras, keras.optimizers.SGD(0.01), jit_compile=False)


def slow(values: Any, labels: Any) -> tuple[Any, Any]:
    """Take each row's part of 20 ms a batch, and no core, as storage does."""

    def wait(values: Any) -> Any:
        time.sleep(SECONDS * (len(values) if values.ndim > 1 else 1) / BATCH)
        return values

    waited = tf.numpy_function(wait, [values], tf.float32)
    return tf.ensure_shape(waited, values.shape), labels


def data(kind: str) -> Any:
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    if MODE == "off":
        rows = rows.shard(WORKERS, RANK)
    batch = BATCH // WORKERS if MODE == "off" else BATCH
    if kind == "map, batch":
        made = rows.map(slow).batch(batch)
    else:
        made = rows.batch(batch).map(slow)
    return made.prefetch(tf.data.AUTOTUNE)


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

    dataset = SETS.setdefault(order["kind"], data(order["kind"]))
    MODEL.fit(dataset, verbose=0, callbacks=[Clock()])
    return (begun[-1] - begun[4]) / (len(begun) - 5)


serve(CONTROL, RANK, answer)
