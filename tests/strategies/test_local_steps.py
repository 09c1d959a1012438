import keras
import numpy as np
import pytest
from scripts import with_prelude
from soak import soak, soaking

import kerasdist
from workers import Workers

pytestmark = pytest.mark.timeout(400)

SCRIPT = with_prelude("""
import tempfile
from kerasdist.collectives.checked import CheckedCommunicator

sent = 0
original = CheckedCommunicator.all_reduce
def counted(self, given, *args, **more):
    global sent
    sent += sum(np.asarray(array).nbytes for array in given)
    return original(self, given, *args, **more)
CheckedCommunicator.all_reduce = counted

rng = np.random.default_rng(0)
x = rng.normal(size=(249, 8)).astype("float32")
y = (x.sum(1) > 0).astype("float32")

def model(statistics=False):
    keras.utils.set_random_seed(3)
    norms = [keras.layers.BatchNormalization(synchronized=on) for on in (False, True)]
    middle = [*norms, keras.layers.Dropout(0.2)]
    return keras.Sequential([
        keras.Input((8,)), keras.layers.Dense(64, activation="relu"),
        *(middle if statistics else []),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(1, activation="sigmoid"),
    ])

def train(local_steps, optimizer=None, statistics=False, **compile):
    global sent
    strategy = kerasdist.RingStrategy(timeout=60, local_steps=local_steps)
    with strategy.scope():
        m = model(statistics)
        m.compile(
            (optimizer or (lambda: keras.optimizers.SGD(0.1)))(),
            "binary_crossentropy", metrics=["accuracy"], **compile,
        )
    m.fit(x, y, batch_size=64, epochs=1, verbose=0)
    sent, folder = 0, tempfile.mkdtemp()
    history = m.fit(
        x, y, batch_size=64, epochs=2, verbose=0, validation_data=(x, y),
        callbacks=[keras.callbacks.ModelCheckpoint(folder + "/{epoch}.weights.h5",
                                                   save_weights_only=True)],
    )
    return {
        "history": history.history,
        "weights": [np.asarray(w, "float64").tolist() for w in m.get_weights()],
        "evaluate": m.evaluate(x, y, verbose=0),
        "sent": sent,
        "files": sorted(os.listdir(folder)),
        "size": sum(w.nbytes for w in m.get_weights()),
    }

adam = lambda: keras.optimizers.LossScaleOptimizer(
    keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
)
one = kerasdist.LocalSteps(1, outer=keras.optimizers.SGD(1.0))
results = {
    "sync": train(None),
    "1": train(one),
    "4": train(4),
}
if "MORE" in os.environ:
    nesterov = kerasdist.LocalSteps(2, outer="nesterov")
    results["adam"] = train(nesterov, adam, statistics=True)
    results["several"] = train(4, steps_per_execution=2, jit_compile=True)

# (w - c)^2 / 2 with another c on each rank, in float64.
keras.config.set_floatx("float64")
strategy = kerasdist.RingStrategy(timeout=60, local_steps=3, shard="off")
rank = strategy.rank
with strategy.scope():
    given = keras.Input((1,), dtype="float64")
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    m = keras.Model(given, layer(given))
    m.compile(keras.optimizers.SGD(0.125), "mse")  # the same in float32
targets = np.full((9, 1), [2.0, -5.0][rank])
seen = []
class Weights(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        seen.append(float(m.get_weights()[0][0, 0]))
m.fit(np.ones((9, 1)), targets, batch_size=1, shuffle=False, verbose=0,
      callbacks=[Weights()])
results["quadratic"] = seen

# `train_on_batch`; weights differ until an evaluation.
keras.config.set_floatx("float32")
strategy = kerasdist.RingStrategy(timeout=60, local_steps=5)
with strategy.scope():
    m = model()
    m.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
for step in range(7):
    m.train_on_batch(x[:32], y[:32])
before = float(np.float64(m.get_weights()[0]).sum())
m.evaluate(x, y, verbose=0)
results["by batch"] = [before, float(np.float64(m.get_weights()[0]).sum())]

m.fit(x[:64], y[:64], verbose=2)
with strategy.scope():
    m.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=2)
results["refused"] = refused(lambda: m.fit(x, y, batch_size=64, verbose=0))
result(results)
""")


@pytest.fixture(scope="module")
def jobs(request):
    env = {"MORE": "1"} if soaking(request.config) else {}
    ended = Workers(SCRIPT, 2, deadline=200, env=env).run()
    return [finished.result | {"lines": finished.output} for finished in ended]


@pytest.fixture
def results(jobs):
    return jobs[0]


def near(one, other, atol):
    for mine, theirs in zip(one["weights"], other["weights"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=atol)


def test_all_ranks_end_with_the_same(jobs):
    first, second = jobs
    for name, mine in first.items():
        if isinstance(mine, dict):
            for key in ("weights", "history", "evaluate"):
                assert mine[key] == second[name][key], (name, key)


def test_one_local_step_of_sgd_is_a_step_of_all(results):
    """Also with a last batch whose rows don't divide: 249 rows in batches of 64."""
    near(results["1"], results["sync"], 1e-5)
    np.testing.assert_allclose(
        results["1"]["history"]["loss"], results["sync"]["history"]["loss"], atol=1e-5
    )


def test_bytes_are_divided_by_the_number_of_steps(results):
    # Four steps an epoch, two epochs: and what is sent once for an epoch.
    size = results["1"]["size"]
    sent = {name: results[name]["sent"] for name in ("sync", "1", "4")}
    assert sent["1"] - sent["4"] == pytest.approx(6 * size, rel=0.05)
    assert sent["4"] < 0.5 * sent["sync"]


@pytest.mark.parametrize("name", ["4", soak("adam"), soak("several")])
def test_training_evaluating_and_saving_mean_what_they_mean(results, name):
    found = results[name]
    history = found["history"]
    assert history["loss"][-1] < history["loss"][0]
    assert history["val_loss"][-1] == pytest.approx(found["evaluate"][0], abs=1e-5)
    assert found["files"] == ["1.weights.h5", "2.weights.h5"]


@pytest.mark.soak
def test_compiled_steps_several_in_a_call_are_the_same(results):
    near(results["several"], results["4"], 1e-4)


def test_a_quadratic_follows_its_closed_form(jobs):
    """d/dw of the loss (w - c)^2 is 2 (w - c): a step shrinks w - c by 0.75."""
    start, shrink = 1.0, 0.75
    for number in range(9):
        ends = [c + (start - c) * shrink ** (number % 3 + 1) for c in (2.0, -5.0)]
        if number % 3 == 2:
            start = ends[0] = ends[1] = sum(ends) / 2
        for rank, end in enumerate(ends):
            assert jobs[rank]["quadratic"][number] == pytest.approx(end, abs=1e-12)


def test_on_batch_methods(jobs):
    (before, after), (other, same) = (job["by batch"] for job in jobs)
    assert before != other
    assert after == same


def test_what_is_said(results):
    assert "weights averaged every 5 steps" in results["lines"]
    assert "local_steps=5 with steps_per_execution=2" in results["refused"]


def test_one_worker_is_plain_training():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    found = []
    outer = kerasdist.LocalSteps(3, outer=keras.optimizers.SGD(1.0))
    for local_steps in (None, 3, outer):
        keras.utils.set_random_seed(1)
        with kerasdist.RingStrategy(local_steps=local_steps).scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
            model.compile(keras.optimizers.Adam(), "mse")
        model.fit(x, x[:, :3], batch_size=8, verbose=0)
        found.append(model.get_weights()[0])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"local_steps": 0}, "steps=0"),
        ({"local_steps": "many"}, "local_steps='many'"),
        ({"local_steps": 2, "elastic": True}, "elastic=True"),
        ({"local_steps": 2, "compression": "bf16"}, "compression='bf16'"),
        ({"local_steps": 2, "placement": {"a": "CPU:0"}}, "a placement"),
    ],
)
def test_wrong_options(options, said):
    with pytest.raises(ValueError, match=f"Received: .*{said}"):
        kerasdist.RingStrategy(**options)
    with pytest.raises(ValueError, match="Received: outer="):
        kerasdist.LocalSteps(2, outer=keras.optimizers.Adam())
