"""RingStrategy as a user meets it: one process, several devices, several workers."""

from __future__ import annotations

import json
import socket
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasdist
from workers import Workers

MODEL = """
import json
import os
import keras
import numpy as np
import tensorflow as tf
import kerasdist

def data(rows=103, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 5)).astype("float32")
    return x, (x @ rng.normal(size=(5, 3))).argmax(1)

def model():
    m = keras.Sequential([
        keras.Input((5,)),
        keras.layers.Dense(7, activation="tanh"),
        keras.layers.Dense(3),
    ])
    m.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return m

def weights(m):
    return [w.tobytes().hex() for w in m.get_weights()]

def result(value):
    print("RESULT", json.dumps(value), flush=True)
"""


@pytest.fixture
def strategy():
    made = kerasdist.RingStrategy(["CPU:0"])
    yield made
    made.close()


def test_it_is_a_strategy(strategy):
    assert isinstance(strategy, tf.distribute.Strategy)
    assert not tf.distribute.has_strategy()
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
    assert strategy.num_replicas_in_sync == 1


def test_one_worker_without_settings(strategy):
    assert (strategy.rank, strategy.size, strategy.is_chief) == (0, 1, True)
    assert strategy.communicator.size == 1
    np.testing.assert_array_equal(strategy.communicator.all_reduce([[1, 2]])[0], [1, 2])


def test_default_device_is_the_cpu():
    strategy = kerasdist.RingStrategy()
    assert [d.split("/device:")[-1] for d in strategy.extended.worker_devices] == [
        "CPU:0"
    ]
    strategy.close()


@pytest.mark.parametrize(
    ("devices", "match"),
    [
        (["CPU:9"], r"'CPU:9' doesn't exist.*Received: devices=\['CPU:9'\]"),
        (["CPU:0", "CPU:0"], "'CPU:0' is given twice"),
        (["nonsense"], "'nonsense' isn't a device name|'nonsense' doesn't exist"),
        ("CPU:0", r"must be a list.*Received: devices='CPU:0'"),
        ([], r"must be a list"),
    ],
)
def test_wrong_devices(devices, match):
    with pytest.raises(ValueError, match=match):
        kerasdist.RingStrategy(devices)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"timeout": 0}, "Received: collective=0"),
        ({"heartbeat_timeout": float("inf")}, "Received: heartbeat=inf"),
        ({"transport": "carrier pigeon"}, "Received: transport='carrier pigeon'"),
    ],
)
def test_wrong_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        kerasdist.RingStrategy(**arguments)


def test_a_server_task_has_no_ring(monkeypatch):
    cluster = {"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
    monkeypatch.setenv(
        "TF_CONFIG",
        json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 0}}),
    )
    with pytest.raises(kerasdist.errors.ClusterError, match="no parameter servers"):
        kerasdist.RingStrategy()


def test_bad_settings_are_an_error_before_anything_exists(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{not json")
    before = threading.active_count()
    with pytest.raises(kerasdist.errors.ClusterError, match="TF_CONFIG"):
        kerasdist.RingStrategy()
    assert threading.active_count() == before


def test_port_in_use(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cluster = {"worker": [address, "127.0.0.1:1"]}
        monkeypatch.setenv(
            "TF_CONFIG",
            json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}),
        )
        with pytest.raises(kerasdist.errors.AddressInUseError, match=address):
            kerasdist.RingStrategy()


def test_a_cluster_resolver(monkeypatch):
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}  # is not looked at
    monkeypatch.setenv(
        "TF_CONFIG",
        json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}),
    )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": ["127.0.0.1:1"]}),
        task_type="worker",
        task_id=0,
    )
    strategy = kerasdist.RingStrategy(cluster=resolver)
    assert strategy.size == 1
    strategy.close()


def test_fit_on_one_worker_equals_plain_keras(strategy):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 4)).astype("float32")
    y = x.sum(1, keepdims=True)

    def train():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return model.get_weights(), history.history["loss"]

    plain_weights, plain_loss = train()
    with strategy.scope():
        weights, loss = train()
    for a, b in zip(weights, plain_weights, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-6)


def test_a_seed_that_is_set_again_gives_the_same_orders(strategy):
    """Models that are compared, or folds: plain Keras shuffles each alike."""
    x = np.arange(32, dtype="float32")[:, None]

    def losses(seed=None):
        if seed is not None:
            keras.utils.set_random_seed(seed)
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(1e-4), "mse")
        model.set_weights([np.ones((1, 1)), np.zeros(1)])
        return model.fit(x, x**2, batch_size=4, epochs=2, verbose=0).history["loss"]

    first = losses(3)
    assert losses(3) == first
    assert losses() != first
    assert losses(4) != first


def test_variables_are_numbers_as_in_plain_keras(strategy):
    with strategy.scope():
        optimizer = keras.optimizers.Adam(0.25)
        step = tf.Variable(3, dtype=tf.int64)
        rate = tf.Variable(0.5)
    assert float(optimizer.learning_rate) == 0.25
    assert int(optimizer.iterations) == 0
    assert (int(step), float(rate)) == (3, 0.5)


def test_close_twice_and_use_after_close():
    strategy = kerasdist.RingStrategy()
    strategy.close()
    strategy.close()
    with pytest.raises(kerasdist.errors.TransportClosed, match="closed"):
        strategy.communicator.barrier()


def test_collected_without_close():
    def make():
        kerasdist.RingStrategy().scope()

    make()  # the check for what is left behind runs after each test


def test_two_workers_train_one_model():
    script = (
        MODEL
        + """
x, y = data()
strategy = kerasdist.RingStrategy()
with strategy.scope():  # no seed: the chief's initial values count
    m = model()
initial = weights(m)
history = m.fit(x, y, batch_size=16, epochs=3, verbose=0)
evaluated = m.evaluate(x, y, verbose=0)
predicted = m.predict(x, verbose=0)
result([strategy.rank, strategy.size, initial, weights(m), history.history, evaluated,
        predicted.tobytes().hex(), list(predicted.shape)])
"""
    )
    with Workers(script, 2, deadline=120) as job:
        a, b = [f.result for f in job.succeed()]
    assert [a[0], b[0]] == [0, 1]
    assert a[1] == b[1] == 2
    assert a[2:] == b[2:]
    assert a[2] != a[3]
    assert a[-1] == [103, 3]
    losses = a[4]["loss"]
    assert losses[-1] < losses[0]


def test_two_strategies_in_one_process_do_not_disturb_each_other():
    script = (
        MODEL
        + """
x, y = data()
first = kerasdist.RingStrategy()
second = kerasdist.RingStrategy()
models = []
for strategy in (first, second, first):
    with strategy.scope():
        models.append(model())
for m in models:
    m.fit(x, y, batch_size=16, epochs=1, verbose=0)
first.close()
models[1].fit(x, y, batch_size=16, epochs=1, verbose=0)
third = kerasdist.RingStrategy()
with third.scope():
    models.append(model())
models[3].fit(x, y, batch_size=16, epochs=1, verbose=0)
result([weights(m) for m in models])
"""
    )
    with Workers(script, 2, deadline=120) as job:
        a, b = [f.result for f in job.succeed()]
    assert a == b


def test_custom_loop():
    """Outside of fit: run, reduce, gather and values, as TensorFlow has them."""
    script = (
        MODEL
        + """
strategy = kerasdist.RingStrategy()
context = []
values = strategy.experimental_distribute_values_from_function(
    lambda c: context.append((c.replica_id_in_sync_group, c.num_replicas_in_sync))
    or tf.constant([float(c.replica_id_in_sync_group + 1)])
)
with strategy.scope():
    v = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
    mean = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ,
                       aggregation=tf.VariableAggregation.MEAN)

@tf.function
def step(value):
    def replica(x):
        ctx = tf.distribute.get_replica_context()
        v.assign_add(x[0])
        mean.assign(x[0])
        return x, ctx.all_reduce("SUM", x), ctx.all_reduce("MEAN", x), \\
            tf.identity(ctx.replica_id_in_sync_group)
    x, total, average, rank = strategy.run(replica, args=(value,))
    return (strategy.reduce("SUM", x, axis=None), strategy.reduce("MEAN", x, axis=None),
            strategy.reduce("SUM", x, axis=0), strategy.gather(x, axis=0), total,
            average, rank)

for _ in range(2):
    out = [np.asarray(t).tolist() for t in step(values)]
local = strategy.experimental_local_results(values)
result([out, context, float(v.numpy()), float(mean.numpy()), len(local)])
"""
    )
    with Workers(script, 3, deadline=120) as job:
        results = [f.result for f in job.succeed()]
    for rank, (out, context, v, mean, local) in enumerate(results):
        assert out == [[6.0], [2.0], 6.0, [1.0, 2.0, 3.0], [6.0], [2.0], rank]
        assert context == [[rank, 3]]
        assert v == 13.0
        assert mean == 2.0
        assert local == 1


def test_collectives_of_a_graph_have_one_order():
    """Independent collectives in independent functions: all ranks agree."""
    script = (
        MODEL
        + """
strategy = kerasdist.RingStrategy(timeout=20)

@tf.function
def one(x):
    return strategy.reduce("SUM", x, axis=None)

@tf.function
def many(x):
    a = [one(x + i) for i in range(5)]
    b = [strategy.reduce("SUM", tf.cast(x, tf.int32) + i, axis=None) for i in range(5)]
    c = tf.while_loop(lambda i, t: i < 4,
                      lambda i, t: (i + 1, t + strategy.reduce("SUM", x, axis=None)),
                      [0, x])[1]
    return a, b, c

x = tf.constant(float(strategy.rank))
for _ in range(20):
    a, b, c = many(x)
result([[float(v) for v in a], [int(v) for v in b], float(c) - float(x)])
"""
    )
    with Workers(script, 2, deadline=120) as job:
        for finished in job.succeed():
            assert finished.result == [
                [1.0, 3.0, 5.0, 7.0, 9.0],
                [1, 3, 5, 7, 9],
                4.0,
            ]


def test_different_settings_of_the_data_are_an_error():
    script = (
        MODEL
        + """
strategy = kerasdist.RingStrategy()
with strategy.scope():
    m = model()
x, y = data(100)
try:
    m.fit(x, y, batch_size=10 + strategy.rank, verbose=0)
except ValueError as error:
    result(str(error))
"""
    )
    with Workers(script, 2, deadline=120) as job:
        for finished in job.succeed():
            assert "All workers must be given the same data" in finished.result
            assert "rank 0: shuffle=True, batch_size=10" in finished.result
            assert "rank 1: shuffle=True, batch_size=11" in finished.result


def test_every_sample_once_per_epoch():
    """Shuffled by an order that all agree on: each sample once, another each epoch."""
    script = (
        MODEL
        + """
strategy = kerasdist.RingStrategy()
seen = []
class Seen(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
    def call(self, x):
        return self.dense(x)
    def train_step(self, data):
        seen[-1].extend(int(v) for v in data[0][:, 0])
        return super().train_step(data)
class Epochs(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        seen.append([])
with strategy.scope():
    m = Seen()
    m.compile("sgd", "mse", run_eagerly=True)
x = np.arange(53, dtype="float32")[:, None]
m.fit(x, x * 0, batch_size=8, epochs=3, verbose=0, callbacks=[Epochs()])
result(seen)
"""
    )
    with Workers(script, 2, deadline=120) as job:
        a, b = [f.result for f in job.succeed()]
    orders = []
    for mine, other in zip(a, b, strict=True):
        assert sorted(mine + other) == list(range(53))
        orders.append(tuple(mine))
    assert len(set(orders)) == 3
