"""A process of the benchmark; argv: plain, ring or mirrored."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

kind = sys.argv[1]
ROWS, SHORT, LONG, EPOCHS = 32, 10, 500, 20
scope: Any = contextlib.nullcontext()
if kind != "plain":
    (cpu,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    if kind == "ring":
        import kerasdist

        scope = kerasdist.RingStrategy(devices=["CPU:0", "CPU:1"]).scope()
    else:
        scope = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()

x = np.random.default_rng(0).normal(size=(ROWS * LONG, 64)).astype("float32")
labels = np.arange(len(x)) % 10
with scope:
    model = keras.Sequential(
        [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


class Epochs(keras.callbacks.Callback):
    """Notes when each epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def epochs(steps: int, count: int) -> list[float]:
    """Return the seconds from each epoch's end to the next one's."""
    rows = steps * ROWS
    noted = Epochs()
    model.fit(
        *(x[:rows], labels[:rows]),
        batch_size=ROWS,
        epochs=count + 1,
        verbose=0,
        callbacks=[noted],
    )
    return [float(seconds) for seconds in np.diff(noted.ends)]


short = epochs(SHORT, EPOCHS)
long = epochs(LONG, 3)
print("RESULT", json.dumps({"epochs": short, "step": float(np.median(long)) / LONG}))
