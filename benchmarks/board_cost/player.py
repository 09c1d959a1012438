"""One worker of the benchmark: blocks of steps with the callback and without it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

RANK = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)
ROUNDS, STAGES, WIDTH, BATCH = map(int, sys.argv[1:5])
CORES = sorted(os.sched_getaffinity(0))
if STAGES == 1:
    os.sched_setaffinity(0, {CORES[RANK % len(CORES)]})

import keras
import numpy as np
import tensorflow as tf

import kerasdist
from kerasdist.callbacks import ScalingTensorBoard
from kerasdist.strategies.sampling import period

WAYS = ("without", "with", "every step measured")
# The first steps of a block aren't counted: the caches are another one's.
SETTLE = 3
# Whoever takes so many times as long as the median was held up by something else.
OUTLIER = 2
FIRST = 50  # steps, to know how long they are

if STAGES == 1:
    strategy = kerasdist.RingStrategy()
else:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * STAGES,
    )
    places = {f"on{stage}.*": f"CPU:{stage}" for stage in range(STAGES)}
    strategy = kerasdist.ModelParallelStrategy(places, micro_batches=2 * STAGES)
rng = np.random.default_rng(0)


def data(steps):
    x = rng.normal(size=(BATCH * steps, 784)).astype("float32")
    y = rng.integers(0, 10, size=len(x))
    return {"x": x, "y": y, "batch_size": BATCH, "verbose": 0}


keras.utils.set_random_seed(1)
with strategy.scope():
    layers = [
        keras.layers.Dense(WIDTH, activation="relu", name=f"on{i * STAGES // 4}_{i}")
        for i in range(3)
    ]
    head = keras.layers.Dense(10, name=f"on{STAGES - 1}_head")
    model = keras.Sequential([keras.Input((784,)), *layers, head])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)


class Turns(keras.callbacks.Callback):
    """Takes blocks of steps in turns, each an epoch, in one order on all workers.

    In a block without the callback the clock stands still: then the graph without it is
    called. With it, one row of steps is measured in a block, which is as long as the
    time from one row to the next.
    `samples` are the mean steps of blocks, by way.
    """

    def __init__(self, board, seconds):
        super().__init__()
        self.board, self.clock = board, strategy.extended.timer
        self.seconds = seconds  # of a step
        self.block = max(period(seconds), 20)
        self.samples = {way: [] for way in WAYS}
        self.chance = np.random.default_rng(5)
        self.order = [
            way for _ in range(ROUNDS) for way in self.chance.permutation(WAYS)
        ]
        self.steps = 0
        # What windows have taken: the steps aren't compared at their ends.
        self.windows, self.window_seconds, self.measured_for = 0, 0.0, 0.0

    def set_model(self, model):
        super().set_model(model)
        self.board.set_model(model)

    def on_train_begin(self, logs=None):
        self.board.on_train_begin()
        end = self.board._end_window

        def timed():
            begin = time.perf_counter()
            end()
            self.sample()
            spent = time.perf_counter() - begin
            self.windows += 1
            self.window_seconds += spent
            self.begin += spent

        self.board._end_window = timed

    def sample(self):
        """Let one row be measured in what is left of the block, if it's long enough."""
        ahead = self.block - self.steps
        sampling = self.clock._sampling
        if not period(self.seconds):
            sampling.set(0)
            return
        sampling.set(1 << 40)
        if not self.had_row and ahead > 20:
            sampling._ahead = int(self.chance.integers(SETTLE, ahead - 10))
            self.had_row = True

    def on_epoch_begin(self, epoch, logs=None):
        self.way = self.order[epoch]
        self.steps, self.spent = 0, []
        self.had_row = False
        self.clock.running = self.way != "without"
        if self.way == "with":
            self.sample()
        else:
            self.clock._sampling.set(0)
        self.clock.begin_epoch()

    def on_train_batch_begin(self, batch, logs=None):
        now = time.perf_counter()
        if self.steps > SETTLE:
            self.spent.append(now - self.begin)
        self.begin = now
        if self.steps == self.block - 1:
            # The last one is left out: with it comes what ends an epoch.
            spent = np.array(self.spent)
            usual = spent[spent < OUTLIER * np.median(spent)]
            self.samples[self.way].append(usual.mean())
            if self.way == "with":
                self.measured_for += spent.sum()
        self.steps += 1
        if self.way == "with":
            self.board.on_train_batch_begin(batch)

    def on_train_end(self, logs=None):
        self.clock.running = True
        self.board.on_train_end()


with tempfile.TemporaryDirectory() as folder:
    board = ScalingTensorBoard(folder, verbose=0)
    # All graphs are traced here: the plain one, and those that measure and count.
    model.fit(**data(FIRST))
    model.fit(**data(FIRST), callbacks=[board])
    # How long a step is without it: the same on all workers.
    first = data(FIRST)
    begin = time.perf_counter()
    model.fit(**first)
    mine = np.float64((time.perf_counter() - begin) / FIRST)
    slowest = strategy.extended.timer.communicator.all_reduce([mine], "max")
    seconds = float(slowest[0])
    turns = Turns(board, seconds)
    model.fit(**data(turns.block), epochs=len(turns.order), callbacks=[turns])
found = {
    "rank": RANK,
    "samples": turns.samples,
    "block": turns.block,
    "windows": turns.windows,
    "window_seconds": turns.window_seconds,
    "measured_for": turns.measured_for,
}
print("RESULT", json.dumps(found), flush=True)
