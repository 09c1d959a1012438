"""One process of this benchmark: it trains, or serves the one that does.

    python player.py CONTROL MICRO_BATCHES

With 0 micro-batches it trains without a strategy; else rank 0 trains, with a stage in
each of two processes. Each process has one core.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[task["index"] % len(cores)]})

import keras
import numpy as np
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)
# One computes; the other takes and sends what comes and goes meanwhile.
tf.config.threading.set_inter_op_parallelism_threads(2)

import kerasdist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import serve

BATCH, WIDTH, CLASSES = 4096, 1024, 10
LAYERS = 4  # of each stage


def build() -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((WIDTH,))])
    for stage in range(2):
        for i in range(LAYERS):
            model.add(keras.layers.Dense(WIDTH, "relu", name=f"stage{stage}_{i}"))
    model.add(keras.layers.Dense(CLASSES, name="stage1_out"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def main() -> None:
    control, parts = sys.argv[1], int(sys.argv[2])
    if parts:
        devices = [f"/job:worker/task:{i}/CPU:0" for i in range(2)]
        strategy = kerasdist.ModelParallelStrategy(
            {f"stage{i}_.*": device for i, device in enumerate(devices)},
            micro_batches=parts,
        )
        with strategy.scope():
            model = build()
    else:
        model = build()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, WIDTH)).astype("float32")
    y = rng.integers(0, CLASSES, BATCH)
    data = iter(tf.data.Dataset.from_tensors((x, y)).cache().repeat())
    model.make_train_function()

    def answer(order: dict[str, Any]) -> dict[str, Any]:
        seconds = []
        for _ in range(order["steps"]):
            begin = time.perf_counter()
            logs = model.train_function(data)
            loss = float(np.asarray(tf.nest.flatten(logs)[0]))
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds, "loss": loss}

    serve(control, 0, answer)
    if parts:
        strategy.close()


if __name__ == "__main__":
    main()
