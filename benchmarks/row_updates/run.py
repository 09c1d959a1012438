"""Milliseconds of an optimizer's update of some rows of a table, by Keras and here.

    make bench-row-updates

A graph updates a table by slices of random rows, once with Keras's own operations and
once with those of kerasdist, in turns, on one core with one thread. "Equal" compares
the bits of both tables at the end.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from common import Report, arguments, median, table

# Optimizer, rows, width of a row, slices.
CASES = [
    *(("SGD", 50_000, 64, n) for n in (1_000, 5_120, 10_240, 40_000)),
    ("SGD", 1_000_000, 16, 5_120),
    ("Adagrad", 1_000_000, 16, 5_120),
]
HEAD = ["optimizer", "table", "slices", "Keras", "kerasdist", "first call", "equal"]


def measure(case: tuple[str, int, int, int], calls: int) -> dict[str, Any]:
    import keras
    import numpy as np
    import tensorflow as tf

    import kerasdist
    from kerasdist._keras.context import setting

    name, rows, width, count = case
    rng = np.random.default_rng(0)
    strategy = kerasdist.RingStrategy(["CPU:0"])

    def made(*, ours: bool) -> tuple[Any, Any]:
        variable = keras.Variable(np.ones((rows, width), "float32"))
        optimizer = getattr(keras.optimizers, name)(0.1)
        optimizer.build([variable])

        @tf.function
        def step(indices: Any, values: Any) -> Any:
            # What kerasdist replaces is Keras's own but in its reduced steps.
            with setting(reduced=ours):
                shape = tf.constant([rows, width])
                slices = tf.IndexedSlices(values, indices, shape)
                optimizer.update_step(slices, variable.value, tf.constant(0.1))
            return tf.constant(0)

        return step, variable

    samples: dict[str, list[float]] = {"Keras": [], "kerasdist": []}
    # Outside of the scope: plain variables, as an update of one replica gets them.
    ways = {way: made(ours=way == "kerasdist") for way in samples}
    with strategy.scope():
        for _ in range(calls + 1):
            indices = tf.constant(rng.integers(0, rows, count))
            values = tf.constant(rng.normal(size=(count, width)).astype("float32"))
            for way, (step, _) in ways.items():
                begin = time.process_time()
                step(indices, values)
                samples[way].append(time.process_time() - begin)
    equal = np.array_equal(*(variable.numpy() for _, variable in ways.values()))
    strategy.close()
    return {"samples": samples, "equal": bool(equal)}


def main() -> None:
    parser = arguments(__doc__, HERE)
    parser.add_argument("--calls", type=int, default=30)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    report = Report(
        "Milliseconds of processor time of an update of rows",
        options.output,
        repeats=f"medians of {options.calls} calls",
    )
    rows = []
    for case in CASES[-1:] if options.quick else CASES:
        found = measure(case, 2 if options.quick else options.calls)
        report.data[" ".join(map(str, case))] = found
        name, length, width, count = case
        times = [median(each[1:]) * 1e3 for each in found["samples"].values()]
        first = found["samples"]["kerasdist"][0] * 1e3
        cells = [f"{taken:.2f}" for taken in times]
        size = f"{length:,} x {width}"
        equal = "yes" if found["equal"] else "NO"
        rows.append([name, size, f"{count:,}", *cells, f"{first:.0f}", equal])
    report.add(table(HEAD, rows))
    report.write()


if __name__ == "__main__":
    main()
