"""One of two workers: `job.py STEPS`. Prints seconds of all-reduces and of steps.

Only what each version has: the strategy, its communicator, `fit`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import keras
import numpy as np

import kerasdist

SIZES = {"1 KB": 256, "1 MB": 1 << 18, "100 MB": 25_000_000}  # float32
MODELS = {
    "MLP": ((784,), [(keras.layers.Dense, 1024)] * 4, "sgd", 128),
    "small": ((64,), [(keras.layers.Dense, 32)] * 2, "adam", 32),
}


class Steps(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


class Calls(Steps):
    """Counts the calls of functions, compiled ones too, in steps of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 20:
            sys.setprofile(self.see)
        elif batch == 40:
            sys.setprofile(None)

    def see(self, frame: Any, event: str, arg: Any) -> None:
        self.count += event in ("call", "c_call")


def all_reduce(communicator: Any, count: int) -> float:
    """The median of some calls, in seconds."""
    buffer = np.ones(count, np.float32)
    taken = []
    for _ in range(200 if count < 1 << 16 else 12):
        begin = time.perf_counter()
        communicator.all_reduce([buffer])
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken[2:]))


def step(strategy: Any, name: str, steps: int, seen: Steps) -> None:
    """Take the steps of a `fit`."""
    shape, layers, optimizer, rows = MODELS[name]
    with strategy.scope():
        made = [layer(units, activation="relu") for layer, units in layers]
        model = keras.Sequential([keras.Input(shape), *made, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
    rows *= strategy.size
    steps *= 1 if name == "MLP" else 10
    x = np.zeros((rows * steps, *shape), np.float32)
    y = np.zeros(len(x), np.int32)
    model.fit(x, y, batch_size=rows, verbose=0, callbacks=[seen])


def main() -> None:
    strategy = kerasdist.RingStrategy()
    found = {
        f"all-reduce, {name}": all_reduce(strategy.communicator, count)
        for name, count in SIZES.items()
    }
    for name in MODELS:
        seen = Steps()
        step(strategy, name, int(sys.argv[1]), seen)
        taken = np.diff(seen.ends)[len(seen.ends) // 4 :]
        found[f"step, {name}"] = float(np.median(taken))
    calls = Calls()
    step(strategy, "small", 5, calls)
    found["Python calls of that step"] = calls.count / 20
    if strategy.communicator.rank == 0:
        print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
