"""What it costs to change from one graph of a step to another and back.

    python benchmarks/board_cost/rows.py

One worker on one core. Of each 40 steps five run another graph than the others: a mere
copy, or the one with clocks, whose communicator is listened to as well. It prints the
median microseconds of a step by its place among the 40.
"""

from __future__ import annotations

import os
import tempfile
import time

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import keras
import numpy as np

import kerasdist
from kerasdist.callbacks import ScalingTensorBoard

PERIOD, ROW, BATCH, STEPS = 40, 5, 64, 400

strategy = kerasdist.RingStrategy()
clock = strategy.extended.kerasdist.timer
rng = np.random.default_rng(0)
x = rng.normal(size=(BATCH * STEPS, 784)).astype("float32")
y = rng.integers(0, 10, size=len(x))
with strategy.scope():
    layers = [keras.layers.Dense(100, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)


class Rows(keras.callbacks.Callback):
    """Changes the function that takes steps, and notes when each begins."""

    def __init__(self, usual, other, clocked):
        super().__init__()
        self.usual, self.other, self.clocked = usual, other, clocked
        self.times = []

    def on_train_batch_begin(self, batch, logs=None):
        place = len(self.times) % PERIOD
        if place == 0:
            self.model.train_function = self.other
            clock.running = self.clocked
        elif place == ROW:
            self.model.train_function = self.usual
            clock.running = False
        self.times.append(time.perf_counter())


def trace(callbacks=()):
    """The function that takes steps, traced with these callbacks."""
    model.train_function = None
    rows = BATCH * 20
    model.fit(x[:rows], y[:rows], batch_size=BATCH, verbose=0, callbacks=[*callbacks])
    return model.train_function


with tempfile.TemporaryDirectory() as folder:
    usual, copy = trace(), trace()
    clocked = trace([ScalingTensorBoard(folder, verbose=0)])
for name, other in (("a copy", copy), ("with clocks", clocked)):
    rows = Rows(usual, other, other is clocked)
    if other is clocked:
        clock.start()
    model.fit(x, y, batch_size=BATCH, epochs=20, verbose=0, callbacks=[rows])
    clock.running = True
    clock.stop()
    spent = np.diff(rows.times[: len(rows.times) // PERIOD * PERIOD])
    spent = np.append(spent, np.nan).reshape(-1, PERIOD)[10:] * 1e6
    by_place = np.nanmedian(spent, axis=0)
    row = " ".join(f"{value:.0f}" for value in by_place[:ROW])
    after = " ".join(f"{value:.0f}" for value in by_place[ROW : ROW + 6])
    print(f"{name}: {row} | {after} | later {np.median(by_place[15:35]):.0f}")
