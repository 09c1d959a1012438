import math

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import with_prelude
from soak import but_soak, soaking

from kerasdist.strategies.balance import cuts_of, shares_of, speeds_of
from kerasdist.strategies.data.batch_split import bounds_of_replica
from kerasdist.strategies.reduce.workers import ReplicaLayout
from kerasdist.strategies.ring import RingStrategy
from workers import Workers

# What the shares are.


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(0, 200),
)
def test_parts_are_all_rows_in_order(sizes, local, rows):
    shares = [size / sum(sizes) for size in sizes]
    cuts = cuts_of(shares, [local] * len(sizes))
    total = local * len(sizes)
    seen = []
    for layout in (ReplicaLayout(0, 1, total, cuts), ReplicaLayout(0, 1, total)):
        for replica in range(total):
            seen.extend(range(*bounds_of_replica(rows, replica, layout)))
    assert seen == 2 * list(range(rows))


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=6))
def test_all_take_as_long_with_their_shares(speeds):
    rows = [100.0] * len(speeds)
    shares = shares_of(speeds, rows)
    if shares is None:
        assert min(speeds) > 0.97 * sum(speeds) / len(speeds)
        return
    assert sum(shares) == pytest.approx(1)
    if min(speeds) * sum(rows) / sum(speeds) > 2:
        times = [share / speed for share, speed in zip(shares, speeds, strict=True)]
        assert max(times) == pytest.approx(min(times))
    assert min(shares) * sum(rows) > 1


def test_a_spike_counts_half_and_a_missing_measurement_changes_nothing():
    assert speeds_of([10, 10], [0.1, 1.0], [0.0, 0.0]) == [100, 10]
    assert speeds_of([10, 10], [0.4, 0.0], [100, 10]) == pytest.approx([50, 10])
    assert shares_of([100, 0.0], [10, 10]) is None
    assert shares_of([100, 101], [10, 10]) is None
    slow, fast = shares_of([1, 1e6], [32, 32])
    assert slow * 64 > 1
    assert math.isclose(slow + fast, 1)


# Two real workers, of which the second one is faster.

SCRIPT = with_prelude("""
rows = np.random.default_rng(0).normal(size=(130, 6)).astype("float32")
sums = rows.sum(1, keepdims=True)

class Slow(keras.layers.Layer):
    def call(self, x):
        def wait(y):
            seen.append(len(y))
            time.sleep(len(y) * 8e-3 / 8 ** abs(getattr(strategy, "rank", 0) - slowest))
            return y
        y = tf.numpy_function(wait, [x], x.dtype)
        return x + 0 * tf.stop_gradient(tf.reshape(y, tf.shape(x)))

def dataset():
    return tf.data.Dataset.from_tensor_slices((rows, sums))

KINDS = {
    "arrays": lambda: dict(x=rows, y=sums, batch_size=30, shuffle=False,
                           sample_weight=np.linspace(0, 1, 130)),
    "dataset": lambda: dict(x=dataset().batch(30)),
    "own rows": lambda: dict(x=dataset().map(lambda a, b: (a * 1, b)).batch(30)),
    "items": lambda: dict(x=Batches(30, rows, sums), shuffle=False),
}

def train(kind):
    seen.clear()
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([
            keras.Input((6,)), Slow(), keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1),
        ])
        model.compile(keras.optimizers.Adam(0.01), "mse", weighted_metrics=["mae"])
    history = model.fit(
        **KINDS[kind](), epochs=3, verbose=0, validation_batch_size=25,
        validation_data=(rows[:50], sums[:50]),
    )
    found = {
        "history": history.history,
        "weights": [w.tolist() for w in model.get_weights()],
        "seen": seen[:],
        "predicted": [],
    }
    if kind == "arrays":
        found["predicted"] = model.predict(rows[:40], verbose=0).tolist()
    return found

seen, slowest = [], 0
""")

JOB = """
lines = lines_said()
strategy = kerasdist.RingStrategy(balance="measured", timeout=60)
results = {kind: train(kind) for kind in sys.argv[1:]}
slowest = 1
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), Slow(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(dataset().batch(30).repeat(), steps_per_epoch=3, epochs=4, verbose=0)
if "MORE" in os.environ:
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
    model.fit(rows, sums, batch_size=65, epochs=3, verbose=0)
result(results | {"lines": lines})
"""
ALONE = """
strategy = tf.distribute.get_strategy()
slowest = 9  # nothing waits
result({kind: train(kind) for kind in sys.argv[1:]})
"""
ALWAYS, KINDS = ["own rows"], ["arrays", "dataset", "own rows", "items"]


@pytest.fixture(scope="module")
def results(request):
    kinds, env = ALWAYS, {}
    if soaking(request.config):
        kinds, env = KINDS, {"MORE": "1"}
    alone = Workers(SCRIPT + ALONE, 1, kinds, deadline=100, env={"TF_CONFIG": None})
    workers = Workers(SCRIPT + JOB, 2, kinds, deadline=150, env=env)
    return workers.results(), *alone.results()


@pytest.mark.parametrize("kind", but_soak(ALWAYS, KINDS))
def test_numbers_are_those_of_one_process(results, kind):
    workers, alone = results
    for worker in workers:
        for name, expected in alone[kind]["history"].items():
            found = worker[kind]["history"][name]
            assert found == pytest.approx(expected, rel=2e-4, abs=2e-5), name
        for found, expected in zip(
            worker[kind]["weights"], alone[kind]["weights"], strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-5)
        np.testing.assert_allclose(
            worker[kind]["predicted"], alone[kind]["predicted"], rtol=2e-3, atol=2e-5
        )


@pytest.mark.parametrize("kind", but_soak(ALWAYS, KINDS))
def test_faster_workers_get_more_rows(results, kind):
    slow, fast = (each[kind]["seen"] for each in results[0])
    # 8 times as fast; other work may hide that in some epochs.
    batches = [pair for pair in zip(fast, slow, strict=True) if sum(pair) == 30]
    assert max(a / b for a, b in batches) > 2


def test_the_shares_are_told_and_data_that_ignore_them(results, request):
    lines = results[0][0]["lines"]
    assert any(
        "rows of a batch by measured speed, rank by rank" in line for line in lines
    )
    ignored = [
        line for line in lines if "balance='measured' has no effect on these" in line
    ]
    # Of one iterator, and of compiled steps.
    assert len(ignored) == 1 + soaking(request.config)
    assert all("which can't be measured" in line for line in ignored[1:])
    assert results[0][1]["lines"] == []


# What is refused.


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"balance": "auto"}, "must be 'measured' or None. Received: balance='auto'"),
        ({"elastic": True}, "elastic=True: workers may join or leave"),
        ({"local_steps": 2}, r"local_steps=LocalSteps\(2\): no step waits"),
        ({"placement": {}, "devices": ["CPU:0"]}, "a placement, whose stages"),
        ({"shard": "off"}, "shard='off': each worker has data of its own"),
    ],
)
def test_what_divides_no_batches_is_refused(more, message):
    with pytest.raises(ValueError, match=message):
        RingStrategy(**{"balance": "measured", **more})


def test_one_worker_has_all_rows():
    with RingStrategy(balance="measured") as strategy, strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        history = model.fit(np.ones((6, 2)), np.ones((6, 1)), verbose=0)
    assert len(history.history["loss"]) == 1
