"""`keras.distribution` on several workers has the numbers of one process.

The scripts use Keras alone, but for one line. The first worker computes the
numbers without a distribution before, hence alone.
"""

import importlib.util

import pytest
from scripts import PRELUDE, RUN_TESTS, with_prelude

from workers import Workers

_MODEL = with_prelude("""
from keras.distribution import set_distribution  # before the line below
kerasdist.enable_keras_distribution()
keras.utils.set_random_seed(3)  # on all, not on the first one alone
D = keras.distribution
rng = np.random.default_rng(0)
x = rng.normal(size=(22, 4)).astype("float32")
y = rng.normal(size=(22, 2)).astype("float32")


def model():
    keras.utils.set_random_seed(3)
    found = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="relu", name="d1"),
            keras.layers.Dense(2, name="d2"),
        ]
    )
    found.compile("adam", "mse", metrics=["mae"])
    return found


def fit(*data, **options):
    made = model()
    history = made.fit(*data, epochs=2, verbose=0, **options).history
    return made, sum(history.values(), [])
""")

_FIT = _MODEL
_FIT += """
folder = Path(sys.argv[1])
is_first = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0


class Items(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return x[8 * index :][:8], y[8 * index :][:8]


def numbers(name):
    best = folder / f"{name}-best.keras"
    made, values = fit(
        *(x, y),
        batch_size=8,
        shuffle=False,
        validation_data=(x[:7], y[:7]),
        callbacks=[keras.callbacks.ModelCheckpoint(best, save_best_only=True)],
    )
    values += np.ravel(made.predict(x, batch_size=5, verbose=0)).tolist()
    again = keras.models.load_model(best)
    values += again.evaluate(x, y, batch_size=6, verbose=0)
    values += [made.train_on_batch(x[:6], y[:6])[0]]
    history = made.fit(Items(), shuffle=False, verbose=0).history
    return values + sum(history.values(), [])


devices = D.list_devices()
assert D.get_device_count() == len(devices)
expected = numbers("alone") if is_first else []
set_distribution(D.DataParallel())
strategy = tf.distribute.get_strategy()
found = numbers("all")
set_distribution(None)
outside = not tf.distribute.has_strategy() and D.distribution() is None
mesh = D.DeviceMesh((len(devices), 1), ["batch", "model"], devices)
layouts = D.LayoutMap(mesh)
layouts[".*kernel"] = (None, "model")
layouts[".*d1/output"] = ("batch", None)
distribution = D.ModelParallel(layout_map=layouts, batch_dim_name="batch")
with distribution.scope():
    assert tf.distribute.get_strategy() is strategy  # not a second one
    again = fit(x, y, batch_size=8, shuffle=False)[1]
    # As the first fit, whose history has the values of validation, too.
    assert np.allclose(again, found[:4], rtol=2e-5), (again, found)
result([devices, strategy.size, outside, expected, found])
"""


def test_numbers_are_those_of_one_process(tmp_path):
    workers = Workers(_FIT, 2, [str(tmp_path)], deadline=150).results()
    _, _, _, expected, _ = workers[0]
    for devices, known, outside, _, found in workers:
        assert devices == ["cpu:0", "cpu:1"]
        assert known == 2
        assert outside
        assert found == pytest.approx(expected, rel=2e-5, abs=1e-6)


_REFUSALS = _MODEL
_REFUSALS += """
devices = D.list_devices()
mesh = D.DeviceMesh((1, len(devices)), ["batch", "model"], devices)
layouts = D.LayoutMap(mesh)
sharded = D.ModelParallel(layout_map=layouts, batch_dim_name="batch")
own = D.DataParallel(auto_shard_dataset=False)
refusals = [
    refused(lambda: set_distribution(sharded)),
    refused(lambda: set_distribution(own)),
]
nothing_set = D.distribution() is None and not tf.distribute.has_strategy()
strategy = kerasdist.RingStrategy(shard="off")
refusals.append(refused(lambda: kerasdist.enable_keras_distribution(strategy)))
with strategy.scope():
    refusals.append(refused(lambda: set_distribution(D.DataParallel())))

# As at the beginning of a script that has options.
from kerasdist._keras import distribution

distribution.owner = None
kerasdist.enable_keras_distribution(strategy)
kerasdist.enable_keras_distribution(strategy)
refusals += [
    refused(lambda: set_distribution(D.DataParallel())),
    refused(lambda: D.initialize("a:1,b:2", 2, 0)),
]
set_distribution(own)
rank, size = strategy.rank, strategy.size
mine = fit(x[rank::size], y[rank::size], batch_size=11, shuffle=False)[1]

# A model outside of the distribution is each worker's own, with the warning of old.
keras.utils.clear_session()
set_distribution(None)
alone = fit(x, y, batch_size=22, shuffle=False)[1]
layout = D.TensorLayout((None, "model"), mesh)
refusals.append(refused(lambda: D.distribute_tensor(np.ones((2, 2)), layout)))
result([nothing_set, refusals, mine, alone])
"""


@pytest.mark.soak
def test_what_is_refused_and_data_of_each_worker():
    workers = Workers(_REFUSALS, 2, deadline=120).results()
    texts = (
        "On TensorFlow a distribution can divide",
        "With `auto_shard_dataset=False` each worker",
        "`keras.distribution` has been enabled",
        "A distribution can't be set inside",
        "`auto_shard_dataset` and the strategy's",
        "The workers are connected already",
        "On TensorFlow a tensor can't be divided",
    )
    for nothing_set, refusals, mine, alone in workers:
        assert nothing_set
        for refusal, text in zip(refusals, texts, strict=True):
            assert refusal.startswith(text)
        assert mine == pytest.approx(alone, rel=2e-5)


# Keras's own tests of these classes, which it skips unless its backend is JAX.
_OWN = (
    PRELUDE
    + """
logical_devices(8)
kerasdist.enable_keras_distribution()
"""
    + RUN_TESTS
)


@pytest.mark.soak
def test_keras_own(tmp_path):
    name = "keras.src.distribution.distribution_lib_test"
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(f"this Keras ships without {name}")
    with open(str(spec.origin), encoding="utf-8") as file:
        text = file.read()
    path = tmp_path / "distribution_lib_test.py"
    path.write_text(text.replace('backend.backend() != "jax"', "False"), "utf-8")
    (finished,) = Workers(
        _OWN, 1, [str(path)], env={"TF_CONFIG": None}, deadline=120, handover=False
    ).run()
    outcomes = finished.result
    # The base class of distributions stands for no strategy.
    assert outcomes.pop("DistributionTest::test_scope") == "failed"
    others = {test: each for test, each in outcomes.items() if each != "passed"}
    assert others == {}, finished.output[-20_000:]
    assert len(outcomes) >= 30
