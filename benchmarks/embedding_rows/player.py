"""One task of a job with a large table: `player.py COLUMN CONTROL`. See `run.py`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import make_strategy, serve

COLUMN, CONTROL = sys.argv[1:3]
ROWS, ELEMENTS = int(os.environ["TABLE_ROWS"]), 64
# In step: each step of a worker is beside one of the other's.
strategy = make_strategy("plain" if COLUMN == "plain" else "s=0")

import contextlib

import keras
import numpy as np
import tensorflow as tf


class OtherTable(keras.layers.Layer):
    """The same as an Embedding, but by its class: it's sent whole."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(
            name="table", shape=(ROWS, ELEMENTS), initializer="zeros"
        )

    def call(self, x: Any) -> Any:
        return keras.ops.take(self.table, x, axis=0)


class Meter(keras.callbacks.Callback):
    """Notes the seconds and bytes of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[float]] = []

    def now(self) -> list[float]:
        time_now = time.perf_counter()
        if strategy is None:
            return [time_now, 0, 0]
        return [time_now, strategy.bytes_sent, strategy.bytes_received]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.before = self.now()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = self.now()
        step = [b - a for a, b in zip(self.before, now, strict=True)]
        self.steps.append(step)
        self.before = now


def build() -> Any:
    table = (
        OtherTable()
        if COLUMN == "whole"
        else keras.layers.Embedding(ROWS, ELEMENTS, embeddings_initializer="zeros")
    )
    model = keras.Sequential(
        [keras.Input((), dtype="int32"), table, keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


with strategy.scope() if strategy is not None else contextlib.nullcontext():
    MODEL = build()
SIZE = 1 if strategy is None else strategy.size


def answer(order: dict[str, Any]) -> Any:
    touched, steps = order["touched"], order["steps"]
    # Each step looks up other rows.
    rng = np.random.default_rng(order["seed"])
    count = touched * steps * SIZE
    x = rng.integers(0, ROWS, size=count).astype("int32")
    y = np.ones(count, "float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(touched)
    meter = Meter()
    MODEL.fit(data, verbose=0, callbacks=[meter])
    return meter.steps


serve(CONTROL, 0 if strategy is None else strategy.rank, answer)
