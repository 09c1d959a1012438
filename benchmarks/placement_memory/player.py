"""Estimates one model's memory, or trains it: `player.py estimate|measure NAME`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from zoo import ZOO, loss_of


def train(model: Any, rows: int, optimizer: str, steps: int) -> None:
    """Some steps on one batch again and again."""
    import numpy as np
    import tensorflow as tf

    # A subclassed model doesn't know its inputs.
    inputs = getattr(model, "inputs", None)
    shape = inputs[0].shape[1:] if inputs else (784,)
    x = np.zeros((rows, *shape), inputs[0].dtype if inputs else "float32")
    y = np.zeros(rows, np.int32)
    data = tf.data.Dataset.from_tensors((x, y)).repeat(steps)
    # As under a strategy, where XLA is off.
    model.compile(optimizer, loss_of(), jit_compile=False)
    model.fit(data, verbose=0)


def measure(name: str, steps: int) -> dict[str, int]:
    """Train; return what TensorFlow's allocator has handed out at most at once."""
    import tensorflow as tf

    function, rows, optimizer = ZOO[name]
    # What is there before any model.
    tf.zeros(()).numpy()
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    train(function(), rows, optimizer, steps)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return {"bytes": peak - before}


def estimate(name: str) -> dict[str, Any]:
    """What the plan says of it, on one device."""
    import kerasdist

    function, rows, optimizer = ZOO[name]
    plan = kerasdist.plan(
        function,
        devices=["CPU:0"],
        batch_size=rows,
        optimizer=optimizer,
        memory_limits=[10**15],
    )
    run = plan.run
    return {
        "bytes": plan.cut.memory[0],
        "parameters": sum(x.parameter_bytes for x in plan.layers),
        "kept": sum(x.gradient_bytes + x.slot_bytes for x in plan.layers),
        "activations": sum(x.activation_bytes(run) for x in plan.layers),
        "table": str(plan),
    }


if __name__ == "__main__":
    # An allocator that counts: the usual one of CPUs doesn't.
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
    order, model = sys.argv[1:3]
    if order == "measure":
        found: dict[str, Any] = measure(model, int(sys.argv[3]))
    else:
        found = estimate(model)
    print("RESULT", json.dumps(found), flush=True)
