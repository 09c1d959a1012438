"""A model that sleeps where others compute, and trains: see `run.py`.

python job.py       # one worker, for `kerasdist advise`; CASE has the case as JSON
python job.py CONTROL RANK      # takes orders
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kerasdist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import serve

STEPS = 5
FORWARD = 1 / 3
_TABLE = (50_000, 64)
_IDS = 16


class Sleep(keras.layers.Layer):
    """Passes its inputs on, after some seconds for each row; gradients likewise."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient
        def identity(value: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                return _after(upstream, self.seconds * (1 - FORWARD))

            return _after(value, self.seconds * FORWARD), gradient

        return identity(inputs)


def _after(value: Any, seconds: float) -> Any:
    def wait(array: Any) -> Any:
        time.sleep(seconds * len(array))
        return array

    found = tf.numpy_function(wait, [value], value.dtype)
    return tf.ensure_shape(found, value.shape)


def build(case: dict[str, Any], speed: float) -> Any:
    """Return the compiled model of a case."""
    keras.utils.set_random_seed(1)
    width, depth = case["width"], case["depth"]
    each = case["compute"] / case["rows"] / depth / speed
    parts = []
    if case["table"]:
        parts += [keras.layers.Embedding(*_TABLE), keras.layers.Flatten()]
    for _ in range(depth):
        parts += [keras.layers.Dense(width), Sleep(each)]
    shape, dtype = ((_IDS,), "int32") if case["table"] else ((width,), "float32")
    inputs = keras.Input(shape, dtype=dtype)
    model = keras.Sequential([inputs, *parts, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    return model


def data(case: dict[str, Any], rows: int) -> tuple[Any, Any]:
    """Return some rows for a case."""
    random = np.random.default_rng(0)
    if case["table"]:
        return random.integers(0, _TABLE[0], (rows, _IDS)), np.zeros((rows, 1))
    x = random.normal(size=(rows, case["width"])).astype("float32")
    return x, x[:, :1]


class _Times(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.begun = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds = time.perf_counter() - self.begun


def train(case: dict[str, Any], strategy: str, workers: int) -> dict[str, Any]:
    """Train; return the seconds and rows of the last epoch of all workers."""
    chosen = eval(strategy, {"kerasdist": kerasdist})
    rank = int(os.environ.get("RANK", 0))
    speeds = case["speeds"] or [1.0]
    with chosen.scope():
        model = build(case, speeds[rank % len(speeds)])
    rows = case["rows"] * workers * STEPS
    x, y = data(case, rows)
    times = _Times()
    batch = case["rows"] * (1 if "async" in strategy else workers)
    # Shares by speed are found after the second epoch, since the first step is traced.
    epochs = 4 if "balance" in strategy else 2
    model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0, callbacks=[times])
    chosen.close()
    return {"seconds": times.seconds, "rows": rows}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.environ["RANK"] = sys.argv[2]
        if (
            json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("type")
            == "ps"
        ):
            kerasdist.ParameterServerStrategy()
        serve(sys.argv[1], int(sys.argv[2]), lambda order: train(**order))
    else:
        CASE = json.loads(os.environ["CASE"])
        with kerasdist.RingStrategy().scope():
            MODEL = build(CASE, 1.0)
        MODEL.fit(*data(CASE, CASE["rows"] * 40), batch_size=CASE["rows"], verbose=0)
