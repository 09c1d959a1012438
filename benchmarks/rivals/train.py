"""One small job: plain, on two processes by `keras.distribution`, or by kerasdist.

    python train.py CASE plain | data_parallel | kerasdist

Runs with the backend of KERAS_BACKEND. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
are torch's variables; kerasdist has TF_CONFIG. ITEM_ROWS: the rows of a batch.
Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import keras
import numpy as np

# Rows, and whether they are given as NumPy arrays.
CASES: dict[str, tuple[int, bool]] = {
    "equal batches": (32, False),
    "three batches": (24, False),
    "short last batch": (30, False),
    "predict": (32, False),
    "NumPy arrays": (32, True),
}
# `DataParallel` on torch deals out whole items: a step of two processes has two.
BATCH = int(os.environ.get("ITEM_ROWS", "8"))


class Batches(keras.utils.PyDataset):
    """The rows in order."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self.x, self.y = x, y

    def __len__(self) -> int:
        return -(-len(self.x) // BATCH)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], self.y[rows]


def begin(mode: str) -> contextlib.AbstractContextManager[Any]:
    if mode == "data_parallel":
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        keras.distribution.initialize(address, 2, int(os.environ["RANK"]))
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
        )
    elif mode == "kerasdist":
        import kerasdist

        return kerasdist.RingStrategy().scope()
    return contextlib.nullcontext()


def main(case: str, mode: str) -> dict[str, Any]:
    rows, arrays = CASES[case]
    x = np.arange(rows, dtype="float32")[:, None] / rows
    y = 3 * x * x
    with begin(mode):
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    if case == "predict":
        found = np.asarray(model.predict(Batches(x, y), verbose=0))
        return {"rows": len(found), "sum": round(float(found.sum()), 4)}
    data = (x, y) if arrays else (Batches(x, y),)
    options = {"batch_size": BATCH} if arrays else {}
    history = model.fit(*data, epochs=2, shuffle=False, verbose=0, **options).history
    kernel = float(np.asarray(keras.ops.convert_to_numpy(model.layers[0].kernel))[0, 0])
    return {"loss": round(history["loss"][-1], 6), "kernel": round(kernel, 6)}


if __name__ == "__main__":
    print("RESULT", json.dumps(main(sys.argv[1], sys.argv[2])), flush=True)
