"""Jobs that are limited by one thing, and are told so: on real links, by real sleeps.

`test_scaling_tensorboard.py` has a slow rank and slow data besides, for every strategy.

What happens once must not count. An epoch begins by making an iterator, which takes
10 ms, and now and then 0.2 s. That of the first epoch isn't measured, as the call that
traces isn't. So all steps of a case together take long, or are in one epoch.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from pace import bound
from workers import Workers

pytestmark = [pytest.mark.timeout(150), pytest.mark.soak]

SCRIPT = """
import dataclasses, gc, json, sys, time
import keras
import numpy as np
import tensorflow as tf
import kerasdist
from kerasdist.callbacks import ScalingTensorBoard

tf.config.threading.set_inter_op_parallelism_threads(4)
strategy = kerasdist.RingStrategy(timeout=60)
rank = strategy.rank
x = np.random.default_rng(0).normal(size=(160, 64)).astype("float32")
SLOW = 0.1

class Sleep(keras.layers.Layer):
    def call(self, inputs):
        def late(value):
            time.sleep(4 * SLOW)
            return value
        one = tf.numpy_function(late, [tf.constant(1.0)], tf.float32)
        return inputs * tf.ensure_shape(one, [])

class Pause(keras.callbacks.Callback):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(self.seconds)

class Save(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if rank == 0 and epoch == 0:
            time.sleep(30 * SLOW)

def run(name, layers, data, callbacks=(), batch=16, epochs=1):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        m = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(1)])
        m.compile("sgd", "mse")
    board = ScalingTensorBoard(sys.argv[1] + "/" + name, verbose=0)
    # That takes some 0.2 s with TensorFlow in memory, on any rank at any time.
    gc.collect()
    gc.disable()
    if isinstance(data, np.ndarray):
        data = tf.data.Dataset.from_tensor_slices((data, data[:, :1])).batch(batch)
    m.fit(data, epochs=epochs, verbose=0, callbacks=[board, *callbacks])
    if board.figures is None:
        return None
    return [dataclasses.asdict(board.figures), dataclasses.asdict(board.verdict)]
"""

LOCAL = """
def read(x, y):
    def late(value):
        if rank == 1:
            time.sleep(SLOW)
        return value
    return tf.ensure_shape(tf.numpy_function(late, [x], tf.float32), x.shape), y

options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.OFF)
# What is read ahead during a slow first call must not be all of it.
own = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).repeat(3).batch(16).map(read)
class Items(keras.utils.PyDataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        time.sleep(3 * SLOW)
        part = slice(16 * index, 16 * index + 16)
        return x[part], x[part, :1]

print("RESULT", json.dumps({
    "items": run("items", [], Items()),
    "compute": run("compute", [Sleep()], x, batch=32),
    "saving": run("saving", [], x, [Save()], epochs=2),
    "batch": run("batch", [], x, [Pause(SLOW / 2)], batch=8),
    "data": run("data", [], own.with_options(options)),
    "callback": run("callback", [], x, [Pause(0 if rank else SLOW)]),
}))
"""


def test_what_limits_a_job_on_one_host(tmp_path):
    with Workers(SCRIPT + LOCAL, 2, [str(tmp_path)], deadline=100) as job:
        found = job.succeed()[0].result
    figures, verdict = found["compute"]
    assert verdict["limit"] == "compute", figures["phases"]
    assert figures["phases"]["compute"] > 0.4
    # What one rank does between two epochs isn't a part of any step, on no rank.
    figures, verdict = found["saving"]
    # A mean over both, of which the other one would wait 3 s.
    assert figures["phases"]["wait"] * figures["steps"] < 1, figures["phases"]
    # Read by Python, outside of any graph.
    figures, verdict = found["items"]
    assert verdict["limit"] == "input", figures["phases"]
    assert figures["phases"]["input"] > figures["phases"]["outside"]
    # Each step costs something that doesn't depend on its size.
    figures, verdict = found["batch"]
    assert verdict["limit"] == "batch", figures["phases"]
    # Its own data are slow, and so it is slow.
    figures, verdict = found["data"]
    assert verdict["limit"] == "straggler", figures["phases"]
    assert (figures["slowest"], figures["slow_part"]) == (1, "input")
    assert "rank 1 reads its data" in verdict["change"][0]
    figures, verdict = found["callback"]
    assert verdict["limit"] == "straggler", figures["phases"]
    assert (figures["slowest"], figures["slow_part"]) == (0, "outside")
    assert "only rank 0 does after each batch" in verdict["change"][0]


RATE = 25e6  # bytes per second

REMOTE = """
print("RESULT", json.dumps({
    "large": run("large", [keras.layers.Dense(6000)], x, epochs=2),
    "small": run("small", [keras.layers.Dense(8)], np.tile(x, (60, 1))),
}))
"""


@pytest.mark.netns
def test_what_limits_a_job_on_two_hosts(two_hosts, tmp_path):
    """The link's rate is what the network shapes it to."""
    if shutil.which("tc") is None:
        pytest.skip("there is no `tc` (package iproute2)")
    for host in range(2):
        shape = f"tc qdisc add dev eth0 root tbf rate {RATE * 8:.0f} burst 32kb"
        command = [*two_hosts.prefix(host), *shape.split(), "latency", "400ms"]
        subprocess.run(command, check=True, timeout=bound(30))
    with Workers(
        SCRIPT + REMOTE,
        2,
        [str(tmp_path)],
        deadline=120,
        cluster=two_hosts.addresses,
        prefix=two_hosts.prefix,
    ) as job:
        found = job.succeed()[0].result
    figures, verdict = found["large"]
    assert verdict["limit"] == "network", figures["phases"]
    # Of two workers each sends half of it twice; frames have headers.
    size = 4 * (64 * 6000 + 6000 + 6000 + 1)
    assert size < figures["bytes_per_step"] < 1.02 * size
    assert 0.8 * RATE < figures["link"] < 1.2 * RATE
    assert 0.6 * RATE < figures["bandwidth"] < 1.2 * RATE
    traffic = figures["phases"]["communicate"] + figures["phases"]["wait"]
    assert 0.8 * size / RATE < traffic < 2 * size / RATE
    figures, verdict = found["small"]
    assert verdict["limit"] == "batch", figures["phases"]
    assert any(reason.startswith("It isn't the link") for reason in verdict["because"])
