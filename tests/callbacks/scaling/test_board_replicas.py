"""`ScalingTensorBoard` where each worker has two replicas.

Sleeps are the other measurement: each part of a step takes as long at least.
"""

from __future__ import annotations

import pytest

from board import near
from workers import Workers

pytestmark = [pytest.mark.timeout(150), pytest.mark.soak]

# Seconds: a layer on the first and on the second replica of a worker, the collective
# of gradients, the update, the data, a callback.
FIRST, SECOND, SEND, UPDATE, READ, CALLBACK = 0.02, 0.08, 0.03, 0.025, 0.25, 0.015
ROWS, BATCH = 80, 16

SCRIPT = """
import dataclasses, json, os, time
import numpy as np
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2)
# Or who sleeps in a graph would hold up all others that want the one thread.
tf.config.threading.set_inter_op_parallelism_threads(8)
import keras
import kerasdist
from kerasdist._keras.training.job_callback import JobCallback
from kerasdist.callbacks import ScalingTensorBoard

folder = os.environ["FOLDER"]
strategy = kerasdist.RingStrategy(devices=["CPU:0", "CPU:1"], timeout=60)
rank = strategy.rank
rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 16)).astype("float32")
y = rng.normal(size=(ROWS, 4)).astype("float32")

def sleep(seconds, tensor):
    def call(value, seconds):
        time.sleep(float(seconds))
        return value
    # By default those of a step run one after the other.
    late = tf.numpy_function(
        call, [tensor, tf.cast(seconds, tf.float32)], tensor.dtype, stateful=False)
    return tf.ensure_shape(late, tensor.shape)

class Slow(keras.layers.Layer):
    def call(self, inputs):
        context = tf.distribute.get_replica_context()
        number = 0 if context is None else context.replica_id_in_sync_group
        seconds = tf.where(tf.equal(number % 2, 0), FIRST, SECOND)
        return inputs * sleep(seconds, tf.reduce_sum(tf.zeros_like(inputs)) + 1.0)

class SlowSGD(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        if variable.shape == (4,):
            gradient = sleep(UPDATE, gradient)
        super().update_step(gradient, variable, learning_rate)

class Watch(JobCallback):
    never_stops = True

    def __init__(self):
        super().__init__()
        self.spent, self.sends = [], []

    def on_train_begin(self, logs=None):
        original = type(strategy.communicator).all_reduce
        def all_reduce(*args, **kwargs):
            begin = time.perf_counter()
            if kwargs.get("lend"):
                time.sleep(SEND)
            result = original(strategy.communicator, *args, **kwargs)
            if kwargs.get("lend"):
                self.sends.append(time.perf_counter() - begin)
            return result
        strategy.communicator.all_reduce = all_reduce

    def on_epoch_begin(self, epoch, logs=None):
        self.begin = time.perf_counter()

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(CALLBACK)

    def on_train_batch_end(self, batch, logs=None):
        now = time.perf_counter()
        if self.spent or batch > 0:  # the first one has traced
            self.spent.append(now - self.begin)
        self.begin = now

    def on_train_end(self, logs=None):
        del strategy.communicator.all_reduce

@tf.function
def read(x, y):
    return sleep(READ, x), y

keras.utils.set_random_seed(1)
with strategy.scope():
    m = keras.Sequential([
        keras.Input((16,)), keras.layers.Dense(8, activation="relu"), Slow(),
        keras.layers.Dense(4)])
    m.compile(SlowSGD(0.1), "mse")
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).map(read)
board, watch = ScalingTensorBoard(folder, verbose=0), Watch()
m.fit(data, epochs=2, verbose=0, callbacks=[board, watch])
found = {"spent": watch.spent, "sends": watch.sends}
if board.figures is not None:
    found["figures"] = dataclasses.asdict(board.figures)
print("RESULT", json.dumps(found))
"""
CONSTANTS = (
    "FIRST, SECOND, SEND, UPDATE, READ, CALLBACK = "
    f"{FIRST}, {SECOND}, {SEND}, {UPDATE}, {READ}, {CALLBACK}\n"
    f"ROWS, BATCH = {ROWS}, {BATCH}\n"
)


def test_parts_of_a_step(tmp_path):
    env = {"FOLDER": str(tmp_path)}
    with Workers(CONSTANTS + SCRIPT, 2, env=env, deadline=120) as job:
        chief, other = (one.result for one in job.succeed())
    figures = chief["figures"]
    assert "figures" not in other
    # The clock and the samples.
    seconds = max(sum(one["spent"]) for one in (chief, other))
    steps = 2 * ROWS // BATCH - 1
    assert len(chief["spent"]) == figures["steps"] == steps
    assert near(figures["step_seconds"], seconds / steps, 0.1)
    assert near(figures["examples_per_second"], steps * BATCH / seconds, 0.1)
    assert figures["global_batch"] == BATCH
    assert figures["workers"] == 2
    phases = figures["phases"]
    assert near(sum(phases.values()), figures["step_seconds"], 1e-6)
    # They add up to what the clock says: none can be longer than it should without
    # another one being shorter.
    assert phases["compute"] > max(FIRST, SECOND), phases
    assert phases["update"] > UPDATE, phases
    assert phases["outside"] > CALLBACK, phases
    exchange = phases["pack"] + phases["communicate"] + phases["wait"]
    # In it the other worker is waited for, who may come late now and then.
    sends = chief["sends"] + other["sends"]
    assert exchange > SEND
    assert near(exchange, sum(sends) / len(sends), 0.3), (phases, sends)
    # Others are read ahead; the first one of the second epoch can't be.
    assert phases["input"] * steps > READ, phases
