"""A worker of `pause_of_horovod.py`: elastic Keras as Horovod's pages have it.

    horovod_player.py PARAMETERS STEPS STEP FOLDER

Rank 1 kills itself in the STEP-th step. Rank 0 writes the times of its steps' begins
and ends to FOLDER/times.json. It's run by Horovod's environment, without kerasdist.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow.keras as hvd
import numpy as np
from tensorflow import keras

PARAMETERS, STEPS, STEP = (int(each) for each in sys.argv[1:4])
FOLDER = Path(sys.argv[4])
BATCH, INPUTS, CLASSES = 64, 256, 10

hvd.init()
width = round((-INPUTS + (INPUTS**2 + 4 * PARAMETERS) ** 0.5) / 2)
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((INPUTS,)),
        keras.layers.Dense(width, activation="relu"),
        keras.layers.Dense(width, activation="relu"),
        keras.layers.Dense(CLASSES),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), loss)
random = np.random.default_rng(0)
x = random.normal(size=(BATCH * STEPS, INPUTS)).astype(np.float32)
y = random.integers(CLASSES, size=BATCH * STEPS)
begins: list[float] = []
ends: list[float] = []


class Times(keras.callbacks.Callback):
    """Notes when each step begins and ends; kills the process of rank 1 in one."""

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Note the time; end if it's time to."""
        begins.append(time.time())
        killed = FOLDER / "killed"
        if hvd.rank() == 1 and len(begins) > STEP and not killed.exists():
            killed.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Note the time."""
        ends.append(time.time())


state = hvd.elastic.KerasState(model, batch=0, epoch=0)


@hvd.elastic.run
def train(state: Any) -> None:
    """Train the rest of the epoch, with the present workers."""
    state.model.fit(
        x,
        y,
        batch_size=BATCH // hvd.size(),
        steps_per_epoch=STEPS - state.batch,
        shuffle=False,
        verbose=0,
        callbacks=[
            Times(),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ],
    )


train(state)
if hvd.rank() == 0:
    found = {"begins": begins, "ends": ends, "size": hvd.size()}
    (FOLDER / "times.json").write_text(json.dumps(found))
