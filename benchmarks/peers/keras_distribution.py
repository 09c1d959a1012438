"""What `keras.distribution` does when Keras runs on TensorFlow, call by call."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf


def attempt(title: str, function: Callable[[], object]) -> None:
    try:
        print(f"{title}: {function()}", flush=True)
    except Exception as error:  # whatever it is: it is the finding
        where = traceback.extract_tb(error.__traceback__)[-1]
        file = where.filename.rpartition("site-packages/")[2]
        print(f"{title}: {type(error).__name__}: {error} ({file}:{where.lineno})")


class Seen(keras.layers.Dense):
    """Notes the rows that it is given, and on which device."""

    def call(self, inputs):
        if tf.executing_eagerly():
            device = inputs.device.rpartition("device:")[2]
            seen.append((int(inputs.shape[0]), device))
        return super().call(inputs)


seen: list[tuple[int, str]] = []


def data_parallel() -> str:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    distribution = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    keras.distribution.set_distribution(distribution)
    try:
        model = keras.Sequential([keras.Input((1,)), Seen(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        x = np.ones((8, 1), "float32")
        seen.clear()
        model.fit(x, x, batch_size=4, verbose=0)
        return f"batches of 4, each call got (rows, device) {seen}"
    finally:
        keras.distribution.set_distribution(None)


def main() -> None:
    print(f"backend: {keras.backend.backend()}")
    attempt("DataParallel, 2 devices, fit", data_parallel)
    attempt("list_devices()", keras.distribution.list_devices)
    attempt(
        "initialize('127.0.0.1:5000,127.0.0.1:5001', 2, 0)",
        lambda: keras.distribution.initialize("127.0.0.1:5000,127.0.0.1:5001", 2, 0),
    )


if __name__ == "__main__":
    main()
