"""One process that trains on rows of its share: see `run.py`.

python player.py CONTROL RANK
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import serve

CONTROL, RANK = sys.argv[1], int(sys.argv[2])
CASE = json.loads(os.environ["BALANCE_CASE"])
CORES = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORES[CASE["cores"][RANK] % len(CORES)]})
os.nice(CASE["nice"][RANK])

import keras
import numpy as np
import tensorflow as tf

import kerasdist

SIDE, BATCH, STEPS = 16, CASE["batch"], CASE["steps"]
random = np.random.default_rng(0)
x = random.normal(size=(BATCH * STEPS, SIDE, SIDE, 3)).astype("float32")
y = random.integers(0, 10, size=len(x))
strategies = {
    name: kerasdist.RingStrategy(balance=name or None) for name in ("", "measured")
}


class Slow(keras.layers.Layer):
    """Sleeps for each row."""

    def call(self, inputs: Any) -> Any:
        def wait(rows: Any) -> Any:
            time.sleep(len(rows) * CASE["sleeps"][RANK])
            return np.float32(0)

        zero = tf.numpy_function(wait, [inputs], tf.float32)
        zero.set_shape([])
        return inputs + tf.stop_gradient(zero)


def model() -> Any:
    """Return a model that computes, or sleeps."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((SIDE, SIDE, 3))
    if CASE["sleeps"]:
        hidden = Slow()(inputs)
        hidden = keras.layers.GlobalAveragePooling2D()(hidden)
    else:
        hidden = inputs
        for width in (32, 32, 64):
            hidden = keras.layers.Conv2D(width, 3, padding="same", activation="relu")(
                hidden
            )
        hidden = keras.layers.GlobalAveragePooling2D()(hidden)
    return keras.Model(inputs, keras.layers.Dense(10)(hidden))


models = {}
for name, scope in {
    **{name: strategy.scope() for name, strategy in strategies.items()},
    "independent": contextlib.nullcontext(),
}.items():
    with scope:
        models[name] = model()
        models[name].compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )


def answer(order: dict[str, Any]) -> Any:
    """Train for some epochs with a strategy; return their seconds.

    Independent workers send nothing, and each has its share of the rows.
    """
    seconds = []
    rows, batch = len(x), BATCH
    if order["balance"] == "independent":
        speeds = CASE["speeds"]
        rows, batch = (n * speeds[RANK] // sum(speeds) for n in (rows, batch))

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seconds.append(time.perf_counter() - self.began)

    models[order["balance"]].fit(
        x[:rows],
        y[:rows],
        batch_size=batch,
        epochs=order["epochs"],
        verbose=0,
        callbacks=[Clock()],
    )
    return {"seconds": seconds, "rows": rows}


serve(CONTROL, RANK, answer)
