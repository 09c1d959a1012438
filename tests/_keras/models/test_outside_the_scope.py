import keras
import numpy as np
import pytest
from scripts import with_prelude
from soak import soaking

import kerasdist
from workers import Workers

SCRIPT = with_prelude("""
import warnings

logical_devices(2)
x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
strategy = kerasdist.RingStrategy(devices=["CPU:0"], timeout=60)
rank = strategy.rank
keras.utils.set_random_seed(1 + rank)

def build():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

def digest(model):
    weights = b"".join(w.tobytes() for w in model.get_weights())
    return hashlib.sha256(weights).hexdigest()

def said(do):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        do()
    return [str(w.message) for w in caught if "scope" in str(w.message)]

# With its autotuner the end of TensorFlow's iterator of devices may wait or crash.
options = tf.data.Options()
options.autotune.enabled = False
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(options)

def train(model):
    return lambda: model.fit(x, y, batch_size=8, verbose=0)
""")


USED = """
model = build()
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
before = digest(model)
with strategy.scope():
    found = said(train(model))
result([before, digest(model), found])
"""
CLEARED = """
found = []
with strategy.scope():
    for _ in range(2):
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        model = build()
        model.compile("sgd", "mse")
        fit = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        found.append(fit.history["loss"])
        assert model.distribute_strategy is strategy
assert not tf.distribute.has_strategy()
result(found)
"""
LOOP = """
def loop(strategy, inside):
    keras.utils.set_random_seed(1 + rank)
    make = {name: strategy.scope() if name in inside else tf.init_scope()
            for name in ("model", "optimizer", "metric")}
    with make["model"]:
        model = build()
    with make["optimizer"]:
        optimizer = keras.optimizers.Adam(0.01)
    with make["metric"]:
        metric = keras.metrics.Mean()
    metric.update_state([8.0, 9.0])  # of which a replica mustn't make a copy
    def step(a, b):
        with tf.GradientTape() as tape:
            each = (model(a) - b) ** 2
            loss = tf.reduce_sum(each) / 8
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        metric.update_state(each)
        return loss
    @tf.function
    def train(a, b):
        return strategy.reduce("SUM", strategy.run(step, args=(a, b)), axis=None)
    losses = [float(train(a, b))
              for a, b in strategy.experimental_distribute_dataset(dataset)]
    return [losses, digest(model), float(metric.result())]

few = loop(strategy, [])
"""
TOLD = """
made = build()
made.compile("sgd", "mse", run_eagerly=True)
with strategy.scope():
    model = build()
    model.compile("sgd", "mse", run_eagerly=True)
cloned = keras.models.clone_model(model)
cloned.compile("sgd", "mse", run_eagerly=True)
found = {
    "made": said(train(made)),
    "again": said(train(made)),
    "on batch": said(lambda: cloned.train_on_batch(x, y)),
    "inside": said(train(model)),
}
with tf.distribute.OneDeviceStrategy("CPU:0").scope():
    other = build()
    other.compile("sgd", "mse", run_eagerly=True)
found["of another strategy"] = said(lambda: other.fit(dataset, verbose=0))
meant = build()
meant.compile("sgd", "mse", run_eagerly=True)
with kerasdist.local_training():
    found["meant"] = said(train(meant))
    contradiction = refused(train(model))
folder = os.environ["FOLDER"]
made.save(f"{folder}/made-{rank}.keras")
meant.save(f"{folder}/meant-{rank}.keras")
with strategy.scope():
    into = refused(lambda: made.predict(x, verbose=0))
result([found, contradiction, into])
"""
DEVICES = """
strategy.close()
two = kerasdist.RingStrategy(devices=["CPU:0", "CPU:1"], timeout=60)
with two.scope():
    variable = keras.Variable(1.0)
    optimizer = keras.optimizers.SGD(0.1)
tape = refused(lambda: optimizer.apply([tf.constant(1.0)], [variable]))
result([few, loop(two, ["model", "metric"]),
        refused(lambda: loop(two, ["metric"])), tape])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def found(folder, request):
    """Of each part of the script what both workers have found."""
    loops = soaking(request.config)
    script = SCRIPT + USED + CLEARED + (LOOP + TOLD + DEVICES if loops else TOLD)
    finished = Workers(script, 2, env={"FOLDER": str(folder)}, deadline=150).run()
    results = zip(*(worker.results for worker in finished), strict=True)
    names = ("used", "cleared", "told", *(["loops"] if loops else []))
    return dict(zip(names, results, strict=True))


def test_a_model_made_outside_is_told_of_once_by_the_chief(found, folder):
    """Two workers trained two models, the chief's was saved, and nothing told."""
    chief, other = found["told"]
    said, contradiction, into = chief
    (text,) = said.pop("made")
    assert "created, cloned or loaded outside of `with strategy.scope():`" in text
    assert "beside a strategy of 2 workers" in text
    assert "with kerasdist.local_training():" in text
    assert len(said.pop("on batch")) == 1
    assert not any(said.values()), said
    assert not any(other[0].values()), other
    assert "inside of `with kerasdist.local_training():`" in contradiction
    assert "Each worker has trained this model for itself" in into
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"{m}-{rank}.keras" for m in ("made", "meant") for rank in (0, 1)]


def test_one_worker_has_nothing_to_say():
    strategy = kerasdist.RingStrategy()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ones = np.ones((8, 4), "float32")
    model.fit(ones, ones[:, :1], verbose=0)  # a warning is an error here
    strategy.close()


def test_a_model_made_outside_and_used_inside_is_the_strategys(found):
    (before, after, said), (other_before, *other) = found["used"]
    assert before != other_before  # each worker has its own seed
    assert other == [after, said]
    assert (before != after, said) == (True, [])


@pytest.mark.soak
def test_a_loop_of_ones_own_adopts_what_was_made_outside(found):
    """The optimizer was TensorFlow's error, a metric silently this worker's own."""
    first, second = found["loops"]
    assert first == second
    known, devices, refused, tape = first
    assert devices[0] == pytest.approx(known[0], rel=1e-5)
    assert "created outside of the strategy's scope" in refused
    assert "sequential" in refused
    # 24 squares of the loop, and the two numbers from before it: once.
    assert known[2] == pytest.approx((17 + 8 * sum(known[0])) / 26, rel=1e-5)
    # Of several replicas' variables a tape would see one.
    assert "2 replicas in this worker" in tape


def test_clearing_the_session_does_not_end_the_scope(found):
    """The scope was with the graph that was cleared: models were made outside of it,
    each worker trained its own, and the end of the scope was an IndexError."""
    chief, other = found["cleared"]
    assert chief == other
    first, second = chief
    assert first == second
