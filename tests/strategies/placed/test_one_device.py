"""What one device does of a placed model: against layers that sleep for a known time.

And against the same model under `RingStrategy()`, by the clock. What a calibration
leaves behind is what a `fit` without it does.
"""

from __future__ import annotations

import itertools

import pytest
from sleeping import SLEEPING

from board import Board, near, series, text
from workers import Workers

pytestmark = [pytest.mark.timeout(150), pytest.mark.soak]

# Seconds that a stage's layer sleeps in a call, forward and backward, however many rows
# it's given.
FORWARD, BACKWARD = (0.004, 0.010), (0.006, 0.020)
ONE = sum(FORWARD) + sum(BACKWARD)
STEPS, ROWS, PARTS = 8, 16, 2

SCRIPT = """
import json, os, time
import numpy as np
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2)
# Or who sleeps in a graph would hold up all others that want the one thread.
tf.config.threading.set_inter_op_parallelism_threads(8)
import keras
import kerasdist
from keras import layers
from kerasdist.callbacks import ScalingTensorBoard
from kerasdist.callbacks import job_view
from kerasdist.strategies.placed import one_device

job_view.SECONDS = 0.3
folder = os.environ["FOLDER"]
PLACES = {"on0.*": "CPU:0", "on1.*": "CPU:1"}
x = np.random.default_rng(0).normal(size=(STEPS * ROWS, 16)).astype("float32")
y = x[:, :4] * 2
traced = []
"""
REST = """
class Traced(Slow):
    def call(self, inputs):
        made = super().call(inputs)
        if not isinstance(made, keras.KerasTensor):
            traced.append((self.name, made.device.split("device:")[-1]))
        return made

def slow_model(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        stages = [
            [layers.Dense(16, name=f"on{i}_a"),
             Traced(FORWARD[i], BACKWARD[i], name=f"on{i}_b")] for i in range(2)]
        model = keras.Sequential(
            [keras.Input((16,)), *stages[0], *stages[1], layers.Dense(4, name="on1_c")])
        model.compile("sgd", "mse")
    return model

class Clock(keras.callbacks.Callback):
    '''How long each step takes; a median knows nothing of traces and calibrations.'''

    def on_epoch_begin(self, epoch, logs=None):
        self.begins = []

    def on_train_batch_begin(self, batch, logs=None):
        self.begins.append(time.perf_counter())

    @property
    def median(self):
        return float(np.median(np.diff(self.begins)))

class Narrow(layers.Layer):
    '''Now and then there isn't memory enough for a whole batch.'''

    short = False

    def call(self, inputs):
        def check(value):
            if self.short and len(value) == ROWS:
                raise MemoryError("too much")
            return value
        made = tf.numpy_function(check, [inputs], inputs.dtype)
        return tf.ensure_shape(made, inputs.shape)

def fit(model, name, callbacks=()):
    board = ScalingTensorBoard(
        folder + "/" + name, update_freq="epoch", verbose=0, calibrate=True)
    clock = Clock()
    history = model.fit(
        x, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0,
        callbacks=[clock, board, *callbacks]).history
    figures = board.figures
    return history, figures and {
        "speed": figures.examples_per_second, "outside": figures.phases["outside"],
        "baseline": figures.baseline, "efficiency": figures.efficiency,
        "seconds": clock.median}

if os.environ.get("KIND") == "replicas":
    strategy = kerasdist.RingStrategy(
        devices=["CPU:0", "CPU:1"], transport="native", timeout=60)
    model = slow_model(strategy)
    print("RESULT", json.dumps(fit(model, "replicas")[1]))
    raise SystemExit

# Layers on two devices; and then one device by the clock.
strategy = kerasdist.ModelParallelStrategy(PLACES, micro_batches=PARTS)
model = slow_model(strategy)
found = {"placed": fit(model, "placed")[1], "traced": list(traced)}
one_device.available_bytes = lambda: 1000
found["room"] = job_view.measure_alone(model)
one_device.available_bytes = lambda: 1e9
clock = Clock()
slow_model(kerasdist.RingStrategy()).fit(
    x, y, batch_size=ROWS, epochs=2, verbose=0, callbacks=[clock])
found["one"] = {"seconds": clock.median}

def outcome(calibrated):
    keras.utils.set_random_seed(1)
    strategy = kerasdist.ModelParallelStrategy(
        PLACES, micro_batches=PARTS, rematerialize=True)
    with strategy.scope():
        table = kerasdist.layers.ShardedDense(32, shards=2, name="table")
        with strategy.stage("CPU:1"):
            last = layers.Dense(4)
        narrow = Narrow(name="on0_b")
        model = keras.Sequential([
            keras.Input((16,)), layers.Dense(32, name="on0_a"), table, narrow,
            layers.BatchNormalization(name="on1_a"), layers.Dropout(0.3, name="on1_b"),
            last])
        model.compile(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=3), "mse",
            metrics=["mae"], steps_per_execution=2)
    def variables():
        return [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    def state():
        return [(v.value.device, v.numpy().tolist()) for v in variables()]
    if not calibrated:
        history = model.fit(
            x, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0).history
        return [history, state()]
    before = []
    note = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs:
        before or before.extend(v.value for v in variables()))
    history, facts = fit(model, "plain", [note])
    report = str(strategy.placement_report())
    trained = state()
    narrow.short = True
    return [history, trained], {
        **facts, "short": job_view.measure_alone(model),
        "devices": sorted({device for device, _ in trained}),
        # Of what trains, not of what was measured.
        "report": "CPU:1" in report,
        "after short": state() == trained,
        "variables": [id(v.value) for v in variables()] == [id(v) for v in before]}

with_it, facts = outcome(True)
found["plain"] = {
    **facts, "same": [one == other for one, other in zip(outcome(False), with_it)]}
print("RESULT", json.dumps(found))
"""


def run(size, folder, **env):
    constants = (
        f"FORWARD, BACKWARD = {FORWARD}, {BACKWARD}\n"
        f"STEPS, ROWS, PARTS = {STEPS}, {ROWS}, {PARTS}\n"
    )
    env = {"FOLDER": str(folder), **env}
    with Workers(
        constants + SCRIPT + SLEEPING + REST, size, env=env, deadline=120
    ) as job:
        return [one.result for one in job.succeed()]


def test_one_device(tmp_path):
    (found,) = run(1, tmp_path)
    placed, one = found["placed"], found["one"]
    # Whole batches: each layer sleeps once. And there's what lies between two steps.
    seconds = ROWS / placed["baseline"] - placed["outside"]
    assert ONE < seconds < 2 * ONE, placed
    # What one device does indeed, by the clock.
    assert near(placed["baseline"], ROWS / one["seconds"], 0.5), found
    assert near(placed["efficiency"], placed["speed"] / placed["baseline"] / 2, 1e-6)
    # The slower stage alone takes longer than that: it sleeps for each micro-batch.
    least = ROWS / (PARTS * (FORWARD[1] + BACKWARD[1]))
    assert placed["efficiency"] < least * 2 * ONE / ROWS
    devices = [tuple(each) for each in found["traced"]]
    assert ("on1_b", "CPU:1") in devices
    alone = (("on0_b", "CPU:0"), ("on1_b", "CPU:0"))
    assert alone in itertools.pairwise(devices)
    told = "\n".join(text(Board(tmp_path / "placed" / "scaling"), "events"))
    assert "One device with the whole model takes " in told
    assert f"for a step on {ROWS} samples, all zeros." in told
    written = series(Board(tmp_path / "placed" / "scaling"), "efficiency/percent")
    assert len(written) == 2

    # What copies need is known before: the layers of the second device, for SGD.
    size = 4 * (16 * 16 + 16 + 16 * 4 + 4)
    expected = f"fails: MemoryError: copies of other devices' variables take {size:,} "
    assert expected in found["room"]
    assert found["room"].endswith("bytes, and 1,000 are left")

    facts = found["plain"]
    assert facts["same"] == [True, True]
    assert facts["variables"]
    assert facts["after short"]
    assert facts["report"]
    assert [each[-5:] for each in facts["devices"]] == ["CPU:0", "CPU:1"]
    assert facts["efficiency"] > 0
    assert facts["short"].startswith("a step on zeros fails: ResourceExhaustedErr")


def test_one_worker_of_several_replicas(tmp_path):
    """It takes the whole batch, while the other worker waits: replicas are its own."""
    chief, other = run(2, tmp_path, KIND="replicas")
    assert other is None
    # Its replicas sleep at the same time, and as long as ever.
    seconds = ROWS / chief["baseline"] - chief["outside"]
    assert ONE < seconds < 2 * ONE, chief
    assert near(chief["efficiency"], chief["speed"] / chief["baseline"] / 2, 1e-6)
    told = "\n".join(text(Board(tmp_path / "replicas" / "scaling"), "events"))
    assert "One worker alone takes " in told
