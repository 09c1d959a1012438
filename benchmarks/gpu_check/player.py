"""One way to train on several devices: prints its figures as one line of JSON.

Started by `run.py` with `kerasdist run`, which gives each process its devices.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any


def main() -> None:
    """Measure bandwidth and two models; the chief prints the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("plain", "mirrored", "ring"), required=True)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--devices", choices=("gpu", "cpu"), required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()

    import tensorflow as tf

    devices = make_devices(options.devices, options.replicas)
    strategy = make_strategy(options, devices)
    found: dict[str, Any] = {}
    replicas = options.replicas * options.workers
    if strategy is not None and replicas > 1:
        size = 100 << 20 if options.devices == "gpu" else 8 << 20
        size = 1 << 16 if options.quick else size
        found["bandwidth"] = bandwidth(strategy, size, 2 if options.quick else 10)
        found["bytes"] = size
    for name, build in (("mlp", mlp), ("conv", conv)):
        found[name] = train(strategy, build, options, replicas)
    if options.devices == "gpu":
        details = tf.config.experimental.get_device_details(
            tf.config.list_physical_devices("GPU")[0]
        )
        found["gpu"] = details.get("device_name", "unknown")
        found["cuda"] = tf.sysconfig.get_build_info().get("cuda_version", "unknown")
    if int(os.environ.get("RANK", "0")) == 0:
        print("RESULT", json.dumps(found), flush=True)


def make_devices(kind: str, count: int) -> list[str]:
    """Return the names of this process's devices."""
    import tensorflow as tf

    if kind == "cpu":
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * count,
        )
    elif len(tf.config.list_physical_devices("GPU")) < count:
        raise SystemExit(
            f"TensorFlow sees {len(tf.config.list_physical_devices('GPU'))} GPUs of "
            f"{count}. Is tensorflow[and-cuda] installed?"
        )
    return [f"{kind.upper()}:{i}" for i in range(count)]


def make_strategy(options: argparse.Namespace, devices: list[str]) -> Any:
    """Return the strategy; None for plain Keras."""
    if options.way == "plain":
        return None
    if options.way == "mirrored":
        import tensorflow as tf

        return tf.distribute.MirroredStrategy(devices)
    import kerasdist

    # On devices of the CPU, too, as on GPUs.
    reduction = "device" if options.replicas > 1 else "auto"
    return kerasdist.RingStrategy(
        devices if options.transport != "native" else None,
        transport=options.transport,
        local_reduction=reduction,
    )


def bandwidth(strategy: Any, size: int, calls: int) -> float:
    """Return bytes per second of an all-reduce over all replicas: size / time."""
    import tensorflow as tf

    def value(context: Any) -> Any:
        del context
        return tf.ones(size // 4)

    values = strategy.experimental_distribute_values_from_function(value)

    def reduce(tensor: Any) -> Any:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tensor)

    @tf.function
    def step() -> Any:
        return strategy.run(reduce, args=(values,))

    def once() -> float:
        start = time.perf_counter()
        # A copy to the host would be timed as well.
        for result in strategy.experimental_local_results(step()):
            _ = result[0].numpy()
        return time.perf_counter() - start

    once()
    return size / statistics.median(once() for _ in range(calls))


def mlp(quick: bool) -> tuple[Any, tuple[int, ...], int]:
    """Return a dense network, the shape of its rows, and the rows per replica."""
    import keras

    width = 32 if quick else 2048
    dense = [keras.layers.Dense(width, "relu") for _ in range(3)]
    return [keras.Input((784,)), *dense, keras.layers.Dense(10)], (784,), 512


def conv(quick: bool) -> tuple[Any, tuple[int, ...], int]:
    """Return a convolutional network, likewise."""
    import keras

    blocks: list[Any] = []
    for filters in (4,) if quick else (64, 128, 256):
        for strides in (1, 2):
            blocks += [
                keras.layers.Conv2D(
                    filters, 3, strides, padding="same", use_bias=False
                ),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
            ]
    shape = (32, 32, 3)
    top = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    return [keras.Input(shape), *blocks, *top], shape, 256


def train(
    strategy: Any, build: Any, options: argparse.Namespace, replicas: int
) -> dict[str, Any]:
    """Return examples per second of `fit`, all replicas together."""
    import contextlib

    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    small = options.devices == "cpu" or options.quick
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        layers, shape, rows = build(small)
        model = keras.Sequential(layers)
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    rows = 16 if small else rows
    batch = rows * replicas
    steps = 3 if options.quick else 20
    random = np.random.default_rng(0)
    x = random.random((batch * steps, *shape), dtype="float32")
    y = random.integers(0, 10, batch * steps)
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    times = []
    for _ in range(2 if options.quick else 5):
        start = time.perf_counter()
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        times.append(time.perf_counter() - start)
    return {
        "examples/s": batch * steps / statistics.median(times),
        "jit_compile": bool(model.jit_compile),
        "loss": float(model.evaluate(x[:batch], y[:batch], verbose=0)),
    }


if __name__ == "__main__":
    main()
