import json

import numpy as np
import pytest
from scripts import with_prelude
from soak import soak

from workers import Workers

SCRIPT = with_prelude("""
devices = int(os.environ["DEVICES"])
logical_devices(devices)
options = json.loads(os.environ["OPTIONS"])
strategy = getattr(kerasdist, os.environ["STRATEGY"])(
    devices=[f"CPU:{i}" for i in range(devices)], timeout=60, **options
)
rng = np.random.default_rng(0)
rows = int(os.environ["ROWS"])
# Its branches have variables of both devices.
window = 2 if devices == 2 else None
x = rng.integers(0, 9, (rows, 4))
y = rng.integers(0, 3, rows)

def train(scope):
    keras.utils.set_random_seed(1)
    with scope:
        model = keras.Sequential([
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(9, 5),
            keras.layers.Flatten(),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.Dense(3),
        ])
        model.compile(
            keras.optimizers.SGD(0.1, gradient_accumulation_steps=window),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"], jit_compile=True,
        )
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, **fit).history
    assert model.jit_compile is True
    numbers = [history["loss"], history["accuracy"]]
    if rows != 24:
        numbers.append(model.evaluate(x, y, verbose=0))
        numbers.append(model.predict(x, verbose=0).sum(0).tolist())
    return numbers, [w.tolist() for w in model.get_weights()]

ours = train(strategy.scope())
# One is enough, and compiling takes long.
plain = train(contextlib.nullcontext()) if strategy.rank == 0 else None
result([ours, plain])
""")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("workers", "servers", "devices", "rows", "mode"),
    [
        # Quick: equal batches, since each shape is compiled, and `fit` alone.
        pytest.param(2, 0, 1, 24, "sync", id="ring"),
        pytest.param(1, 0, 2, 24, "sync", id="window-of-replicas"),
        soak(2, 0, 1, 22, "sync", id="unequal-batches"),
        soak(1, 0, 2, 22, "sync", id="replicas"),
        soak(2, 1, 1, 22, "sync", id="servers"),
        soak(1, 1, 1, 22, "async", id="asynchronous"),
    ],
)
def test_the_numbers_are_those_of_plain_keras_compiled(
    workers, servers, devices, rows, mode
):
    # Buckets of few gradients: the backward pass is in several parts.
    options = {"mode": "async"} if mode == "async" else {"bucket_size": 64}
    env = {
        "DEVICES": str(devices),
        "STRATEGY": "ParameterServerStrategy" if servers else "RingStrategy",
        "OPTIONS": json.dumps(options),
        "ROWS": str(rows),
    }
    results = Workers(SCRIPT, workers, servers=servers, env=env, deadline=200).results()
    plain = results[0][1]
    for ours, _ in results:
        assert ours == results[0][0]
        for mine, theirs in zip(ours[0] + ours[1], plain[0] + plain[1], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
