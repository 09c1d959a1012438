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

import kerasdist

OPTIONS = json.loads(os.environ.get("RING_OPTIONS", "{}"))
RATE = OPTIONS.pop("rate", 0.1)
if "outer" in OPTIONS:
    OPTIONS["local_steps"] = kerasdist.LocalSteps(
        OPTIONS["local_steps"], outer=OPTIONS.pop("outer")
    )
if "rank" in OPTIONS:
    OPTIONS["compression"] = kerasdist.PowerSGD(OPTIONS.pop("rank"))
if "ratio" in OPTIONS:
    OPTIONS["compression"] = kerasdist.TopK(OPTIONS.pop("ratio"))
strategy = kerasdist.RingStrategy(**OPTIONS)
x, y, x_test, y_test = digits_data()


def answer(order: dict[str, Any]) -> Any:
    """Train with a seed; return the test losses and the seconds after each epoch."""
    keras.utils.set_random_seed(order["seed"])
    with strategy.scope():
        model = digits_model(
            keras, keras.optimizers.SGD(RATE, momentum=0.9), metrics=["accuracy"]
        )
    # Traces the step; what it learns is forgotten.
    weights = model.get_weights()
    model.fit(x[:128], y[:128], batch_size=64, verbose=0)
    model.set_weights(weights)
    for variable in model.optimizer.variables:
        if "momentum" in variable.path:
            variable.assign(keras.ops.zeros_like(variable))
    losses, seconds, began = [], [], time.perf_counter()
    for _ in range(order["epochs"]):
        model.fit(x, y, batch_size=64, verbose=0)
        seconds.append(time.perf_counter() - began)
    losses = model.evaluate(x_test, y_test, verbose=0)
    return {"loss": losses[0], "accuracy": losses[1], "seconds": seconds[-1]}


serve(CONTROL, RANK, answer)
