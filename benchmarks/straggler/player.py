"""One task of a job with a slow worker: `player.py STRATEGY CONTROL`. See `run.py`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import digits_data, digits_model, is_async, make_strategy, serve

# Rows of a worker's batch.
BATCH = 32
# Seconds that a worker sleeps after a step, and a slow one.
STEP, SLOW = 0.020, 0.100
# With `turns`: how many steps a worker is slow, before it's the next one's turn.
TURN = 5

NAME, CONTROL = sys.argv[1:3]
strategy = make_strategy(NAME)

import keras
import numpy as np


class Worker(keras.callbacks.Callback):
    """Sleeps as long as the step of a larger model would take; measures the epoch."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.turns = turns
        self.steps = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        who = self.steps // TURN % strategy.size if self.turns else strategy.size - 1
        time.sleep(SLOW if who == strategy.rank else STEP)
        self.steps += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds = time.perf_counter() - self.began


with strategy.scope():
    MODEL = digits_model(keras, keras.optimizers.SGD(0.01), jit_compile=False)
X, Y, *_ = digits_data()


def answer(order: dict[str, Any]) -> Any:
    rows = np.arange(order["steps"] * BATCH) % len(Y)
    worker = Worker(order["turns"])
    shared = 1 if is_async(NAME) else strategy.size
    MODEL.fit(
        X[rows],
        Y[rows],
        batch_size=BATCH * shared,
        shuffle=False,
        verbose=0,
        callbacks=[worker],
    )
    return {"seconds": worker.seconds, "steps": worker.steps}


serve(CONTROL, strategy.rank, answer)
