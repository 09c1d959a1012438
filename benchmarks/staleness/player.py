"""One task that learns digits: `player.py STRATEGY CONTROL`. See `run.py`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import digits_data, digits_model, make_strategy, serve

NAME, CONTROL = sys.argv[1:3]
strategy = make_strategy(NAME)

import keras

BATCH = 64
X, Y, X_TEST, Y_TEST = digits_data()


def answer(order: dict[str, Any]) -> Any:
    """Learn from the beginning; return the test accuracy after each epoch."""
    keras.utils.set_random_seed(order["seed"])
    with strategy.scope():
        model = digits_model(
            keras,
            keras.optimizers.Adam(2e-3),
            metrics=["accuracy"],
            jit_compile=False,
        )
    began = time.perf_counter()
    history = model.fit(
        X,
        Y,
        batch_size=BATCH,
        epochs=order["epochs"],
        validation_data=(X_TEST, Y_TEST),
        verbose=0,
    )
    return {
        "accuracy": [float(value) for value in history.history["val_accuracy"]],
        "seconds": time.perf_counter() - began,
    }


serve(CONTROL, strategy.rank, answer)
