"""What gradients look like on the wire: buckets, and 16 bits if asked for."""

import numpy as np
import pytest
from scripts import with_prelude

from workers import Workers

pytestmark = pytest.mark.timeout(170)

SCRIPT = with_prelude("""
from kerasdist.collectives.checked import CheckedCommunicator

sent = []  # dtype and elements of each all_reduce
original = CheckedCommunicator.all_reduce

def all_reduce(self, buffers, *args, **kwargs):
    arrays = [np.asarray(buffer) for buffer in buffers]
    sent.append([str(arrays[0].dtype), sum(array.size for array in arrays)])
    return original(self, buffers, *args, **kwargs)

CheckedCommunicator.all_reduce = all_reduce
rng = np.random.default_rng(0)
x = rng.normal(size=(21, 4)).astype("float32")
y = (x.sum(1) > 0).astype("int64")

def train(scope, steps=None, factor=1.0):
    keras.utils.set_random_seed(3)
    with scope:
        m = keras.Sequential([
            keras.Input((4,)),
            keras.layers.Dense(50, activation="relu"),
            keras.layers.Dense(30, activation="relu"),
            keras.layers.Dense(2),
        ])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        m.compile(
            keras.optimizers.SGD(0.5 / factor, gradient_accumulation_steps=steps),
            lambda t, p: factor * loss(t, p),
        )
    sent.clear()
    m.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    gradients = [entry for entry in sent if entry[1] > 20]
    return [np.asarray(w).tolist() for w in m.get_weights()], gradients

found = {}
for name, options in {
    "one": {}, "buckets": {"bucket_size": 900},
    "fp16": {"compression": "fp16", "bucket_size": 4000},
}.items():
    strategy = kerasdist.RingStrategy(timeout=60, **options)
    found[name] = train(strategy.scope())
found["window"] = train(strategy.scope(), steps=3)
# A gradient that 16 bits can hold, and of which the sum over two workers couldn't.
found["large"] = train(strategy.scope(), factor=40_000.0)
strategy = kerasdist.RingStrategy(timeout=60, compression="bf16")
with strategy.scope():
    v = tf.Variable(tf.zeros(30))
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([v])

@tf.function
def step():
    strategy.run(lambda: optimizer.apply([tf.fill([30], 0.5)], [v]))

sent.clear()
step()
found["loop"] = [v.numpy().tolist(), [entry for entry in sent if entry[1] > 20]]
result(found)
""")


@pytest.fixture(scope="module")
def results():
    with Workers(SCRIPT, 2, deadline=150) as job:
        return [finished.result for finished in job.succeed()]


def weights(result):
    return np.concatenate([np.ravel(w) for w in result[0]])


def test_all_ranks_hold_the_same_bits(results):
    first, second = results
    assert first == second


def test_gradients_leave_in_buckets_the_last_layers_first(results):
    mine = results[0]
    steps = 2 * 3
    elements = 4 * 50 + 50 + 50 * 30 + 30 + 30 * 2 + 2
    assert len(mine["one"][1]) == steps
    assert len(mine["buckets"][1]) == 4 * steps
    per_step = [count for _, count in mine["buckets"][1]][:4]
    # Kernels and biases of Dense(2) and Dense(30), with the number of rows.
    assert per_step[0] in range(2 + 60 + 30, 2 + 60 + 30 + 3)
    assert sum(per_step) in range(elements, elements + 5)
    np.testing.assert_allclose(
        weights(mine["buckets"]), weights(mine["one"]), rtol=1e-5, atol=1e-6
    )


def test_gradients_cross_the_network_in_16_bits(results):
    mine = results[0]
    assert {dtype for dtype, _ in mine["fp16"][1]} == {"float16"}
    difference = np.abs(weights(mine["fp16"]) - weights(mine["one"]))
    assert 0 < difference.max() < 0.003
    # Nor does their sum overflow.
    np.testing.assert_allclose(weights(mine["large"]), weights(mine["one"]), atol=0.003)
    # Of six steps there are two updates.
    assert {bits for bits, _ in mine["window"][1]} == {"float16"}
    assert 3 * len(mine["window"][1]) == len(mine["fp16"][1])


def test_a_custom_loop_sends_16_bits_too(results):
    values, sent = results[0]["loop"]
    assert values == [-1.0] * 30  # a sum over the replicas
    assert sent == [["bfloat16", 30]]
