"""One of two workers: `player.py CONTROL`. See `run.py`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import kerasdist
from common import serve

strategy = kerasdist.RingStrategy()
rank = strategy.rank
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from kerasdist._keras.data.arrays import ArrayData
from kerasdist.strategies.sync import data

ROWS, WIDTH, BATCH = 40_000, 784, 256
chance = np.random.default_rng(0)
X = chance.random((ROWS, WIDTH), dtype=np.float32)
Y = chance.integers(0, 10, ROWS)
ORDER = np.random.default_rng(1 + rank).permutation(ROWS)
X_OTHER, Y_OTHER = X[ORDER], Y[ORDER]
with strategy.scope():
    layers = [keras.layers.Dense(512, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)


def generate(x: Any, y: Any) -> Any:
    for start in range(0, len(x), BATCH):
        yield x[start : start + BATCH], y[start : start + BATCH]


def dataset(x: Any, y: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def fit(order: dict[str, Any]) -> Any:
    """Examples per second of one epoch."""
    rows = order["rows"]
    x, y = (X_OTHER, Y_OTHER) if order["other"] else (X, Y)
    if rows < ROWS:
        keep = (ORDER if order["other"] else np.arange(ROWS)) < rows
        x, y = x[keep], y[keep]
    kind = order["kind"]
    strategy.communicator.barrier()
    begin = time.perf_counter()
    if kind == "arrays":
        model.fit(x, y, batch_size=BATCH, verbose=0)
    elif kind == "dataset":
        model.fit(dataset(x, y), verbose=0)
    else:
        model.fit(generate(x, y), verbose=0)
    return rows / (time.perf_counter() - begin)


def compare(order: dict[str, Any]) -> Any:
    """Seconds that the comparison of arrays takes which are the same."""
    rows = order["megabytes"] * 1_000_000 // (4 * WIDTH)
    x = np.resize(X, (rows, WIDTH)) if rows > ROWS else X[:rows]
    arrays = ArrayData(ArrayDataAdapter(x, batch_size=BATCH))
    strategy.communicator.barrier()
    begin = time.perf_counter()
    strategy.extended.data.agree(arrays)
    return time.perf_counter() - begin


def batches(order: dict[str, Any]) -> Any:
    """Microseconds of one comparison of a batch, and of a `train_on_batch`."""
    calls = order["calls"]
    batch = X[:BATCH], Y[:BATCH]
    model.train_on_batch(*batch)

    def per_call(call: Any) -> float:
        strategy.communicator.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls * 1e6

    whole = per_call(lambda: model.train_on_batch(*batch))
    compares = data.verify_or_adopt_batch
    data.verify_or_adopt_batch = lambda communicator, choice, batch: batch
    try:
        without = per_call(lambda: model.train_on_batch(*batch))
    finally:
        data.verify_or_adopt_batch = compares
    given = strategy.communicator, data.DataChoice("auto", lambda *said: None), batch
    return [without, whole, per_call(lambda: compares(*given))]


def answer(order: dict[str, Any]) -> Any:
    return {"fit": fit, "compare": compare, "batches": batches}[order["do"]](order)


serve(sys.argv[1], rank, answer)
