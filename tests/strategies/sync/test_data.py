import keras
import numpy as np
import pytest
from scripts import NOTING, PRELUDE
from soak import soak

import kerasdist
from sessions import Session
from workers import Workers

SETUP = PRELUDE + "strategy = kerasdist.RingStrategy(timeout=60)\n"

BEFORE = NOTING
BEFORE += """
rank, size = strategy.rank, strategy.size
x = np.arange(30, dtype="float32")[:, None]
"""


@pytest.fixture(scope="module")
def run():
    with Session(SETUP, 2, before=BEFORE) as session:
        yield session.run


@pytest.fixture(scope="module")
def run_three():
    with Session(SETUP, 3, before=BEFORE) as session:
        yield session.run


def test_an_unseeded_shuffle_is_the_same_on_all_workers(run):
    """Drawn after the strategy is made, from the chief's seed; another each epoch."""
    body = """
dataset = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(30).batch(8)
noting(1e-6).fit(dataset, epochs=2, verbose=0)
result(trained)
"""
    a, b = run(body)
    steps = [mine + other for mine, other in zip(a, b, strict=True)]
    epochs = [[row for step in part for row in step] for part in (steps[:4], steps[4:])]
    for epoch in epochs:
        assert sorted(epoch) == list(range(30))
    assert epochs[0] != epochs[1]


def test_datasets_that_begin_to_differ_later_are_an_error(run):
    """The first pass is the same on all workers, and then it is too late to choose."""
    body = """
order = [np.arange(30)]
def generate():
    for i in order[0]:
        yield x[i], x[i]
spec = tf.TensorSpec((1,))
dataset = tf.data.Dataset.from_generator(generate, output_signature=(spec, spec))
dataset = dataset.batch(8)
class Shuffle(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        order[0] = np.random.default_rng(rank).permutation(30)
try:
    noting(1e-6).fit(dataset, epochs=2, verbose=0, callbacks=[Shuffle()])
except ValueError as error:
    result([str(error), len(trained)])
"""
    for message, steps in run(body):
        assert "The workers read different global batches" in message
        assert "ranks [1] differ from rank 0" in message
        assert "data='chief'" in message
        assert steps <= 5


def test_own_datasets_of_unequal_length_never_hang(run_three):
    """Worker r has 2 + 3 r batches; all train until the longest has ended."""
    body = """
x = np.arange(40, dtype="float32")[:, None]
def make(context):
    assert context.num_input_pipelines == size
    assert context.input_pipeline_id == rank
    rows = x[10 * rank: 10 * rank + 2 * (2 + 3 * rank)]
    return untuned(tf.data.Dataset.from_tensor_slices((rows, rows)).batch(2))
m = noting(1e-6)
dataset = strategy.distribute_datasets_from_function(make)
history = m.fit(dataset, epochs=2, verbose=0)
result([[s for s in trained if len(s) > 1], history.history["loss"],
        int(m.optimizer.iterations.numpy()),
        m.evaluate(dataset, verbose=0), [w.tolist() for w in m.get_weights()]])
"""
    results = run_three(body)
    # The loss is the mean over all rows of all workers.
    for rank, (batches, losses, steps, evaluated, weights) in enumerate(results):
        own = [[10 * rank + 2 * i, 10 * rank + 2 * i + 1] for i in range(2 + 3 * rank)]
        assert batches[: len(own)] == own
        assert steps == 2 * 8
        assert (losses, evaluated, weights) == tuple(results[0][i] for i in (1, 3, 4))


@pytest.mark.soak
def test_a_replica_without_rows_computes_with_a_row_that_is_there(run):
    """A vocabulary refused the zeros and empty strings that it computed with before."""
    body = """
def model(words, dtype):
    with strategy.scope():
        inputs = keras.Input((1,), dtype=dtype)
        kind = keras.layers.StringLookup if dtype == "string" else (
            keras.layers.IntegerLookup)
        one_hot = kind(vocabulary=words, num_oov_indices=0, output_mode="one_hot")
        last = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        m = keras.Model(inputs, last(one_hot(inputs)))
        m.compile(keras.optimizers.SGD(0.5), "mse")
    return m

class Items(keras.utils.PyDataset):
    num_batches = 2
    def __getitem__(self, index):
        return np.array([[7 + index]]), np.zeros((1, 1), "float32")

numbers, words = model([7, 8], "int64"), model(["a", "b"], "string")
one, zero = np.array([[8]]), np.zeros((1, 1), "float32")
b = tf.constant([["b"]])
found = [
    words.predict(b, verbose=0),
    words.predict(tf.data.Dataset.from_tensors(b), verbose=0),
    words.predict_on_batch(b),
    [[words.evaluate(b, zero, verbose=0)]],
    [[words.train_on_batch(b, zero)]],
    words.predict(b, verbose=0),
    numbers.predict(one, verbose=0),
    [numbers.fit(Items(), verbose=0, shuffle=False).history["loss"]],
    numbers.predict(one, verbose=0),
]
# Whose data end first goes on with a row that it has seen.
strategy = kerasdist.RingStrategy(timeout=60, shard="off")
numbers = model([7, 8], "int64")
mine = np.full((1 + rank, 1), 7 + rank)
history = numbers.fit(mine, mine * 0.0, batch_size=1, verbose=0)
found.append([history.history["loss"]])
result(np.concatenate(found).ravel().tolist())
"""
    # SGD(0.5) of the square of a weight: the weight is 0 after one step.
    assert run(body) == [[1, 1, 1, 1, 1, 0, 1, 1, 0, 0.75]] * 2


def test_data_declared_as_each_workers_own(run):
    """Arrays and a plain generator, unequally long; the batch size is the worker's."""
    body = """
strategy = kerasdist.RingStrategy(timeout=60, shard="off")
mine = x[: 6 + 4 * rank] + 100 * rank
m = noting(1e-6)
history = m.fit(mine, mine, batch_size=4, epochs=1, shuffle=False, verbose=0)
def generate():
    for start in range(0, len(mine), 2):
        yield mine[start:start + 2], mine[start:start + 2]
m.fit(generate(), epochs=1, verbose=0)
predicted = m.predict(mine, verbose=0)
tested = m.test_on_batch(mine, mine)
result([[s for s in trained if len(s) > 1], history.history["loss"], predicted.shape[0],
        tested, [w.tolist() for w in m.get_weights()]])
"""
    a, b = run(body)
    assert a[0][:5] == [[0, 1, 2, 3], [4, 5], [0, 1], [2, 3], [4, 5]]
    assert b[0][:3] == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109]]
    assert (a[2], b[2]) == (6, 10)
    assert (a[1], a[3], a[4]) == (b[1], b[3], b[4])


def test_a_step_is_made_for_its_rows_where_all_parts_have_as_many(run):
    """Three of five rows, or two; with an unequal last batch any number."""
    body = """
class Shapes(Noting):
    def train_step(self, data):
        shapes.append(data[0].shape[0])
        return super().train_step(data)

shapes = []
with strategy.scope():
    m = Shapes()
    m.build((None, 1))
    m.compile(keras.optimizers.SGD(1e-6), "mse")
m.fit(x, x, batch_size=5, epochs=1, verbose=0)
equal = set(shapes)
shapes.clear()
with strategy.scope():
    m.compile(keras.optimizers.SGD(1e-6), "mse")
m.fit(x, x, batch_size=7, epochs=1, verbose=0)
result([list(equal), list(set(shapes))])
"""
    assert run(body) == [[[3], [None]], [[2], [None]]]


@pytest.mark.parametrize("data", ["{'x': dataset}", soak("arrays")])
def test_parts_for_gpus_take_another_way_with_the_same_numbers(data):
    # TensorFlow's iterator, which fetches to devices, does the same on CPU devices.
    script = """
logical_devices(2)
import functools
from kerasdist.strategies.sync.data import SharingExtended

strategy = kerasdist.RingStrategy(devices=["CPU:0", "CPU:1"])
x = np.random.default_rng(0).normal(size=(25, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
dataset = untuned(tf.data.Dataset.from_tensor_slices((x, y)).batch(8))

arrays = {"x": x, "y": y, "batch_size": 8}

def numbers(data, steps):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        m = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
        m.compile("sgd", "mse", steps_per_execution=steps)
    history = m.fit(**data, epochs=2, verbose=0).history["loss"]
    weights = [w.tolist() for w in m.get_weights()]
    return [history, weights, m.predict(x, verbose=0).tolist()]

for _ in range(2):
    kind = type(strategy.extended.distribute_parts(tf.data.Dataset.range(2)))
    result([kind.__name__, numbers(%s, steps=3)])
    SharingExtended.distribute_parts = functools.partialmethod(
        SharingExtended.distribute_parts, complete=False)
with kerasdist.RingStrategy(devices=["CPU:0", "CPU:1"], shard="off").scope():
    m = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
    m.compile("sgd", "mse")
result(float(m.train_on_batch(x, y)) < 1e-6)
"""
    (host, *ours), (gpus, *theirs), own = (
        Workers(PRELUDE + script % data, 1).run()[0].results
    )
    assert (host, gpus) == ("PartsDataset", "DistributedDatasetsFromFunction")
    assert (ours, own) == (theirs, True)


def test_the_order_after_a_seed_is_that_of_a_model_that_is_built():
    x = np.arange(12.0)[:, None]
    losses = []
    with kerasdist.RingStrategy() as strategy, strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.001), "mse")
        for _ in range(2):
            keras.utils.set_random_seed(7)
            if model.built:
                model.set_weights([np.ones((1, 1)), np.zeros(1)])
            model.fit(x, x**2, batch_size=5, verbose=0)
            losses.append(model.get_weights()[0].item())
    assert losses[0] == losses[1]
