"""Two workers as the tasks of a barrier stage of Spark; see docs/spark.md.

    spark-submit --master 'local[2]' examples/spark_barrier.py
    spark-submit --master spark://head:7077 examples/spark_barrier.py --workers 4

Spark starts all tasks of a barrier stage at once. They exchange their addresses, from
which each makes its TF_CONFIG.
"""

import argparse
import json
import os
import secrets
import socket

from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession


def train(epochs):
    """The training script. Every worker runs it; the result is the chief's."""
    import keras
    from sklearn.datasets import load_digits

    import kerasdist

    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    keras.utils.set_random_seed(0)
    with kerasdist.RingStrategy() as strategy, strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        model.fit(x, y, batch_size=64, epochs=epochs, verbose=0)
        loss, accuracy = model.evaluate(x, y, batch_size=64, verbose=0)
    return {"loss": loss, "accuracy": accuracy, "workers": strategy.size}


def run_in_barrier(train, secret, **arguments):
    """Return a function for `mapPartitions` that runs `train` as one worker."""

    def task(_):
        context = BarrierTaskContext.get()
        index = context.partitionId()
        host = context.getTaskInfos()[index].address.rpartition(":")[0]
        with socket.socket() as free:
            free.bind(("", 0))
            # Every task gets all addresses, in the order of the tasks.
            addresses = context.allGather(f"{host}:{free.getsockname()[1]}")
        os.environ["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": addresses},
                "task": {"type": "worker", "index": index},
            }
        )
        os.environ["KERASDIST_SECRET"] = secret
        return [train(**arguments)]

    return task


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    spark = SparkSession.builder.appName("digits").getOrCreate()
    chief, *_ = (
        spark.sparkContext.parallelize(range(options.workers), options.workers)
        .barrier()
        .mapPartitions(
            run_in_barrier(train, secrets.token_hex(32), epochs=options.epochs)
        )
        .collect()
    )
    print(
        f"{chief['workers']} workers: loss {chief['loss']:.6f}, "
        f"accuracy {chief['accuracy']:.4f}"
    )
    spark.stop()


if __name__ == "__main__":
    main()
