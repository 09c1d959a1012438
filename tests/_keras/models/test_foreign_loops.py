"""What scripts written for TensorFlow's own strategies ask of ours."""

import pytest
from scripts import with_prelude

from kerasdist.cluster import Cluster, resolve
from kerasdist.strategies.cluster_resolver import resolver_of
from workers import Workers


def test_the_resolver_has_the_tasks_of_tf_config():
    jobs = {"chief": ["h:1"], "worker": ["h:2"], "ps": ["h:3"]}
    place = resolve({"cluster": jobs, "task": {"type": "worker", "index": 0}})
    resolver = resolver_of(place, place.rank, place.size)
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert (resolver.cluster_spec().as_dict(), resolver.master()) == (jobs, "")
    # What it says is what a strategy can be given.
    again = resolve(resolver)
    assert (again.rank, again.workers) == (place.rank, place.workers)
    # A process of `mpirun` has no addresses.
    assert resolver_of(Cluster(rank=0, size=1), 2, 4).task_id == 2


START = with_prelude("""
from kerasdist import errors

strategy = STRATEGY
resolver = strategy.cluster_resolver
known = [resolver.task_type, resolver.task_id,
         len(resolver.cluster_spec().as_dict()["worker"])]
x = np.ones((64, 8), "float32")
y = np.ones((64, 1), "float32")
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)

def loop(jit=False, seed=1):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        # More weights than TensorFlow keeps as constants of a graph.
        model = keras.Sequential([keras.layers.Dense(40), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.001)
    def step(a, b):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(a) - b) ** 2) / 16
            if loss < 0.0:  # which TensorFlow refuses if it isn't converted
                loss = -loss
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss
    @tf.function(jit_compile=jit)
    def train(a, b):
        return strategy.run(step, args=(a, b))
    for a, b in strategy.experimental_distribute_dataset(data):
        train(a, b)
    return [float(w.sum()) for w in model.get_weights()]
""")


PLAIN_LOOP = """
x = np.random.default_rng(0).normal(size=(20, 5)).astype("float32")
y = x.sum(1, keepdims=True)

def weights(kind, optimizer, model_scope, loop_scope, rows=slice(None)):
    keras.utils.set_random_seed(1)
    with model_scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    with loop_scope():
        optimizer, metric = optimizer(), keras.metrics.Mean()
        optimizer.build(model.trainable_variables)

        def step(a, b):
            with tf.GradientTape() as tape:
                loss = keras.losses.MeanSquaredError()(b, model(a, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            metric.update_state(loss)

        if kind == "function":
            step = tf.function(step)
        batches = tf.data.Dataset.from_tensor_slices((x[rows], y[rows])).batch(8)
        for a, b in batches:
            step(a, b)
    return [*(np.asarray(w) for w in model.get_weights()), np.float32(metric.result())]

def plain_loop():
    plain, scope = contextlib.nullcontext, strategy.scope
    adam = lambda: keras.optimizers.Adam(0.01, clipnorm=1.0)
    expected = weights("eager", adam, plain, plain)
    for kind, where in (("eager", scope), ("function", plain)):
        for one, other in zip(weights(kind, adam, scope, where), expected):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    # Batches that differ are parts of one.
    mine = slice(8 * strategy.rank, 8 * strategy.rank + 8)
    sgd = lambda: keras.optimizers.SGD(0.01)
    *own, _ = weights("eager", sgd, scope, plain, mine)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(sgd(), "mse")
    with kerasdist.local_training():
        model.train_on_batch(x[:16], y[:16])
    for one, other in zip(own, model.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    return hashlib.sha256(b"".join(w.tobytes() for w in own)).hexdigest()
"""
AUTOGRAPH = """
from tensorflow.python.autograph.impl import api

def autograph():
    converted, convert = [], api._convert_actual

    def note(entity, context):
        converted.append(entity.__qualname__.rpartition(".")[2])
        return convert(entity, context)

    def halved(a, b):
        return a / 2, b

    api._convert_actual = note
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    # Its own rows only, and whole batches.
    model.fit(data.unbatch().map(halved).batch(16), verbose=0)
    model.fit(data.map(halved), verbose=0)
    loop()
    return sorted(set(converted))
"""
RING = """
def build():
    with strategy.scope():
        keras.Sequential([keras.Input((8,)), keras.layers.Dense(3 + strategy.rank)])

result([known, error_of(lambda: loop(jit=True)), plain_loop(), autograph(),
        error_of(build)])
"""


@pytest.mark.soak
def test_a_ring():
    script = START.replace("STRATEGY", "kerasdist.RingStrategy(timeout=60)")
    script += PLAIN_LOOP + AUTOGRAPH + RING
    first, second = Workers(script, 2, deadline=120).run()
    assert first.result[2] == second.result[2]
    assert first.output.count("updates outside of `strategy.run`") == 1
    assert "updates outside" not in second.output
    for rank, worker in enumerate((first, second)):
        known, jit, _, converted, sizes = worker.result
        # Of the script's functions all, and none of ours.
        assert converted == ["halved", "step", "train"]
        assert known == ["worker", rank, 2]
        assert jit[0] == "ValueError"
        assert "inside of `tf.function(jit_compile=True)`" in jit[1]
        # An unseeded tuner proposes other sizes on each rank, and none was named.
        assert sizes[0] == "CollectiveMismatch"
        assert f"the variable 'kernel' of shape (8, {3 + rank})" in sizes[1]
        assert "the same seed on all ranks" in sizes[1]


@pytest.mark.soak
def test_asynchronous_workers():
    """A loop's model that its first call builds had no values to make a table of.

    `fit` didn't know the datasets that the strategy had distributed.
    """
    body = """
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
given = strategy.experimental_distribute_dataset(data)
history = model.fit(given, epochs=3, verbose=0).history["loss"]
evaluated = model.evaluate(given, verbose=0)
weights = loop()
# Without `strategy.run` each worker would take the same step.
with strategy.scope():
    variable = keras.Variable(1.0)
    optimizer = keras.optimizers.SGD(0.1)
plain = error_of(lambda: optimizer.apply([tf.constant(1.0)], [variable]))
strategy.close()
result([known, history, evaluated, weights, plain])
"""
    made = "kerasdist.ParameterServerStrategy('async', timeout=60)"
    found = Workers(START.replace("STRATEGY", made) + body, 2, servers=1).results()
    for rank, (known, history, evaluated, weights, plain) in enumerate(found):
        assert known == ["worker", rank, 2]
        assert len(history) == 3
        assert evaluated < history[0]
        assert weights == found[0][3]
        assert plain[0] == "RuntimeError"
        assert "inside of `strategy.run`" in plain[1]
