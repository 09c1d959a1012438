"""Compressors in a job: what two workers compute, and what crosses the network."""

import numpy as np
import pytest
from scripts import with_prelude
from soak import soak, soaking

from workers import Workers

pytestmark = pytest.mark.timeout(400)

SCRIPT = with_prelude("""
from kerasdist.collectives.checked import CheckedCommunicator

sent = 0
for method in ("all_reduce", "all_gather"):
    original = getattr(CheckedCommunicator, method)
    def counted(self, given, *args, original=original, **more):
        global sent
        arrays = given if isinstance(given, (list, tuple)) else [given]
        sent += sum(np.asarray(array).nbytes for array in arrays)
        return original(self, given, *args, **more)
    setattr(CheckedCommunicator, method, counted)

rng = np.random.default_rng(0)
x = rng.normal(size=(44, 6, 20)).astype("float32")
y = (x.sum((1, 2)) > 0).astype("float32")

def model():
    keras.utils.set_random_seed(3)
    given = keras.Input((6, 20))
    shared = keras.layers.Dense(40, activation="relu")
    layer = shared(given[:, :3]) + shared(given[:, 3:])
    layer = keras.layers.Flatten()(layer)
    layer = keras.layers.Dense(80, activation="relu")(layer)
    layer = keras.layers.Dense(8, activation="relu", kernel_regularizer="l2")(layer)
    return keras.Model(given, keras.layers.Dense(1, activation="sigmoid")(layer))

def train(optimizer=None, compile={}, epochs=2, verbose=0, **options):
    global sent
    strategy = kerasdist.RingStrategy(timeout=60, **options)
    with strategy.scope():
        m = model()
        optimizer = keras.optimizers.Adam() if optimizer is None else optimizer()
        m.compile(optimizer, "binary_crossentropy", **compile)
    sent = 0
    history = m.fit(x, y, batch_size=16, epochs=epochs, verbose=verbose)
    variables = strategy.extended.workers.memories.variables
    return {
        "loss": history.history["loss"],
        "weights": [float(np.float64(w).sum()) for w in m.get_weights()],
        "all": np.concatenate([np.ravel(w) for w in m.get_weights()]).tolist(),
        "sent": sent,
        "memories": len(variables),
    }

sgd = lambda **more: lambda: keras.optimizers.SGD(0.05, momentum=0.9, **more)
results = {
    "factors clipped": train(sgd(global_clipnorm=0.1), compression="factors"),
    "clipped": train(sgd(global_clipnorm=0.1)),
    "powersgd": train(compression="powersgd", verbose=2),
    "topk": train(compression=kerasdist.TopK(ratio=0.02)),
}
results["twice"] = refused(lambda: train(sgd(), compression=kerasdist.TopK(0.001, 0.5)))
if "MORE" not in os.environ:
    result(results)
    raise SystemExit
results |= {
    "none": train(),
    "powersgd window": train(
        sgd(gradient_accumulation_steps=3), compression=kerasdist.PowerSGD(rank=1)
    ),
    "whole": train(
        compression=kerasdist.PowerSGD(rank=100), compile={"run_eagerly": True}
    ),
    "topk momentum": train(
        lambda: keras.optimizers.SGD(0.05),
        compression=kerasdist.TopK(ratio=1.0, momentum=0.9),
        compile={"jit_compile": True},
    ),
    "momentum": train(sgd()),
}

# The scale grows until a step overflows: it's skipped on all, and leaves no trace.
keras.config.set_dtype_policy("mixed_float16")
results["mixed"] = train(
    lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), initial_scale=2.0**30, dynamic_growth_steps=2
    ),
    compression="powersgd",
    bucket_size=2000,
    epochs=6,
)
keras.config.set_dtype_policy("float32")

# Two models of the same shapes have memories of their own, and a loop of one's own.
strategy = kerasdist.RingStrategy(timeout=60, compression="powersgd")
with strategy.scope():
    pair = [(model(), keras.optimizers.SGD(0.05)) for _ in range(2)]

@tf.function
def step(x, y):
    for sign, (m, optimizer) in zip((1.0, -1.0), pair):
        def one(x, y, m=m, optimizer=optimizer, sign=sign):
            with tf.GradientTape() as tape:
                each = keras.losses.binary_crossentropy(y[:, None], m(x, training=True))
                loss = sign * tf.nn.compute_average_loss(each, global_batch_size=16)
            weights = m.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        strategy.run(one, args=(x, y))

mine = slice(8 * strategy.extended.workers.rank, None, 2)
for _ in range(3):
    step(x[:16][mine][:8], y[:16][mine][:8])
results["loop"] = {
    "weights": [[float(np.float64(w).sum()) for w in m.get_weights()] for m, _ in pair],
    "memories": len(strategy.extended.workers.memories.variables),
}
with strategy.scope():
    m = model()
    m.compile(keras.optimizers.SGD(0.05), "binary_crossentropy")
m.fit(x[:16], y[:16], batch_size=16, verbose=0)
before = len(strategy.extended.workers.memories.variables)
del m
import gc
gc.collect()
keras.backend.clear_session()
gc.collect()
results["forgotten"] = before - len(strategy.extended.workers.memories.variables)

def backed_up(compression, epochs):
    strategy = kerasdist.RingStrategy(timeout=60, compression=compression)
    with strategy.scope():
        m = model()
        m.compile(keras.optimizers.SGD(0.05), "binary_crossentropy")
    seen = []
    def look(*_):
        kept = strategy.extended.workers.memories.variables
        seen.append([v.numpy().ravel().tolist() for v in kept])
    folder = f"{os.environ['FOLDER']}/{compression!r}"
    m.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[
        keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False),
        keras.callbacks.LambdaCallback(on_epoch_begin=look, on_train_end=look)])
    return seen
for name in ("topk", "powersgd"):
    given = kerasdist.TopK(0.05, momentum=0.5) if name == "topk" else name
    results[f"backup {name}"] = [backed_up(given, epochs) for epochs in (1, 2)]
result(results)
""")


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    env = {"FOLDER": str(tmp_path_factory.mktemp("backups"))}
    env |= {"MORE": "1"} if soaking(request.config) else {}
    with Workers(SCRIPT, 2, deadline=300, env=env) as job:
        ended = job.succeed()
    return [finished.result | {"lines": finished.output} for finished in ended]


@pytest.fixture(scope="module")
def results(jobs):
    return jobs[0]


def near(one, other, atol):
    np.testing.assert_allclose(one["all"], other["all"], rtol=0, atol=atol)


def test_all_ranks_hold_the_same_bits(jobs):
    for name, mine in jobs[0].items():
        if isinstance(mine, dict):
            assert mine["weights"] == jobs[1][name]["weights"], name


def test_factors_lose_nothing_and_are_clipped_as_sums(results):
    near(results["factors clipped"], results["clipped"], 1e-5)
    # The kernel with a regularizer isn't a product, the others are.
    assert results["factors clipped"]["sent"] < 0.5 * results["clipped"]["sent"]


@pytest.mark.soak
def test_a_rank_that_is_high_enough_and_a_ratio_of_1_lose_nothing(results):
    """Nor do eager steps, or those that XLA compiles."""
    near(results["whole"], results["none"], 1e-6)
    near(results["topk momentum"], results["momentum"], 1e-5)


@pytest.mark.parametrize(
    ("name", "part"), [("powersgd", 0.2), ("topk", 0.2), soak("powersgd window", 0.1)]
)
def test_less_is_sent_and_the_loss_falls(results, name, part):
    found = results[name]
    assert found["sent"] < part * results["clipped"]["sent"]
    assert found["loss"][-1] < found["loss"][0]
    assert found["memories"] > 0


@pytest.mark.soak
def test_a_step_that_overflows_is_skipped(results):
    assert np.isfinite(results["mixed"]["all"]).all()
    assert results["mixed"]["loss"][-1] < results["mixed"]["loss"][0]


@pytest.mark.soak
def test_memories_are_each_model_s_own_and_end_with_it(results):
    assert results["loop"]["memories"] == 2 * results["powersgd"]["memories"]
    first, second = results["loop"]["weights"]
    assert first != second
    assert results["forgotten"] == results["powersgd"]["memories"]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["topk", "powersgd"])
def test_a_backup_has_what_all_ranks_keep(jobs, name):
    def of_kernels(arrays):
        # In the order of gradients or of variables; Q of PowerSGD begins again.
        return {
            size: np.sum([each for each in arrays if len(each) == size], 0)
            for size in (800, 9600, 640)
        }

    runs = [job[f"backup {name}"] for job in jobs]
    first, second = (of_kernels(run[0][-1]) for run in runs)
    begun = [of_kernels(run[1][0]) for run in runs]
    for size, mine in begun[0].items():
        assert np.any(mine)
        np.testing.assert_array_equal(mine, begun[1][size])
        total = first[size] + second[size]
        np.testing.assert_allclose(2 * mine, total, rtol=1e-5, atol=1e-6)


def test_momentum_twice_is_refused(results):
    assert "gradients sent by PowerSGD(rank=2)" in results["lines"]
    assert "Received: TopK(ratio=0.001, momentum=0.5)" in results["twice"]
