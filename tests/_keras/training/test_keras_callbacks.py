"""Keras's own callbacks on several workers, unchanged; only the chief writes."""

from __future__ import annotations

import csv
import zipfile

import keras
import numpy as np
import pytest

from sessions import Session
from workers import Workers

SETUP = """
import json, os, sys
import keras
import numpy as np
import kerasdist

strategy = kerasdist.RingStrategy(timeout=60)
"""

BEFORE = """
folder = os.environ["FOLDER"]
rank = strategy.rank
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 4)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
keras.utils.set_random_seed(3)

def build():
    with strategy.scope():
        m = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        m.compile(
            keras.optimizers.SGD(0.5, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return m

def fit(m, callbacks, epochs=4, **more):
    return m.fit(x, y, batch_size=16, epochs=epochs, callbacks=callbacks, **{
        "verbose": 0, **more})

def state(m):
    return [v.tolist() for v in m.get_weights()]

def result(value):
    print("RESULT", json.dumps(value), flush=True)
"""


SCRIPT = SETUP + BEFORE


@pytest.fixture(scope="module")
def session():
    with Session(SETUP, 2, before=BEFORE, env={"FOLDER": ""}) as made:
        yield made


@pytest.fixture
def run(session, tmp_path):
    return lambda body: session.run(body, FOLDER=str(tmp_path))


def run_apart(body, folder):
    """In a job of its own, whose strategy may be closed."""
    with Workers(SCRIPT + body, 2, env={"FOLDER": str(folder)}, deadline=120) as job:
        return [finished.result for finished in job.succeed()]


def test_files_are_the_chiefs(run, tmp_path):
    """Every rank has its own folder here: so it shows who wrote."""
    body = """
mine = os.path.join(folder, str(rank))
os.makedirs(mine)
m = build()
history = fit(m, [
    keras.callbacks.ModelCheckpoint(mine + "/best.keras", save_best_only=True),
    keras.callbacks.ModelCheckpoint(
        mine + "/{epoch}.weights.h5", save_weights_only=True),
    keras.callbacks.BackupAndRestore(mine + "/backup", delete_checkpoint=False),
    keras.callbacks.CSVLogger(mine + "/log.csv"),
    keras.callbacks.TensorBoard(mine + "/board", histogram_freq=1),
], epochs=2, validation_data=(x, y))
m.save(mine + "/last.keras")
m.export(mine + "/exported", verbose=False)
result([sorted(os.listdir(mine)), history.history, state(m),
        m.predict(x, verbose=0).tolist()])
"""
    chief, other = run(body)
    # What it saves itself, to a path that isn't the chief's, and nothing of a callback.
    assert other[0] == ["exported", "last.keras"]
    assert chief[0] == sorted(
        [
            "1.weights.h5",
            "2.weights.h5",
            "backup",
            "best.keras",
            "board",
            "exported",
            "last.keras",
            "log.csv",
        ]
    )
    assert chief[1:] == other[1:]
    # The file loads in a process without a strategy, with the same predictions, and
    # needs no kerasdist.
    with zipfile.ZipFile(tmp_path / "0" / "last.keras") as file:
        assert b"kerasdist" not in file.read("config.json")
    model = keras.models.load_model(tmp_path / "0" / "last.keras")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4)).astype("float32")
    np.testing.assert_allclose(model.predict(x, verbose=0), chief[3], rtol=1e-5)
    served = keras.layers.TFSMLayer(tmp_path / "0" / "exported", "serve")
    np.testing.assert_allclose(served(x), chief[3], rtol=1e-5, atol=1e-6)
    with open(tmp_path / "0" / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    np.testing.assert_allclose(
        [float(row["loss"]) for row in rows], chief[1]["loss"], rtol=1e-6
    )


@pytest.mark.soak
def test_loaded_in_the_scope_it_fits_on_with_its_optimizer(run):
    body = """
m = build()
fit(m, [], shuffle=False)
path = folder + "/m.keras"
m.save(path)
strategy.communicator.barrier()  # the chief has written
with strategy.scope():
    again = keras.models.load_model(path)
fit(m, [], epochs=2, shuffle=False)
fit(again, [], epochs=2, shuffle=False)
result([state(m), state(again), int(again.optimizer.iterations.numpy())])
"""
    for before, after, iterations in run(body):
        assert before == after
        assert iterations == 3 * 6


def test_decisions_are_the_same_on_all_ranks(run):
    body = """
m = build()
rates = []
class Rates(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        rate = float(self.model.optimizer.learning_rate.numpy())
        rates.append([rate, logs["loss"]])
history = fit(m, [
    keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=1.0),
    keras.callbacks.EarlyStopping(patience=3, min_delta=1.0, restore_best_weights=True),
    Rates(),
], epochs=20, validation_data=(x, y))
m2 = build()
scheduler = keras.callbacks.LearningRateScheduler(lambda e: 0.1 / (e + 1))
fit(m2, [scheduler, Rates()], epochs=3)
result([rates, len(history.epoch), state(m), state(m2)])
"""
    a, b = run(body)
    assert a == b
    assert a[1] < 20
    rates = [rate for rate, _ in a[0]]
    assert rates[1] < rates[0]


def test_a_stop_on_one_rank_stops_all(run):
    body = """
m = build()
class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, index, logs=None):
        if rank == 1 and index == 1:
            self.model.stop_training = True
fit(m, [Stop()], epochs=10)
result([int(m.optimizer.iterations.numpy()), state(m)])
"""
    a, b = run(body)
    assert a == b
    assert a[0] == 2


def test_a_rate_set_on_one_rank_becomes_the_chiefs(run):
    body = """
m = build()
class Rate(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.1 * (rank + 1)
fit(m, [Rate()])
result([float(m.optimizer.learning_rate.numpy()), state(m)])
"""
    a, b = run(body)
    assert a == b
    assert a[0] == pytest.approx(0.1)


def test_nan_ends_all_ranks(run):
    body = """
m = build()
x[39] = np.nan  # the last row: the last rank's
history = fit(m, [keras.callbacks.TerminateOnNaN()], epochs=10, shuffle=False)
result([int(m.optimizer.iterations.numpy()), len(history.epoch)])
"""
    a, b = run(body)
    assert a == b
    assert a[1] == 1


def test_killed_and_started_again_it_continues(session, tmp_path):
    """BackupAndRestore: the job is killed in epoch 3 and started again."""
    body = """
class Die(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
        if epoch == 3 and os.environ.get("DIE") and rank == 1:
            os.kill(os.getpid(), 9)
keras.utils.set_random_seed(3)
m = build()
history = fit(m, [keras.callbacks.BackupAndRestore(folder + "/backup"), Die()],
              epochs=6, shuffle=False)
result([state(m), history.epoch, int(m.optimizer.iterations.numpy())])
"""
    expected = session.run(body, FOLDER=str(tmp_path / "a"))[0]
    env = {"FOLDER": str(tmp_path / "b"), "DIE": "1"}
    with Workers(SCRIPT + body, 2, env=env, deadline=120) as job:
        assert [f.returncode for f in job.wait()] == [1, -9]
    a, b = run_apart(body, tmp_path / "b")
    assert a == b
    assert a[1] == [3, 4, 5]
    assert a[2] == expected[2]
    np.testing.assert_allclose(
        np.concatenate([np.ravel(w) for w in a[0]]),
        np.concatenate([np.ravel(w) for w in expected[0]]),
        rtol=1e-5,
    )


def test_different_initial_states_are_found_before_the_first_step(run):
    body = """
m = build()
if rank == 1:
    m.set_weights([w + 1 for w in m.get_weights()])
try:
    fit(m, [])
except ValueError as error:
    result([str(error), int(m.optimizer.iterations.numpy())])
"""
    for message, steps in run(body):
        assert "begin to train from different states" in message
        assert "2 of" in message
        assert "kernel" in message
        assert "ranks [1] differ" in message
        assert "initial_state='broadcast'" in message
        assert steps == 0


def test_weights_that_have_become_different_end_fit_with_their_names(run):
    """After that epoch; here a callback writes to the weights of one rank."""
    body = """
m = build()
class Drift(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if rank == 1 and batch == 0:
            self.model.layers[-1].bias.assign(self.model.layers[-1].bias + 1)
try:
    m.fit(x, y, batch_size=40, epochs=3, verbose=0, callbacks=[Drift()])
except ValueError as error:
    result([str(error), len(m.history.epoch)])
"""
    for message, epochs in run(body):
        assert "The workers hold different states after epoch 1." in message
        assert "1 of" in message
        assert "variables of ranks [1] differ" in message
        assert "bias" in message
        assert epochs == 0


def test_where_asked_all_take_the_chiefs_state(tmp_path):
    body = """
strategy.close()
strategy = kerasdist.RingStrategy(timeout=60, initial_state="broadcast")
m = build()
before = state(m)
if rank == 1:
    m.set_weights([w + 1 for w in m.get_weights()])
m.fit(x, y, batch_size=40, epochs=1, verbose=0, shuffle=False)
result([before, state(m)])
"""
    a, b = run_apart(body, tmp_path)
    assert a == b
    assert a[0] != a[1]


def test_the_progress_bar_and_the_start_line_are_the_chiefs(tmp_path):
    body = """
m = build()
fit(m, [], epochs=1, verbose=2)
m.evaluate(x, y, verbose=2)
result(None)
"""
    with Workers(SCRIPT + body, 2, env={"FOLDER": str(tmp_path)}, deadline=90) as job:
        chief, other = [finished.output for finished in job.succeed()]
    assert "3/3 - " in chief
    line = (
        "kerasdist: 2 workers with 2 replicas in all, global batch 16, per worker "
        "8, 40 samples, 20 of them here, learning rate 0.5"
    )
    assert line in chief
    assert "3/3" not in other
    assert "kerasdist: 2 worker" not in other


def test_dropout_differs_per_replica_and_is_reproducible(run):
    body = """
import tensorflow as tf
def masks():
    keras.utils.set_random_seed(5)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=7)
        layer.build((None, 64))
    @tf.function
    def draw():
        return strategy.run(lambda: layer(tf.ones([1, 64]), training=True))
    return [draw().numpy().ravel().tolist() for _ in range(2)]
a, b = masks(), masks()
assert a == b
result(a)
"""
    masks = {tuple(mask) for both in run(body) for mask in both}
    assert len(masks) == 4
