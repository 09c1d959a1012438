"""One task of a job: an ordinary Keras 3 script in the scope of a strategy.

    TF_CONFIG=... python train.py multi_worker_mirrored

The script is the same for all strategies. At the end it prints what came out.
"""

from __future__ import annotations

import argparse
import json
import os

import keras
import numpy as np
import tensorflow as tf


def make_strategy(name: str) -> tf.distribute.Strategy:
    if name == "multi_worker_mirrored":
        return tf.distribute.MultiWorkerMirroredStrategy()
    if name == "parameter_server":
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        if resolver.task_type in ("worker", "ps"):
            server = tf.distribute.Server(
                resolver.cluster_spec(),
                job_name=resolver.task_type,
                task_index=resolver.task_id,
                protocol="grpc",
            )
            server.join()
        return tf.distribute.ParameterServerStrategy(resolver)
    if name == "mirrored":
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * 2,
        )
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    if name == "ring":
        import kerasdist

        return kerasdist.RingStrategy()
    if name == "none":
        return tf.distribute.get_strategy()
    raise ValueError(f"Unknown strategy. Received: name={name!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("strategy")
    parser.add_argument("--rows", type=int, default=64, help="length of the data")
    parser.add_argument("--batch-size", type=int, default=16, help="global")
    parser.add_argument("--clip", action="store_true", help="global_clipnorm=1")
    parser.add_argument("--dataset", action="store_true", help="fit(tf.data.Dataset)")
    options = parser.parse_args()

    # Where it was raised is part of the finding.
    keras.config.disable_traceback_filtering()
    strategy = make_strategy(options.strategy)
    # All rows differ, the gradient has nothing random in it.
    x = np.arange(1, options.rows + 1, dtype="float32")[:, None] / options.rows
    y = 3 * x
    if options.clip:
        y = 100 * x
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )
        if options.clip:
            optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
        else:
            optimizer = keras.optimizers.SGD(0.1)
        model.compile(optimizer, "mse")
    if options.dataset:
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(options.batch_size)
        history = model.fit(data, verbose=0)
    else:
        history = model.fit(
            x, y, batch_size=options.batch_size, shuffle=False, verbose=0
        )
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", "alone")
    weight = float(np.asarray(model.get_weights()[0]).reshape(-1)[0])
    loss = history.history["loss"][0]
    print(f"TRAINED {task}: weight {weight:.6f}, loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
