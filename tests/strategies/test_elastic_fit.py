"""`fit` with a lost server, and with metrics that are too large for each step.

Lost workers are in `test_elastic_moments`.
"""

from __future__ import annotations

import json

import pytest

from workers import Workers

pytestmark = pytest.mark.timeout(600)

SCRIPT = """
import contextlib
import json
import os
import signal
import sys
import time
import keras
import numpy as np
import kerasdist
from keras import layers

LOST = json.loads(sys.argv[1])  # a server, or a worker and the step that kills it
strategy = None
if LOST != "alone":
    create = getattr(kerasdist, os.environ.get("STRATEGY", "RingStrategy"))
    strategy = create(elastic=True, timeout=60)
rank = 0 if strategy is None else strategy.rank
rng = np.random.default_rng(0)
x = rng.normal(size=(70, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
keras.utils.set_random_seed(7)

class Large(keras.metrics.Metric):
    '''Counts rows in the first of 20,000 numbers.'''
    def __init__(self):
        super().__init__(name="rows")
        self.counts = self.add_weight(shape=(20_000,), initializer="zeros", name="c")
    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = keras.ops.cast(keras.ops.shape(y_true)[0], "float32")
        self.counts.assign_add(keras.ops.one_hot(0, 20_000) * rows)
    def result(self):
        return keras.ops.sum(self.counts)

with contextlib.nullcontext() if strategy is None else strategy.scope():
    m = keras.Sequential([
        keras.Input((6,)), layers.Dense(16, activation="relu"), layers.Dense(2),
    ])
    m.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", *([Large()] if "LARGE" in os.environ else [])],
        jit_compile=False,
    )

class Lost(keras.callbacks.Callback):
    step = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.step += 1
        if LOST == [rank, self.step]:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch, logs=None):
        if LOST == "server" and self.step == 3:
            print("GOING", flush=True)
            for _ in range(3000):  # until the other server is used alone
                if strategy.communicator.epoch:
                    break
                strategy.communicator.barrier()
                time.sleep(0.01)

history = m.fit(
    x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[Lost()],
    validation_data=(x[:50], y[:50]), validation_batch_size=20,
).history
weights = m.get_weights()
print("RESULT", json.dumps({
    "weights": np.concatenate([w.ravel() for w in weights]).tolist(),
    "history": history,
    "size": 1 if strategy is None else strategy.size,
}), flush=True)
"""


@pytest.fixture(scope="module")
def alone():
    with Workers(SCRIPT, 1, ['"alone"'], deadline=120) as job:
        (finished,) = job.succeed()
    return finished.result


SERVERS = {"STRATEGY": "ParameterServerStrategy"}


def test_a_lost_server_changes_no_number(alone):
    with Workers(SCRIPT, 2, ['"server"'], SERVERS, deadline=200, servers=2) as job:
        for rank in (0, 1):
            job.wait_for_line(rank, "GOING")
        job.kill(3)
        left = [job.wait_one(rank) for rank in (0, 1, 2)]
    assert [f.returncode for f in left] == [0, 0, 0], [f.output for f in left]
    for found in (f.result for f in left[:2]):
        assert found["size"] == 2
        assert found["weights"] == pytest.approx(alone["weights"], rel=1e-4, abs=1e-5)
    assert "kerasdist: server 1 (" in left[0].output
    assert left[0].result == left[1].result


@pytest.mark.soak
@pytest.mark.parametrize(("step", "missing"), [(8, 5), (9, 0)])
def test_of_large_metrics_the_last_steps_may_be_missing(step, missing):
    """The 5 rows of one of 3 workers, in the second of two steps."""
    args = [json.dumps([1, step])]
    with Workers(SCRIPT, 3, args, {"LARGE": "1"}, deadline=200) as job:
        left = [finished for finished in job.wait() if finished.rank != 1]
    assert [f.returncode for f in left] == [0, 0], [f.output for f in left]
    for found in (f.result for f in left):
        assert found["history"]["rows"] == [70, 70 - missing]
    line = "what the lost worker counted in the last step isn't"
    assert [line in f.output for f in left] == [missing > 0, False]
