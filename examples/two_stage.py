"""A model that is too large for one device, on two devices.

    python examples/two_stage.py

Its weights alone have 44 MB, and a device may hold 40 MB. `kerasdist.plan` reports that
with the figures before anything is allocated, and finds the cut that fits two devices.
`ModelParallelStrategy` trains the model there. Without two GPUs the devices are two
logical devices of the CPU. TensorFlow doesn't limit their memory: only the plan does.

The first half is large and isn't trained: it computes random features of scikit-learn's
handwritten digits, like a pretrained network. The second half learns from them.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import kerasdist

LIMIT = "40MB"
BATCH_SIZE = 64


def two_devices() -> list[str]:
    """Two GPUs, or two logical devices of the CPU."""
    if len(tf.config.list_physical_devices("GPU")) > 1:
        return ["GPU:0", "GPU:1"]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    return ["CPU:0", "CPU:1"]


def build_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(8192, activation="relu", name="features"),
            keras.layers.Dense(1024, name="compressed"),
            keras.layers.LayerNormalization(name="norm"),
            keras.layers.Dense(1024, activation="relu", name="hidden"),
            keras.layers.Dense(1024, activation="relu", name="last"),
            keras.layers.Dense(10, name="logits"),
        ],
        name="digits",
    )
    for layer in model.layers[:2]:
        layer.trainable = False
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    devices = two_devices()
    keras.utils.set_random_seed(1)

    try:
        kerasdist.plan(
            build_model, devices[:1], batch_size=BATCH_SIZE, memory_limits=LIMIT
        )
    except kerasdist.errors.PlanError as error:
        print(f"On one device:\n{error}\n")

    plan = kerasdist.plan(
        build_model, devices, batch_size=BATCH_SIZE, memory_limits=LIMIT
    )
    print(f"On two:\n{plan}\n")

    strategy = kerasdist.ModelParallelStrategy(plan.placement, devices=devices)
    with strategy.scope():
        model = build_model()
    weights = sum(w.value.dtype.size * int(np.prod(w.shape)) for w in model.weights)
    print(f"weights: {weights} bytes")

    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    model.fit(x[:1400], y[:1400], batch_size=BATCH_SIZE, epochs=epochs, verbose=2)
    loss, accuracy = model.evaluate(x[1400:], y[1400:], verbose=0)
    print(strategy.placement_report())
    print(f"test loss {loss:.4f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
