"""AutoGraph converts the script's functions, as without kerasdist, and none of ours."""

from __future__ import annotations

import pytest
from scripts import PRELUDE

from workers import Workers

pytestmark = pytest.mark.timeout(150)

SCRIPT = (
    PRELUDE
    + """
from tensorflow.python.autograph.impl import api

converted, convert = [], api._convert_actual

def note(entity, context):
    converted.append(f"{entity.__module__}.{entity.__qualname__}")
    return convert(entity, context)

api._convert_actual = note
strategy = kerasdist.RingStrategy(timeout=40, startup_timeout=60)
x = np.arange(64, dtype="float32")[:, None]
rows = tf.data.Dataset.from_tensor_slices((x, x))
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-5), "mse", metrics=["mae"])

def halved(a, b):
    return a / 2, b

# Its own rows only, and whole batches.
model.fit(rows.map(halved).batch(8), verbose=0)
model.fit(rows.batch(8).map(halved), verbose=0)

def step(batch):
    a, b = batch
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(a) - b) ** 2)
    model.optimizer.apply(
        tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    if tf.reduce_sum(a) < 0:
        return tf.constant(-1.0)
    else:
        return tf.constant(1.0)

@tf.function
def train(batch):
    return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

batches = strategy.experimental_distribute_dataset(rows.batch(8))
ones = [float(train(batch)) for batch in batches]
result([sorted(set(converted)), ones])
"""
)


def test_what_is_converted():
    with Workers(SCRIPT, 2, deadline=100) as job:
        results = [worker.result for worker in job.succeed()]
    for converted, ones in results:
        assert [name.rpartition(".")[2] for name in converted] == [
            "halved",
            "step",
            "train",
        ]
        assert ones == [2.0] * 8
