"""A few steps of an MLP of 4 million parameters: `train.py plain|ring BATCHES`.

Prints when the first step had ended, and how much memory is resident at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path


def resident() -> dict[str, int]:
    """Resident bytes of this process; what workers share is shared out among them."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    status = Path("/proc/self/status").read_text()

    def kilobytes(name: str, text: str) -> int:
        (found,) = re.findall(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
        return int(found) * 1024

    rss = kilobytes("Rss", rollup)
    segments = kilobytes("RssShmem", status)
    share = kilobytes("Pss_Shmem", rollup)
    return {"rss": rss, "segments": segments, "resident": rss - segments + share}


def main() -> None:
    kind, batches = sys.argv[1], int(sys.argv[2])
    import keras
    import numpy as np

    strategy = None
    if kind == "ring":
        import kerasdist

        strategy = kerasdist.RingStrategy()
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((784,)),
                *(keras.layers.Dense(1024, activation="relu") for _ in range(4)),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
    first: list[float] = []

    class First(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if not first:
                first.append(time.time())

    size = 128 * (1 if strategy is None else strategy.size)
    # The same data in each process.
    x = np.zeros((batches * 256, 784), np.float32)
    y = np.zeros(batches * 256, np.int32)
    model.fit(x, y, batch_size=size, verbose=0, callbacks=[First()])
    if strategy is not None:
        strategy.communicator.barrier()
    memory = resident()
    if strategy is not None:
        strategy.communicator.barrier()  # all still hold what they share
    result = {
        "first_step": first[0] - float(os.environ["BENCH_STARTED"]),
        "gradient_bytes": 4 * int(model.count_params()),
        **memory,
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
