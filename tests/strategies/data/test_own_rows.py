import numpy as np
import pytest
import tensorflow as tf
from scripts import with_prelude

from kerasdist._tf.row_pipelines import row_pipeline
from kerasdist.strategies.data.batch_split import slice_dataset
from kerasdist.strategies.data.choice import SameBatches
from kerasdist.strategies.data.own_rows import OwnRows
from kerasdist.strategies.reduce.workers import WHOLE, ReplicaLayout
from workers import Workers

AUTO = tf.data.AUTOTUNE


def source(rows=23):
    return tf.data.Dataset.from_tensor_slices((np.arange(rows), np.ones(rows)))


def decode(x, y):
    return tf.cast(x, tf.float32) * tf.ones(3), y + 1


def ragged(x, y):
    length = tf.cast(x[0], tf.int32)
    return {"rows": tf.RaggedTensor.from_tensor([tf.range(length)]), "y": y}


# First replica of the worker, its replicas, all replicas; places between their rows.
PIPELINES = [
    (lambda: source().map(decode).batch(8), (2, 1, 4)),
    (lambda: source(9).map(decode).batch(8), (3, 1, 4)),
    (lambda: source().map(decode, AUTO).batch(8, True).prefetch(2), (1, 1, 3)),
    (
        lambda: source(10).map(decode).batch(8, num_parallel_calls=2).repeat(2),
        (1, 2, 4),
    ),
    (lambda: source(10).map(decode).skip(1).repeat(2).batch(3, True), (2, 2, 4)),
    (lambda: source().shuffle(23, seed=4).map(decode).map(ragged).batch(8), (1, 1, 2)),
    # Shares of different sizes, some of which have no row of the last batch.
    (lambda: source().map(decode).batch(8), (1, 1, 2, (0, WHOLE // 3, WHOLE))),
    (lambda: source(9).map(decode).batch(8), (0, 2, 3, (0, 99, WHOLE // 3, WHOLE))),
]


@pytest.mark.parametrize("number", range(len(PIPELINES)))
def test_parts_are_those_of_whole_batches(number):
    make, layout = PIPELINES[number][0], ReplicaLayout(*PIPELINES[number][1])
    same = SameBatches(None)
    pipeline = row_pipeline(make())
    assert not isinstance(pipeline, str), pipeline
    whole = list(slice_dataset(make(), layout, wrap=same.wrap))
    own = OwnRows(pipeline, layout, same)
    own = list(own.divide(pipeline.windows))
    assert len(own) == len(whole) > 0
    for ours, theirs in zip(own, whole, strict=True):
        tf.nest.assert_same_structure(ours, theirs)
        flat = (tf.nest.flatten(e, expand_composites=True) for e in (ours, theirs))
        for one, other in zip(*flat, strict=True):
            np.testing.assert_array_equal(one, other)


def test_only_own_rows_are_made():
    """A row that can't be made stops only the worker that it belongs to."""

    def fails(x, y):
        with tf.control_dependencies([tf.debugging.Assert(x != 17, [x])]):
            return tf.identity(x), y

    pipeline = row_pipeline(source(24).map(fails).batch(8))
    same = SameBatches(None)

    def parts(rank):
        own = OwnRows(pipeline, ReplicaLayout(rank, 1, 4), same)
        return list(own.divide(pipeline.windows))

    assert [len(parts(rank)) for rank in (1, 2, 3)] == [3, 3, 3]
    with pytest.raises(tf.errors.InvalidArgumentError, match="17"):
        parts(0)


def calls_python(x, y):
    return tf.numpy_function(lambda x: x, [x], tf.int64), y


def draws(x, y):
    return tf.cast(x, tf.float32) + tf.random.uniform([]), y


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: source().batch(4), "no `map` stands between `tensorslice` and"),
        (lambda: source().batch(4).map(decode), "needs whole batches"),
        (lambda: source().map(calls_python).batch(4), "calls Python"),
        (lambda: source().map(draws).batch(4), "RandomUniform"),
        (lambda: source().map(decode).shuffle(4).batch(4), "`shuffle` and `batch`"),
        (lambda: source().map(decode).cache().batch(4), "`cache` and `batch`"),
        (lambda: source().map(decode).padded_batch(4), "`paddedbatch` stands"),
        (lambda: source().map(decode).batch(4).unbatch(), "`unbatch` stands"),
        (lambda: source().map(decode, AUTO, deterministic=False).batch(4), "the order"),
    ],
)
def test_why_rows_cannot_be_made_alone(make, why):
    assert why in row_pipeline(make())


MODEL = with_prelude("""
tf.random.set_seed(3)
X = np.random.default_rng(5).normal(size=(46, 8)).astype("float32")

def trial(dataset, scope, epochs=1, **more):
    with scope():
        m = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        m.compile(keras.optimizers.SGD(0.02), "mse", weighted_metrics=["mae"])
        m.set_weights([np.full((8, 1), 0.1), np.zeros(1)])
    h = m.fit(untuned(dataset), epochs=epochs, verbose=0, **more)
    flat = [w.ravel() for w in m.get_weights()]
    flat += [np.ravel(v) for v in h.history.values()]
    result([float(v) for v in np.concatenate(flat)])

def weigh(x):
    return x * 2, tf.reduce_sum(x), tf.abs(x[0])

rows = tf.data.Dataset.from_tensor_slices
def trials(scope, rank):
    data = rows(X).shuffle(46).map(weigh, tf.data.AUTOTUNE).batch(9)
    trial(data, scope, epochs=2)
    # The order differs between the ranks: rank 0's.
    order = np.random.default_rng(rank).permutation(46)
    trial(rows(X[order]).map(weigh).batch(9).prefetch(2), scope)
""")


def test_fit_has_the_numbers_of_one_process():
    plain_body = MODEL + "\ntrials(contextlib.nullcontext, 0)"
    body = MODEL
    body += """
s = kerasdist.RingStrategy(timeout=60)
trials(s.scope, s.rank)
def slow(x, y):
    time.sleep(0.002)
    return x, y
def slowly(x):
    return tf.numpy_function(slow, [x, tf.reduce_sum(x)], [tf.float32] * 2)
def shaped(x, y):
    return tf.ensure_shape(x, [8]), tf.ensure_shape(y, [])
told = rows(X).map(slowly).map(shaped).cache().batch(9)
trial(told, s.scope)
trial(told, s.scope)
"""
    with (
        Workers(plain_body, 1, env={"TF_CONFIG": None}, handover=False) as plain,
        Workers(body, 2, deadline=120) as job,
    ):
        workers = job.succeed()
        (expected,) = plain.succeed()
    for worker in workers:
        for one, other in zip(worker.results, expected.results, strict=False):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    said = [worker.output.count("makes all rows of each") for worker in workers]
    assert said == [1, 0]
