"""`ModelParallelStrategy`: what it is given, and what it refuses."""

from __future__ import annotations

import textwrap

from workers import Workers

PRELUDE = """
import json
import numpy as np
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 3,
)
import keras
import kerasdist

def device(variable):
    return variable.value.device.rpartition("/device:")[2]

def message(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None

x = np.ones((4, 8), "float32")
y = np.ones((4, 2), "float32")

def two_layers():
    return keras.Sequential(
        [keras.layers.Dense(3, name="first"), keras.layers.Dense(2, name="second")]
    )
"""


def test_it_says_what_is_wrong_before_it_trains():
    script = """
    strategy = kerasdist.ModelParallelStrategy
    found = {
        "no mapping": message(strategy, ["CPU:0"]),
        "no names": message(strategy, {"a": 1}),
        "no device": message(strategy, {"a": "GPU:7", "b": "what?", "c": "CPU:1"}),
        "no pattern": message(strategy, {"(": "CPU:0"}),
        "not among": message(strategy, {"a": "CPU:1"}, devices=["CPU:0"]),
        "stage": message(strategy({"a": "CPU:0"}).stage, "CPU:2"),
    }
    for name, options in {
        "fit": {},
        "predict": {},
        "jit": {"jit_compile": True},
    }.items():
        placed = strategy({"first": "CPU:1", "third/.*": "CPU:2"})
        if name == "jit":
            placed = strategy({"first": "CPU:1"})
        with placed.scope():
            model = two_layers()
            found[name] = message(model.compile, "sgd", "mse", **options)
        data = (x,) if name == "predict" else (x, y)
        found[name] = found[name] or message(getattr(model, name), *data, verbose=0)
    print("RESULT", json.dumps(found))
    """
    with Workers(PRELUDE + textwrap.dedent(script), 1) as job:
        found = job.succeed()[0].result

    begin = {
        "no mapping": "TypeError: `placement` must be a mapping from patterns",
        "no names": "TypeError: `placement` must map text to text",
        "no device": "ValueError: `placement` can't be used: 'GPU:7' doesn't exist; "
        "'what?' isn't a device name. Received",
        "no pattern": "ValueError: The patterns of a placement must be regular",
        "not among": "ValueError: `placement` names devices that aren't among",
        "stage": "ValueError: A stage must be on one of the strategy's devices.",
        "fit": "ValueError: Patterns of the placement match no layer. "
        "Received: 'third/.*'; the layers are",
        "predict": "ValueError: Patterns of the placement match no layer.",
        "jit": "ValueError: XLA compiles a step for one device",
    }
    assert {name: found[name][: len(text)] for name, text in begin.items()} == begin
