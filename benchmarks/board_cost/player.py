"""One worker of the benchmark: blocks of steps with the callback and without it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

RANK = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)
ROUNDS, STAGES, WIDTH, BATCH = map(int, sys.argv[1:5])
# Seconds of a step in the first run: the other ones take the same ways.
GIVEN = [float(each) for each in sys.argv[5:]]
CORES = sorted(os.sched_getaffinity(0))
if STAGES == 1:
    os.sched_setaffinity(0, {CORES[RANK % len(CORES)]})

import keras
import numpy as np
import tensorflow as tf

import kerasdist
from kerasdist.callbacks import ScalingTensorBoard
from kerasdist.strategies.measure.step_clock import rows_for

# Ways to take a block of steps, and how long a block is.
WITHOUT, COUNTED, ROW, MEASURED = "without", "counted", "row", "measured"
SECONDS, LEAST = 0.15, 20
# The first steps of a block aren't looked at: the caches are another one's.
SETTLE = 3
# Behind a row its other graph isn't in the caches any more.
BEHIND = 8
# Whoever takes so many times as long as the median was held up by something else.
OUTLIER = 2
FIRST = 50  # steps, to know how long they are
# Seconds that blocks of one way take, or as many rounds as this.
TOTAL, LEAST_ROUNDS = 15.0, 4

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

    without     no clock runs, and the callback isn't called
    counted     most steps with the callback: nothing is measured
    row         the same, but for a row that is measured
    measured    all are measured, as the longest steps are with the callback

    `samples` are mean seconds of a step; of `row` by how much a row takes longer.
    """

    def __init__(self, board, seconds):
        super().__init__()
        self.board, self.clock = board, strategy.extended.kerasdist.timer
        self.row, self.period = rows_for(seconds)
        self.around = self.row + BEHIND if self.row else 0
        self.ways = (WITHOUT, COUNTED, ROW) if self.row else (WITHOUT, MEASURED)
        self.block = max(round(SECONDS / seconds), LEAST + self.around)
        self.samples = {way: [] for way in self.ways}
        self.chance = np.random.default_rng(5)
        # Of long steps there are fewer, or it takes too long.
        rounds = max(round(min(ROUNDS, TOTAL / (self.block * seconds))), LEAST_ROUNDS)
        self.order = [
            way for _ in range(rounds) for way in self.chance.permutation(self.ways)
        ]
        # What windows have taken: the steps aren't compared at their ends.
        self.windows, self.window_seconds = 0, 0.0

    def set_model(self, model):
        super().set_model(model)
        self.board.set_model(model)

    def on_train_begin(self, logs=None):
        self.board.on_train_begin()
        self.began = time.perf_counter()
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
        """Which of the block's steps are measured."""
        sampling = self.clock._sampling
        sampling.set(self.row, 0 if self.way == MEASURED else 1 << 40)
        if self.way == ROW:
            sampling._ahead = self.block - self.around - 1 - self.steps

    def on_epoch_begin(self, epoch, logs=None):
        self.way = self.order[epoch]
        self.steps, self.spent = 0, []
        self.clock.running = self.way != WITHOUT
        self.sample()
        self.clock.begin_epoch()

    def on_train_batch_begin(self, batch, logs=None):
        now = time.perf_counter()
        if self.steps:
            self.spent.append(now - self.begin)
        self.begin = now
        if self.steps == self.block - 1:
            # The last one is left out: with it comes what ends an epoch.
            self.samples[self.way].append(self.look(np.array(self.spent)))
        self.steps += 1
        if self.way != WITHOUT:
            self.board.on_train_batch_begin(batch)

    def look(self, spent):
        spent = spent[SETTLE:]
        usual = np.median(spent)
        spent = np.where(spent < OUTLIER * usual, spent, usual)
        if self.way == ROW:
            return float((spent[-self.around :] - usual).sum())
        return float(spent.mean())

    def on_train_end(self, logs=None):
        self.passed = time.perf_counter() - self.began
        self.clock.running = True
        self.board.on_train_end()


with tempfile.TemporaryDirectory() as folder:
    board = ScalingTensorBoard(folder, verbose=0)
    # Both graphs are traced here: the usual one, and the one that measures.
    model.fit(**data(FIRST))
    model.fit(**data(FIRST), callbacks=[board])
    # How long a step is without it: the same number on all workers.
    first = data(FIRST)
    begin = time.perf_counter()
    model.fit(**first)
    mine = np.float64((time.perf_counter() - begin) / FIRST)
    slowest = strategy.extended.kerasdist.timer.communicator.all_reduce([mine], "max")
    seconds = GIVEN[0] if GIVEN else float(slowest[0])
    turns = Turns(board, seconds)
    model.fit(**data(turns.block), epochs=len(turns.order), callbacks=[turns])
found = {
    "rank": RANK,
    "step_seconds": seconds,
    "samples": turns.samples,
    "row_seconds": turns.period * seconds,  # from one row to the next
    "windows": turns.windows,
    "window_seconds": turns.window_seconds,
    "seconds": turns.passed * (1 - 1 / len(turns.ways)),  # with the callback
}
print("RESULT", json.dumps(found), flush=True)
