"""Which rows of an embedding an optimizer moves: asked of Keras's optimizers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scripts import with_prelude

import kerasdist
from kerasdist._keras.context import setting
from kerasdist._keras.training.weight_updates import (
    embedding_tables,
    moves_all_rows,
    touched_rows,
)
from workers import Workers

o = keras.optimizers
FOLLOWING = {
    "sgd": lambda: o.SGD(0.1),
    "sgd_global_clipnorm": lambda: o.SGD(0.1, global_clipnorm=0.01),
    "sgd_average": lambda: o.SGD(0.1, use_ema=True),
    "adagrad": lambda: o.Adagrad(0.1),
    "rmsprop_centered": lambda: o.RMSprop(0.1, centered=True),
    "adafactor": lambda: o.Adafactor(0.1),
}
OTHERS = {
    "momentum": lambda: o.SGD(0.1, momentum=0.9),
    "adam": lambda: o.Adam(0.1),
    "ftrl": lambda: o.Ftrl(0.1),
    "accumulation": lambda: o.SGD(0.1, gradient_accumulation_steps=2),
    "overwritten": lambda: o.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "decay": lambda: o.AdamW(0.1),
}


def gradient(indices):
    rng = np.random.default_rng(len(indices))
    values = rng.normal(size=(len(indices), 3)).astype("float32")
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), [9, 3])


@pytest.mark.parametrize("name", FOLLOWING)
def test_rows_without_a_gradient_stay_as_they_are(name):
    optimizer = FOLLOWING[name]()
    first = np.random.default_rng(0).normal(size=(9, 3)).astype("float32")
    variable = keras.Variable(first)
    for indices in ([5, 2, 5], [1, 2], [8]):
        before = np.array(variable)
        slices = gradient(indices)
        found = touched_rows(optimizer, [slices], [variable])[0]
        optimizer.apply([slices], [variable])
        moved = np.flatnonzero((np.array(variable) != before).any(axis=1))
        assert found is not None
        assert set(moved) == set(found.numpy()) == set(indices)


def test_others_are_not_known():
    """Optimizers, a constraint, a class of the script's own, and dense gradients."""
    variable, constrained = (keras.Variable(np.ones((9, 3), "float32")) for _ in "ab")
    constrained.constraint = keras.constraints.UnitNorm(axis=1)
    slices, sgd = [gradient([1])], o.SGD(0.1)
    for optimizer in [make() for make in OTHERS.values()]:
        assert touched_rows(optimizer, slices, [variable]) == [None], optimizer.name
    assert touched_rows(type("Mine", (o.SGD,), {})(), slices, [variable]) == [None]
    assert touched_rows(sgd, slices, [constrained]) == [None]
    dense = [tf.ones((9, 3)), None]
    assert touched_rows(sgd, dense, [variable, variable]) == [None, None]


def test_weight_decay_moves_all_rows():
    variable = keras.Variable(np.ones((9, 3), "float32"))
    excluding = o.AdamW(0.1)
    excluding.exclude_from_weight_decay([variable])
    assert moves_all_rows(o.AdamW(0.1), variable)
    assert moves_all_rows(o.LossScaleOptimizer(o.AdamW(0.1)), variable)
    assert not moves_all_rows(excluding, variable)
    assert not moves_all_rows(o.Adam(0.1), variable)
    assert not moves_all_rows(None, variable)


def test_tables_are_those_of_embedding_layers():
    # With a name: others depend on what was made before in this process.
    table = keras.layers.Embedding(9, 3, name="table")
    inside = keras.Sequential([keras.Input((2,)), table])
    model = keras.Sequential(
        [inside, keras.layers.Flatten(), keras.layers.Dense(2, name="dense")]
    )
    model.build((None, 2))
    found = embedding_tables(model)
    tables = [v.path for v in model.trainable_weights if id(v) in found]
    assert [path.split("/")[-2:] for path in tables] == [["table", "embeddings"]]


@pytest.mark.soak
def test_rows_are_updated_in_the_same_order_on_all_workers_compiled_or_not():
    """TensorFlow's own updates give other last bits in most epochs of this job."""
    script = with_prelude("""
from kerasdist._keras.training import weight_updates
traced, original = [], weight_updates.update_compiled
weight_updates.update_compiled = lambda *x: (traced.append(1), original(*x))[1]
strategy = kerasdist.RingStrategy(timeout=60)
rng = np.random.default_rng(0)
x, y = rng.integers(0, 20_000, (2000, 20)), rng.integers(0, 10, 2000)
for kind in (keras.optimizers.SGD, keras.optimizers.Adagrad):
    found = []
    for weight_updates.LEAST_SLICES in (2048, 1 << 30):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            m = keras.Sequential([
                keras.Input((20,), dtype="int32"), keras.layers.Embedding(20_000, 64),
                keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(10)])
            m.compile(kind(0.1), keras.losses.SparseCategoricalCrossentropy(True))
        m.fit(x, y, batch_size=500, epochs=2, verbose=0)
        found.append(m.get_weights()[0])
    result([np.array_equal(*found), len(traced)])
""")
    chief, _ = Workers(script, 2, env={"TF_NUM_INTRAOP_THREADS": "4"}).run()
    assert "differed between" not in chief.output
    assert chief.results == [[True, 2], [True, 4]]  # Adagrad updates two tables


def test_a_slice_outside_of_a_large_table_is_an_error():
    strategy = kerasdist.RingStrategy(["CPU:0"])
    optimizer, table = o.SGD(0.1), keras.Variable(np.zeros((300_000, 1), "float32"))

    @tf.function
    def step(indices):
        with strategy.scope(), setting(reduced=True):
            slices = tf.IndexedSlices(tf.ones([5000, 1]), indices, [300_000, 1])
            optimizer.assign_sub(table.value, slices)

    step(np.arange(5000))
    assert np.array_equal(np.ravel(table) != 0, np.arange(300_000) < 5000)
    with pytest.raises(tf.errors.InvalidArgumentError, match="300000"):
        step(np.full(5000, 300_000))
    strategy.close()
