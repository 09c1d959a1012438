"""Workers that are lost at any moment of `fit`: each sample is still used once.

The model counts by itself: a sample's row of an embedding sinks by exactly 0.5 when an
optimizer's step has used the sample. A metric counts them, too, over all workers.
"""

import json
import pickle
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from elastic_jobs import differences, fail_on, lossy_job
from moments import Fault

from places import SCRIPTS_PATH
from workers import Workers

RUN = """
import contextlib, json, os, pickle, sys, time
sys.path[:0] = os.environ["TESTS"].split(os.pathsep)
import numpy as np
import tensorflow as tf
import keras
path = sys.argv[1]
options = json.loads(os.environ["OPTIONS"])
SAMPLES, BATCH, EPOCHS = 70, 16, 3
if os.environ.get("PLAIN"):
    rank, scope = 0, contextlib.nullcontext
    def happen(name):
        pass
else:
    import moments
    import kerasdist
    from moments import happen
    moments.install()
    happen("start")
    strategy = getattr(kerasdist, os.environ["STRATEGY"])(timeout=100)
    happen("strategy")
    rank, scope = strategy.rank, strategy.scope

class Sinking(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.sum(y_pred, -1)

class Seen(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="seen")
        self.counts = self.add_weight(
            shape=(SAMPLES,), initializer="zeros", name="counts"
        )
    def update_state(self, y_true, y_pred, sample_weight=None):
        hot = keras.ops.one_hot(keras.ops.reshape(y_true, (-1,)), SAMPLES)
        self.counts.assign_add(keras.ops.sum(hot, 0))
    def result(self):
        return {"seen": self.counts + 0.0}

class Part(keras.layers.Dense):
    def build(self, shape):
        happen("build")
        super().build(shape)
    def call(self, inputs, training=False):
        if training and tf.inside_function():
            happen("trace")
        return super().call(inputs)
    def save_own_variables(self, store):
        happen("save")
        super().save_own_variables(store)

class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(
            SAMPLES, 1, embeddings_initializer="zeros", name="table"
        )
        self.hidden = Part(8, activation="tanh")
        self.normal = keras.layers.BatchNormalization(synchronized=True)
        self.last = keras.layers.Dense(3)
    def call(self, inputs, training=False):
        ids, x = inputs
        hidden = self.normal(self.hidden(x, training=training), training=training)
        return {"used": self.table(ids), "class": self.last(hidden)}

used, steps = [], 0
class Watch(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        global steps
        steps += 1
    def on_train_batch_end(self, batch, logs=None):
        if options.get("server") and steps == 3:
            print("GOING", flush=True)
            for _ in range(3000):  # until the other server is used alone
                if strategy.communicator.epoch:
                    break
                strategy.communicator.barrier()
                time.sleep(0.01)
    def on_epoch_end(self, epoch, logs=None):
        rows = self.model.table.embeddings
        used.append(-2.0 * keras.ops.convert_to_numpy(rows)[:, 0])

rng = np.random.default_rng(0)
ids = np.arange(SAMPLES)
x = rng.normal(size=(SAMPLES, 5)).astype("float32")
y = x[:, :3].argmax(1)
keras.utils.set_random_seed(1)
with scope():
    model = Model()
    model.compile(
        keras.optimizers.SGD(0.5),
        loss={
            "used": Sinking(reduction="sum"),
            "class": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        },
        metrics={"used": [Seen()], "class": ["accuracy"]},
        **options.get("compile", {}),
    )
callbacks = [Watch()]
if options.get("save"):
    callbacks.append(keras.callbacks.ModelCheckpoint(path + "-saved-{epoch}.keras"))
targets = {"used": ids, "class": y}
if options.get("data") == "dataset":
    data = tf.data.Dataset.from_tensor_slices(((ids, x), targets)).batch(BATCH)
    args = {"x": data}
else:
    args = {"x": (ids, x), "y": targets, "batch_size": BATCH}
    args["shuffle"] = False
few = (ids[:20], x[:20])
history = model.fit(
    **args, epochs=EPOCHS, verbose=0, callbacks=callbacks,
    validation_data=(few, {"used": ids[:20], "class": y[:20]}, ),
    validation_batch_size=8,
)
evaluated = model.evaluate(
    (ids, x), targets, batch_size=BATCH, verbose=0, return_dict=True
)
predicted = model.predict((ids, x), batch_size=BATCH, verbose=0)
numbers = {
    "used": np.array(used),
    "iterations": np.array(model.optimizer.iterations),
    **{f"weight {i}": np.array(w) for i, w in enumerate(model.get_weights())},
    **{f"log {k}": np.array(v) for k, v in history.history.items()},
    **{f"evaluated {k}": np.array(v) for k, v in evaluated.items()},
    **{f"predicted {k}": v for k, v in predicted.items()},
}
if not os.environ.get("PLAIN"):
    print("RESULT", json.dumps(moments._installed[0].counts), flush=True)
    strategy.close()
with open(f"{path}{rank}", "wb") as file:
    pickle.dump(numbers, file)
"""
pytestmark = pytest.mark.timeout(300)
SAMPLES, EPOCHS = 70, 3
# Of an epoch of five steps.
LAST = 5
Job = tuple[int, Sequence[Fault], dict[str, Any]]

STEP = "on_train_batch_begin"


def lost(rank, at=STEP, number=1, **more):
    return Fault(rank=rank, at=at, number=number, **more)


EXECUTION = {"steps_per_execution": 3}
# Each name: (workers, faults, options).
MOMENTS: dict[str, Job] = {
    "trace-chief": (3, [lost(0, "trace")], {}),
    "build": (3, [lost(1, "build")], {}),
    "train_begin": (3, [lost(0, "on_train_begin")], {}),
    **{f"start-{n}": (3, [lost(n % 3, "strategy", after=n)], {}) for n in range(9)},
    **{f"step-{n}": (3, [lost(n % 3, STEP, 7, after=n)], {}) for n in range(7)},
    "last_step_of_all": (3, [lost(0, STEP, EPOCHS * LAST, after=2)], {}),
    "after_last_step": (3, [lost(0, "on_train_batch_end", LAST)], {}),
    **{
        f"epoch_end-{n}": (3, [lost(n % 3, "on_train_batch_end", LAST, after=n)], {})
        for n in range(1, 6)
    },
    "on_epoch_end": (3, [lost(0, "on_epoch_end")], {}),
    "on_epoch_begin": (3, [lost(2, "on_epoch_begin", 2)], {}),
    "test": (3, [lost(1, "on_test_batch_begin", 2)], {}),
    "test-chief": (3, [lost(0, "on_test_batch_end", 5)], {}),
    "evaluate": (3, [lost(0, "on_test_batch_begin", 11)], {}),
    "predict": (3, [lost(0, "on_predict_batch_begin", 3)], {}),
    "save": (3, [lost(0, "save", 2)], {"save": True}),
    "two_at_once": (4, [lost(r, STEP, 8, after=1) for r in (1, 3)], {}),
    "two_at_once-chief": (3, [lost(r, STEP, 8) for r in (0, 1)], {}),
    "during_the_change": (3, [lost(2, STEP, 8), lost(1, STEP, 8, delay=0.05)], {}),
    "all_but_one": (3, [lost(0, STEP, 3), lost(1, STEP, 12, after=2)], {}),
    "stop": (3, [lost(1, STEP, 8, signum=signal.SIGSTOP)], {}),
    "stop-chief": (3, [lost(0, "on_epoch_end", signum=signal.SIGSTOP)], {}),
    "dataset": (3, [lost(0, STEP, 4, after=1)], {"data": "dataset"}),
    "eager": (3, [lost(0, STEP, 4, after=2)], {"compile": {"run_eagerly": True}}),
    "execution": (3, [lost(0, STEP, 2, after=5)], {"compile": EXECUTION}),
    "two_workers-end": (2, [lost(1, "on_train_batch_end", LAST, after=1)], {}),
}


_plain: dict[str, Any] = {}


def plain(options, folder):
    # A dataset has the same batches as the arrays.
    key = json.dumps({k: v for k, v in options.items() if k != "data"})
    if key not in _plain:
        path = folder / "plain"
        env = {"TESTS": SCRIPTS_PATH, "OPTIONS": key, "PLAIN": "1", "TF_CONFIG": None}
        Workers(RUN, 1, args=[str(path)], env=env, handover=False).run()
        _plain[key] = pickle.loads(Path(f"{path}0").read_bytes())
    return _plain[key]


def run(job, folder, servers=0):
    size, faults, options = job
    env = {"OPTIONS": json.dumps(options)}
    path = folder / "numbers"
    ours = lossy_job(RUN, size, faults, path, env=env, servers=servers)
    check(ours, options, folder)


def check(ours, options, folder):
    """Each sample was used once in each epoch, and the numbers are those of one."""
    for epoch, used in enumerate(ours["used"]):
        assert used.tolist() == [epoch + 1.0] * SAMPLES, f"epoch {epoch}"
    for counts in ours["log seen"]:
        assert counts.tolist() == [1.0] * SAMPLES
    # Keras's losses of single outputs, in eager steps alone, are weighted by rows.
    eager = "run_eagerly" in options.get("compile", {})
    left_out = ("class_loss", "used_loss") if eager else ()
    compared = (
        {k: v for k, v in each.items() if not k.endswith(left_out)}
        for each in (ours, plain(options, folder))
    )
    fail_on(differences(*compared))


@pytest.mark.soak
@pytest.mark.parametrize("name", MOMENTS)
def test_lost_at_a_moment(name, tmp_path):
    run(MOMENTS[name], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", MOMENTS)
def test_lost_at_a_moment_with_servers(name, tmp_path):
    run(MOMENTS[name], tmp_path, servers=2)


def test_a_lost_server_changes_no_number(tmp_path):
    path = tmp_path / "numbers"
    env = {
        "TESTS": SCRIPTS_PATH,
        "OPTIONS": json.dumps({"server": True}),
        "KERASDIST_ELASTIC": "1",
        "STRATEGY": "ParameterServerStrategy",
    }
    with Workers(RUN, 2, [str(path)], env, deadline=120, servers=2) as job:
        job.wait_for_lines("GOING", 2)
        job.kill(3)
        left = [job.wait_one(task) for task in (0, 1, 2)]
    assert [each.returncode for each in left] == [0, 0, 0], left[0].output
    assert "kerasdist: server 1 (" in left[0].output
    for rank in (0, 1):
        check(pickle.loads(Path(f"{path}{rank}").read_bytes()), {}, tmp_path)
