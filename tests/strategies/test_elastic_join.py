"""A worker that is started again joins a running `fit`: numbers of one process."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest

from workers import Workers

SCRIPT = """
import json, os, signal, sys, time
import numpy as np
import keras
import kerasdist

victim, kind = int(sys.argv[1]), sys.argv[2]
alone = "TF_CONFIG" not in os.environ
strategy = kerasdist.RingStrategy(elastic=True, startup_timeout=60)
me = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"]) if not alone else 0
again = not alone and strategy.communicator.joining
random = np.random.default_rng(0)
x = random.normal(size=(250, 8)).astype("float32")
y = x[:, :3].argmax(1)
with strategy.scope():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([
        keras.Input((8,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(3, activation="softmax"),
    ])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])


class Pace(keras.callbacks.Callback):
    taken = 0

    def on_train_batch_end(self, batch, logs=None):
        self.taken += 1
        if not alone:
            time.sleep(0.05)
        if me == victim and not again and self.taken == 9:
            print("GOING", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 3 and not alone:
            # Until the one that was lost has been started again.
            for _ in range(4000):
                membership = strategy.communicator.membership
                if again or strategy.size == int(sys.argv[3]) or membership.waiting:
                    break
                time.sleep(0.01)


data = dict(x=x, y=y, batch_size=32)
if kind == "steps":
    data["steps_per_epoch"] = 5
history = model.fit(
    **data,
    epochs=10,
    verbose=0,
    validation_data=(x[:50], y[:50]),
    callbacks=[
        Pace(),
        keras.callbacks.EarlyStopping(
            "loss", patience=50, restore_best_weights=True
        ),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.05),
    ],
)
weights = np.concatenate([w.numpy().ravel() for w in model.weights])
print("RESULT", json.dumps([
    history.epoch,
    {name: [float(v) for v in values] for name, values in history.history.items()},
    weights.tolist(),
    strategy.size,
    int(model.optimizer.iterations.numpy()),
]))
"""


def one_process() -> Any:
    with Workers(SCRIPT, 1, ["-1", "arrays", "1"], env={"TF_CONFIG": None}) as job:
        return job.succeed()[0].result


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_the_numbers_are_those_of_one_process(victim: int) -> None:
    epochs, expected, weights, _, iterations = one_process()
    arguments = [str(victim), "arrays", "2"]
    with Workers(SCRIPT, 2, arguments, handover=False, deadline=120.0) as job:
        assert job.wait_one(victim).returncode == -signal.SIGKILL
        job.start_again(victim)
        finished = job.succeed()
    for each in finished:
        found = each.result
        assert found[0] == epochs
        assert found[3] == 2
        assert found[4] == iterations
        assert found[1].keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(found[1][name], values, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[2], weights, rtol=1e-4, atol=1e-5)
    # To the bit among the workers.
    assert finished[0].result[2] == finished[1].result[2]


def test_data_without_a_known_place_are_refused() -> None:
    """The newcomer ends with an error, and the others continue."""
    arguments = ["1", "steps", "2"]
    with Workers(SCRIPT, 2, arguments, handover=False, deadline=120.0) as job:
        job.wait_one(1)
        job.start_again(1)
        newcomer = job.wait_one(1)
        assert newcomer.returncode == 1
        assert "This worker can't join the job. Received: data" in newcomer.output
        left = job.wait_one(0)
        assert left.returncode == 0
        assert left.result[3] == 1
