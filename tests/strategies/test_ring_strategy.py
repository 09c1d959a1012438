"""RingStrategy as a user meets it: one process, several devices, several workers.

What one process does alike with parameter servers is tested with both strategies.
"""

import gc
import json
import threading

import keras
import numpy as np
import pytest
from scripts import PRELUDE

import kerasdist
from kerasdist.collectives.connect import Job
from kerasdist.errors import ClusterError
from sessions import Session


def settings(monkeypatch, cluster, kind="worker", index=0):
    task = {"type": kind, "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))


@pytest.fixture
def strategy():
    made = kerasdist.RingStrategy()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"devices": ["CPU:9"]}, r"'CPU:9' doesn't exist.*: devices=\['CPU:9'\]"),
        ({"devices": ["CPU:0", "CPU:0"]}, "'CPU:0' is given twice"),
        ({"devices": ["nonsense"]}, "'nonsense' (isn't a device name|doesn't exist)"),
        ({"devices": "CPU:0"}, r"must be a list.*Received: devices='CPU:0'"),
        ({"devices": []}, r"must be a list"),
        ({"timeout": 0}, "Received: collective=0"),
        ({"heartbeat_timeout": float("inf")}, "Received: heartbeat=inf"),
        ({"transport": "carrier pigeon"}, "Received: transport='carrier pigeon'"),
    ],
)
def test_wrong_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        kerasdist.RingStrategy(**arguments)


def test_bad_settings_are_an_error_before_anything_exists(monkeypatch):
    settings(monkeypatch, {"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}, "ps")
    before = threading.active_count()
    with pytest.raises(ClusterError, match="no parameter servers"):
        kerasdist.RingStrategy()
    monkeypatch.setenv("TF_CONFIG", "{not json")
    with pytest.raises(ClusterError, match="TF_CONFIG"):
        kerasdist.RingStrategy()
    assert threading.active_count() == before


def test_one_worker_without_settings_equals_plain_keras():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 4)).astype("float32")
    y = x.sum(1, keepdims=True)

    def train():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return model.get_weights(), history.history["loss"]

    plain_weights, plain_loss = train()
    for create in (kerasdist.RingStrategy, kerasdist.ParameterServerStrategy):
        strategy = create(devices=["CPU:0"])
        assert (strategy.rank, strategy.size, strategy.is_chief) == (0, 1, True)
        (total,) = strategy.communicator.all_reduce([[1, 2]])
        np.testing.assert_array_equal(total, [1, 2])
        with strategy.scope():
            weights, loss = train()
        for a, b in zip(weights, plain_weights, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(loss, plain_loss, rtol=1e-6)
        strategy.close()
        strategy.close()
        with pytest.raises(kerasdist.errors.TransportClosed, match="closed"):
            strategy.communicator.barrier()


@pytest.mark.soak
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


@pytest.mark.parametrize("name", ["RingStrategy", "ParameterServerStrategy"])
def test_collected_without_close(name):
    def make():
        getattr(kerasdist, name)().scope()

    make()  # the check for what is left behind runs after each test


def test_a_thread_that_collects_a_strategy_may_hold_locks_of_its_job(monkeypatch):
    lock, had, left = threading.Lock(), [], threading.Event()
    close = Job.close

    def close_with_lock(job, error=None):
        had.append(lock.acquire(timeout=5))
        close(job, error)
        left.set()

    monkeypatch.setattr(Job, "close", close_with_lock)
    with lock:
        kerasdist.RingStrategy().scope()
        gc.collect()
    assert left.wait(30)
    assert had == [True]


# Two workers.

BEFORE = """
def data(rows=103):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 5)).astype("float32")
    return x, (x @ rng.normal(size=(5, 3))).argmax(1)

def model(strategy):
    with strategy.scope():
        hidden, last = keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(3)
        m = keras.Sequential([keras.Input((5,)), hidden, last])
        m.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return m

def weights(m):
    return [w.tobytes().hex() for w in m.get_weights()]
"""


@pytest.fixture(scope="module")
def run():
    setup = PRELUDE + "strategy = kerasdist.RingStrategy(timeout=60)\n"
    with Session(setup, 2, before=BEFORE) as session:
        yield session.run


def test_two_workers_train_one_model(run):
    a, b = run("""
x, y = data()
# The chief's initial values count.
keras.utils.set_random_seed(strategy.rank)
m = model(strategy)
initial = weights(m)
history = m.fit(x, y, batch_size=16, epochs=3, verbose=0)
evaluated = m.evaluate(x, y, verbose=0)
predicted = m.predict(x, verbose=0)
result([strategy.rank, strategy.size, initial, weights(m), history.history, evaluated,
        predicted.tobytes().hex(), list(predicted.shape)])
""")
    assert [a[0], b[0]] == [0, 1]
    assert a[1] == b[1] == 2
    assert a[2:] == b[2:]
    assert a[2] != a[3]
    assert a[-1] == [103, 3]
    losses = a[4]["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.soak
def test_two_strategies_in_one_process_do_not_disturb_each_other(run):
    a, b = run("""
x, y = data(32)
second = kerasdist.RingStrategy()
models = [model(strategy), model(second)]
for m in models:
    m.fit(x, y, batch_size=16, verbose=0)
second.close()
third = kerasdist.RingStrategy()
models.append(model(third))
for m in models[::2]:
    m.fit(x, y, batch_size=16, verbose=0)
third.close()
result([weights(m) for m in models])
""")
    assert a == b


def test_custom_loop(run):
    """Outside of fit: run, reduce, gather and values, as TensorFlow has them."""
    results = run("""
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
""")
    for rank, (out, context, v, mean, local) in enumerate(results):
        assert out == [[3.0], [1.5], 3.0, [1.0, 2.0], [3.0], [1.5], rank]
        assert context == [[rank, 2]]
        assert v == 7.0
        assert mean == 1.5
        assert local == 1


def test_different_settings_of_the_data_are_an_error(run):
    for found in run("""
x, y = data(100)
given = {"batch_size": 10 + strategy.rank, "verbose": 0}
result(refused(lambda: model(strategy).fit(x, y, **given)))
"""):
        assert "All workers must be given the same data" in found
        assert "rank 0: shuffle=True, batch_size=10" in found
        assert "rank 1: shuffle=True, batch_size=11" in found


def test_every_sample_once_per_epoch(run):
    """Shuffled by an order that all agree on: each sample once, another each epoch."""
    a, b = run("""
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
""")
    orders = []
    for mine, other in zip(a, b, strict=True):
        assert sorted(mine + other) == list(range(53))
        orders.append(tuple(mine))
    assert len(set(orders)) == 3
