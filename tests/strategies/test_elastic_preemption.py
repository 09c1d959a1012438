"""`fit` on SIGTERM to workers: they leave, and the numbers are those of one process."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest

from workers import Finished, Workers

pytestmark = pytest.mark.timeout(300)

# Workers get the signal in a step, or in an epoch's end; `taken` counts all steps that
# have begun, those that are repeated, too.
SCRIPT = """
import json, os, signal, sys, time
import numpy as np
import keras
import tensorflow as tf
import kerasdist

options = json.loads(sys.argv[1])
alone = "TF_CONFIG" not in os.environ
strategy = kerasdist.RingStrategy(elastic=True, timeout=60, startup_timeout=60)
me = 0 if alone else int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
random = np.random.default_rng(0)
x = random.normal(size=(250, 8)).astype("float32")
y = x[:, :3].argmax(1)
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([
        keras.Input((8,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(3, activation="softmax"),
    ])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])


def ask():
    os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 20
    while not strategy.communicator.wants_to_leave() and time.monotonic() < end:
        time.sleep(0.001)


class Asked(keras.callbacks.Callback):
    taken = 0
    sizes = []

    def on_train_batch_begin(self, batch, logs=None):
        self.taken += 1
        if options["ends"].get(str(me)) == self.taken:
            ask()

    def on_train_batch_end(self, batch, logs=None):
        self.sizes.append(strategy.size)
        if not alone:
            time.sleep(0.03)


asked = Asked()
history = model.fit(
    x, y, batch_size=32, epochs=4, verbose=0, callbacks=[
        asked,
        keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.05),
        keras.callbacks.CSVLogger(options["log"]),
    ],
    validation_data=(x[:50], y[:50]),
)
weights = np.concatenate([w.numpy().ravel() for w in model.weights])
print("RESULT", json.dumps([
    history.epoch,
    {name: [float(v) for v in values] for name, values in history.history.items()},
    weights.tolist(),
    asked.sizes,
    int(model.optimizer.iterations.numpy()),
]))
"""


def arguments(folder: Any, ends: dict[int, int]) -> list[str]:
    import json

    return [json.dumps({"ends": ends, "log": str(folder / "log.csv")})]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("alone")
    script = arguments(folder, {})
    with Workers(SCRIPT, 1, script, env={"TF_CONFIG": None}) as job:
        return job.succeed()[0].result, (folder / "log.csv").read_text()


def check(finished: Finished, expected: Any) -> None:
    found = finished.result
    assert found[0] == expected[0]
    assert found[4] == expected[4]
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param({2: 5}, marks=pytest.mark.soak),
        {0: 11, 2: 17},
    ],
    ids=str,
)
def test_workers_leave_and_nothing_is_repeated(
    alone: Any, tmp_path: Any, ends: dict[int, int]
) -> None:
    expected, rows = alone
    with Workers(SCRIPT, 3, arguments(tmp_path, ends), deadline=120.0) as job:
        finished = job.wait()
    codes = [-signal.SIGTERM if rank in ends else 0 for rank in range(3)]
    assert [each.returncode for each in finished] == codes
    output = "".join(each.output for each in finished)
    assert output.count("was preempted, and left at step") == len(ends)
    assert "lost" not in output
    for each in finished:
        if each.rank not in ends:
            check(each, expected)
            sizes = each.result[3]
            # Each step once, and most of them with fewer workers.
            assert len(sizes) == expected[4]
            assert sizes == sorted(sizes, reverse=True)
            assert {3, 3 - len(ends)} <= set(sizes)
    left = [each for each in finished if each.rank not in ends]
    assert all(each.result[2] == left[0].result[2] for each in left)
    log = (tmp_path / "log.csv").read_text()
    assert [row.split(",")[0] for row in log.splitlines()] == [
        row.split(",")[0] for row in rows.splitlines()
    ]
