"""A worker of `run.py`: it trains, and one of them ends in the midst of an epoch.

    player.py PARAMETERS STEPS STEP VICTIM OUTPUT

Each worker writes the times of its steps' ends to OUTPUT and its index, and those of
the stages of the change. Times are the system's, as different processes are compared.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import kerasdist

PARAMETERS, STEPS, STEP, VICTIM = (int(each) for each in sys.argv[1:5])
RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
OUTPUT = Path(f"{sys.argv[5]}-{RANK}.json")
BATCH, INPUTS, CLASSES = 64, 256, 10


class Times(keras.callbacks.Callback):
    """Notes when each step begins and ends; kills the victim's process in one."""

    def __init__(self) -> None:
        super().__init__()
        self.begins: list[float] = []
        self.ends: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Note the time; end if it's time to."""
        self.begins.append(time.time())
        if RANK == VICTIM and batch == STEP:
            OUTPUT.write_text(json.dumps({"killed": time.time()}))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Note the time."""
        self.ends.append(time.time())


def main() -> None:
    """Train, and write the times."""
    keras.utils.set_random_seed(0)
    # Two layers of about half of the parameters each.
    width = round((-INPUTS + (INPUTS**2 + 4 * PARAMETERS) ** 0.5) / 2)
    strategy = kerasdist.RingStrategy(elastic=True)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((INPUTS,)),
                keras.layers.Dense(width, activation="relu"),
                keras.layers.Dense(width, activation="relu"),
                keras.layers.Dense(CLASSES),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH * STEPS, INPUTS)).astype(np.float32)
    y = random.integers(CLASSES, size=BATCH * STEPS)
    times = Times()
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[times])
    changes = strategy.communicator.changes
    found = {
        "parameters": model.count_params(),
        "begins": times.begins,
        "ends": times.ends,
        "changes": [
            [change.began, change.agreed, change.connected] for change in changes
        ],
    }
    OUTPUT.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
