"""One process that learns digits when it is told to: see `run.py`.

python player.py CONTROL RANK
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import digits_data, digits_model, serve

CONTROL, RANK = sys.argv[1], int(sys.argv[2])
CORES = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORES[RANK % len(CORES)]})

import keras
import numpy as np

import kerasdist

OPTIONS = json.loads(os.environ.get("RING_OPTIONS", "{}"))
MODEL = os.environ["MODEL"]
RATE = {"digits": 0.1, "resnet8": 0.05, "lstm": 0.1}[MODEL] * OPTIONS.pop("rate", 1.0)
if "outer" in OPTIONS:
    OPTIONS["local_steps"] = kerasdist.LocalSteps(
        OPTIONS["local_steps"], outer=OPTIONS.pop("outer")
    )
if "rank" in OPTIONS:
    OPTIONS["compression"] = kerasdist.PowerSGD(OPTIONS.pop("rank"))
if "ratio" in OPTIONS:
    OPTIONS["compression"] = kerasdist.TopK(OPTIONS.pop("ratio"))
strategy = kerasdist.RingStrategy(**OPTIONS)
layers = keras.layers


def generated(*shape: int) -> tuple[Any, Any, Any, Any]:
    """1,024 rows to train on and 512 to test, of ten classes, as `digits_data`.

    A row is noise and the pattern of its class.
    """
    random = np.random.default_rng(0)
    patterns = random.normal(size=(10, *shape))
    y = random.integers(0, 10, 1536)
    x = (0.3 * patterns[y] + random.normal(size=(1536, *shape))).astype("float32")
    return x[:1024], y[:1024], x[1024:], y[1024:]


def normalized(x: Any) -> Any:
    """128 steps are few for Keras's momentum of 0.99."""
    normalize = layers.BatchNormalization(momentum=0.9, synchronized=True)
    return layers.ReLU()(normalize(x))


def resnet8() -> Any:
    """He et al., 2016, with one block of each size: 16, 32 and 64 filters."""
    given = keras.Input((16, 16, 3))
    x = layers.Conv2D(16, 3, padding="same")(given)
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        before = layers.Conv2D(filters, 1, strides)(x)
        x = layers.Conv2D(filters, 3, strides, padding="same")(normalized(x))
        x = before + layers.Conv2D(filters, 3, padding="same")(normalized(x))
    means = layers.GlobalAveragePooling2D()(normalized(x))
    return keras.Model(given, layers.Dense(10)(means))


def lstm() -> Any:
    """256 units over 20 steps of 16 features."""
    return keras.Sequential([keras.Input((20, 16)), layers.LSTM(256), layers.Dense(10)])


def build(optimizer: Any) -> Any:
    if MODEL == "digits":
        return digits_model(keras, optimizer, metrics=["accuracy"])
    model = {"resnet8": resnet8, "lstm": lstm}[MODEL]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


DATA = {"resnet8": (16, 16, 3), "lstm": (20, 16)}
x, y, x_test, y_test = digits_data() if MODEL == "digits" else generated(*DATA[MODEL])


def answer(order: dict[str, Any]) -> Any:
    """Train with a seed; return test losses, accuracies, seconds after each epoch.

    The seconds are those of training.
    """
    keras.utils.set_random_seed(order["seed"])
    with strategy.scope():
        model = build(keras.optimizers.SGD(RATE, momentum=0.9))
    # Traces the step; what it learns is forgotten.
    weights = model.get_weights()
    model.fit(x[:128], y[:128], batch_size=64, verbose=0)
    model.set_weights(weights)
    for variable in model.optimizer.variables:
        if "momentum" in variable.path:
            variable.assign(keras.ops.zeros_like(variable))
    found: dict[str, list[float]] = {"loss": [], "accuracy": [], "seconds": []}
    seconds = 0.0
    for _ in range(order["epochs"]):
        began = time.perf_counter()
        model.fit(x, y, batch_size=64, verbose=0)
        seconds += time.perf_counter() - began
        loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
        for name, value in zip(found, (loss, accuracy, seconds), strict=True):
            found[name].append(value)
    return found


serve(CONTROL, RANK, answer)
