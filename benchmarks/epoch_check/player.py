"""A worker of the benchmark: trains epochs of 100 steps; argv: width, rows, epochs."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import keras
import numpy as np

import kerasdist
from kerasdist.strategies.sync import extended

width, rows, epochs = map(int, sys.argv[1:])
STEPS = 100
checks: list[float] = []
check_state = extended.check_state


def timed(*args: Any, **options: Any) -> None:
    begin = time.perf_counter()
    check_state(*args, **options)
    if options.get("epoch") is not None:
        checks.append(time.perf_counter() - begin)


extended.check_state = timed


class Epochs(keras.callbacks.Callback):
    """Notes when each epoch begins and ends, with its check."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self.began)


strategy = kerasdist.RingStrategy()
x = np.random.default_rng(0).normal(size=(rows * STEPS, 100)).astype("float32")
keras.utils.set_random_seed(1)
with strategy.scope():
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((100,)), *hidden, keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
noted = Epochs()
labels = np.arange(len(x)) % 10
# The first epoch traces the step.
model.fit(x, labels, batch_size=rows, epochs=epochs + 1, verbose=0, callbacks=[noted])
found = {"epochs": noted.seconds[1:], "checks": checks[1:], "bytes": 0}
found["bytes"] = sum(
    int(np.prod(v.shape)) * 4 for v in (*model.variables, *model.optimizer.variables)
)
print("RESULT", json.dumps(found), flush=True)
