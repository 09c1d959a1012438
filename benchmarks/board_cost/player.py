"""One worker of the benchmark: epochs with and without the callback, in turns."""

from __future__ import annotations

import json
import sys
import tempfile
import time

import keras
import numpy as np

import kerasdist
from kerasdist.callbacks import ScalingTensorBoard

ROUNDS, STEPS, WIDTH, BATCH = map(int, sys.argv[1:5])

strategy = kerasdist.RingStrategy()
rng = np.random.default_rng(0)
x = rng.normal(size=(BATCH * STEPS, 784)).astype("float32")
y = rng.integers(0, 10, size=len(x))


class Steps(keras.callbacks.Callback):
    """When each step begins."""

    def on_train_begin(self, logs=None):
        self.times = []

    def on_train_batch_begin(self, batch, logs=None):
        self.times.append(time.perf_counter())


def build():
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    return model


with tempfile.TemporaryDirectory() as folder:
    boards = {"without": [], "with": [ScalingTensorBoard(folder, verbose=0)]}
    models = {name: build() for name in boards}
    samples = {name: [] for name in boards}
    for number in range(ROUNDS + 1):
        for name in sorted(boards, reverse=number % 2 == 1):
            # First of all: what the board does as a batch begins is in the step before.
            steps = Steps()
            models[name].fit(
                x, y, batch_size=BATCH, verbose=0, callbacks=[steps, *boards[name]]
            )
            if number:  # the first one traces
                # Of these the last isn't known, nor what begins the epoch.
                spent = steps.times[-1] - steps.times[5]
                samples[name].append(spent / (len(steps.times) - 6))
print("RESULT", json.dumps({"rank": strategy.rank, "samples": samples}), flush=True)
