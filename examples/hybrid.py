"""Data parallelism over the workers, with each worker's model on two devices.

    kerasdist run -n 2 examples/hybrid.py
    python examples/hybrid.py                  # the same numbers, one worker

Each worker has two devices: its first two GPUs, or two halves of the CPU. The encoder
is on one of them and the classifier on the other, with their gradients and the
optimizer's state. Each worker takes its rows of every batch and divides them into
micro-batches, so that both devices work at the same time. The workers average their
gradients.
"""

import argparse
import hashlib

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kerasdist


def two_devices() -> list[str]:
    if len(tf.config.list_physical_devices("GPU")) > 1:
        return ["GPU:0", "GPU:1"]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    return ["CPU:0", "CPU:1"]


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu", name="encoder_1"),
            keras.layers.Dense(128, activation="relu", name="encoder_2"),
            keras.layers.Dropout(0.1, name="encoder_3"),
            keras.layers.Dense(64, activation="relu", name="classifier_1"),
            keras.layers.Dense(10, name="classifier_2"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--micro-batches", type=int, default=4)
    options = parser.parse_args()

    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    x_train, x_test, y_train, y_test = train_test_split(
        x, y, test_size=0.25, random_state=0, stratify=y
    )

    keras.utils.set_random_seed(0)
    first, second = two_devices()
    strategy = kerasdist.RingStrategy(
        placement={"encoder_.*": first, "classifier_.*": second},
        micro_batches=options.micro_batches,
    )
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    verbose = 2 if strategy.is_chief else 0
    model.fit(x_train, y_train, batch_size=64, epochs=options.epochs, verbose=verbose)

    if strategy.is_chief:
        for layer in model.layers:
            where = {variable.value.device for variable in layer.trainable_weights}
            if where:
                print(f"{layer.name} is on {', '.join(sorted(where))}")
    loss, accuracy = model.evaluate(x_test, y_test, batch_size=64, verbose=0)
    if strategy.is_chief:
        print(f"test loss {loss:.4f}, test accuracy {accuracy:.4f}")
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    digest = hashlib.sha256(weights.tobytes()).hexdigest()[:16]
    print(f"rank {strategy.rank} of {strategy.size}: weights {digest}")


if __name__ == "__main__":
    main()
