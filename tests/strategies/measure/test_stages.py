"""How long stages are busy, against what is known: layers that sleep for a given time.

What `ScalingTensorBoard` writes of it is read by TensorBoard's own reader. Steps are
measured by the clock: a share of them that is known in seconds is known, too.
"""

from __future__ import annotations

import json

import pytest
from sleeping import SLEEPING

from board import Board, near, series
from workers import Workers

pytestmark = [pytest.mark.timeout(150), pytest.mark.soak]

# Seconds that a stage's layer sleeps for each micro-batch, forward and backward.
FORWARD, BACKWARD = (0.003, 0.012), (0.005, 0.020)
READ = 0.12
STEPS, ROWS = 8, 16
# Micro-batches, steps per execution, and epochs. Where steps are executed one by one,
# rows of them are measured.
RUNS = ((1, 1, 7), (4, STEPS, 3))

SETUP = """
import contextlib, json, os, time
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
from kerasdist.callbacks import (
    BroadcastInitialState, ScaleLearningRate, ScalingTensorBoard, Timeline)

folder = os.environ["FOLDER"]
PLACES = {"on0.*": "CPU:0", "on1.*": "CPU:1"}
x = np.random.default_rng(0).normal(size=(STEPS * ROWS, 16)).astype("float32")
y = x[:, :4] * 2
"""
BUILD = """
def build(strategy, slow=True, rate=None, **more):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        stages = [
            [layers.Dense(32, "relu", name=f"on{i}_a"),
             *([Slow(FORWARD[i], BACKWARD[i], name=f"on{i}_b")] if slow else [])]
            for i in range(2)]
        model = keras.Sequential(
            [keras.Input((16,)), *stages[0], *stages[1], layers.Dense(4, name="on1_c")])
        optimizer = "adam" if rate is None else keras.optimizers.SGD(rate)
        model.compile(optimizer, "mse", **more)
    return model

class Clock(keras.callbacks.Callback):
    '''Another measurement: of whole epochs but the first.'''

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.begin = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(time.perf_counter() - self.begin)

class Rates(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))

def others(name, **rate):
    rates = Rates()
    return rates, [
        BroadcastInitialState(), ScaleLearningRate(warmup_steps=4, verbose=0, **rate),
        rates, Timeline(folder + f"/{name}.json", steps=(2, 6), verbose=0)]

def fit(model, name, data=None, epochs=3, callbacks=(), **more):
    board = ScalingTensorBoard(
        folder + "/" + name, update_freq="epoch", verbose=0, **more)
    clock = Clock()
    given = {"x": x, "y": y, "batch_size": ROWS} if data is None else {"x": data}
    model.fit(**given, epochs=epochs, shuffle=False, verbose=0,
              callbacks=[clock, board, *callbacks])
    figures = board.figures
    return {
        "seconds": sum(clock.epochs[-2:]) / 2,
        "idle": list(figures.idle),
        "phases": dict(figures.phases),
        "step": figures.step_seconds,
        "speed": figures.examples_per_second,
        "efficiency": figures.efficiency,
        "bytes": figures.bytes_per_step,
        "steps": figures.steps,
        "limit": board.verdict.limit,
        "words": board.verdict.to_text(),
    }
"""
CONSTANTS = (
    f"FORWARD, BACKWARD, READ = {FORWARD}, {BACKWARD}, {READ}\n"
    f"STEPS, ROWS, RUNS = {STEPS}, {ROWS}, {RUNS}\n"
)

PLACED = """
from kerasdist.callbacks import job_view
job_view.SECONDS = 0.3
found = {}
for parts, executions, epochs in RUNS:
    strategy = kerasdist.ModelParallelStrategy(PLACES, micro_batches=parts)
    model = build(strategy, steps_per_execution=executions)
    found[f"{parts} {executions}"] = fit(
        model, f"{parts} {executions}", baseline=100.0, epochs=epochs)

# Without anything that sleeps: numbers are what they are without clocks.
strategy = kerasdist.ModelParallelStrategy(PLACES, micro_batches=4)
model = build(strategy, slow=False)
model.fit(x, y, batch_size=ROWS, epochs=3, shuffle=False, verbose=0)
other = build(strategy, slow=False)
class Rare(keras.callbacks.Callback):
    '''The clock is told that steps are short: it measures none of these few.'''
    def on_train_batch_begin(self, batch, logs=None):
        strategy.extended.kerasdist.timer.measure(1e-5)
def clocked():
    clock = strategy.extended.kerasdist.stage_clock
    return sum(g.totals.numpy()[:, 0].sum() for g in clock._graphs)
found["plain"] = fit(other, "plain", calibrate=True, callbacks=[
    Timeline(folder + "/rare.json", steps=(10, 14), verbose=0), Rare()])
found["clocked"] = [clocked()]
found["same"] = [
    v.numpy().tolist() == w.numpy().tolist()
    for v, w in zip(model.weights, other.weights, strict=True)]
rates, callbacks = others("placed", base_batch_size=8)
given = build(strategy, slow=False, rate=0.1)
before = [v.numpy().tolist() for v in given.weights]
given.fit(x, y, batch_size=ROWS, verbose=0, callbacks=[
    keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: batch == 0 and found.update(began=[
            v.numpy().tolist() for v in given.weights] == before)),
    *callbacks])
found["rates"] = rates.rates
found["clocked"].append(clocked() - found["clocked"][0])
graphs = len(strategy.extended.kerasdist.stage_clock._graphs)
model.fit(x, y, batch_size=ROWS, verbose=0)
model.evaluate(x, y, verbose=0)
found["graphs"] = [graphs, len(strategy.extended.kerasdist.stage_clock._graphs)]

# Data that come late.
def read(x, y):
    return sleep(READ, x, stateful=True), y
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS, drop_remainder=True)
data = data.map(tf.function(read))
found["input"] = fit(build(strategy, slow=False), "input", data, 2)

print("RESULT", json.dumps(found))
"""

HYBRID = """
strategy = kerasdist.RingStrategy(
    placement=PLACES, micro_batches=2, transport="tcp", timeout=60)
model = build(strategy, rate=0.1)
if strategy.rank == 1:
    model.set_weights([w + 1 for w in model.get_weights()])
rates, callbacks = others("hybrid")
from kerasdist.callbacks import job_view
from kerasdist.strategies.measure import step_clock
job_view.SECONDS = 0.3
step_clock._ROWS = ()  # all steps are measured, as there are few
board = ScalingTensorBoard(
    folder + "/hybrid", update_freq="epoch", verbose=0, calibrate=True)
class Sent(keras.callbacks.Callback):
    "Between the begins of two steps, in the same epoch."
    found = []

    def on_epoch_begin(self, epoch, logs=None):
        self.before = None

    def on_train_batch_begin(self, batch, logs=None):
        now = strategy.communicator.transport.bytes_sent
        if self.before is not None:
            self.found.append(now - self.before)
        self.before = now

clock, sent = Clock(), Sent()
model.fit(x, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0,
          callbacks=[clock, *callbacks, board, sent])
found = {"rates": rates.rates, "weights": [w.tolist() for w in model.get_weights()],
         "seconds": clock.epochs[-1], "sent": sorted(sent.found), "gradients": sum(
             4 * w.numpy().size for w in model.trainable_weights)}
if board.figures is not None:
    found["idle"], found["step"] = board.figures.idle, board.figures.step_seconds
    found["bytes"], found["phases"] = board.figures.bytes_per_step, board.figures.phases
    found["speed"], found["baseline"] = board.figures.examples_per_second, (
        board.figures.baseline)
    found["efficiency"] = board.figures.efficiency
print("RESULT", json.dumps(found))
"""


def run(body, size, folder):
    script = CONSTANTS + SETUP + SLEEPING + BUILD + body
    job = Workers(script, size, env={"FOLDER": str(folder)}, deadline=120)
    with job:
        return [one.result for one in job.succeed()]


def test_stages_of_one_worker(tmp_path):
    (found,) = run(PLACED, 1, tmp_path)
    for parts, executions, epochs in RUNS:
        name = f"{parts} {executions}"
        facts = found[name]
        assert near(facts["speed"], ROWS / facts["step"], 1e-6)
        # Of two devices.
        assert near(facts["efficiency"], facts["speed"] / 200, 1e-6)
        assert near(sum(facts["phases"].values()), facts["step"], 1e-6)
        board = Board(tmp_path / name / "scaling")
        wholes = series(board, "step_seconds/whole")
        # The same epochs by another clock.
        whole = sum(seconds for _, seconds in wholes[-2:]) / 2
        assert near(whole, facts["seconds"] / STEPS, 0.2), facts
        # A call that traces isn't counted: the first one, and the first that isn't
        # measured, which comes in the second epoch.
        counts = [STEPS] * epochs
        counts[0] -= executions
        counts[1] -= executions == 1
        counts = [count for count in counts if count]
        for stage in (0, 1):
            slept = parts * (FORWARD[stage] + BACKWARD[stage])
            written = series(board, f"idle_percent/stage_{stage}")
            assert len(written) == len(counts)
            expected = 1 - slept / facts["step"]
            # Sleeping takes a little longer than was asked for, and there's more to do.
            assert expected - 0.15 < facts["idle"][stage] <= expected + 0.01, facts
            busy = sum(
                steps * whole * (1 - percent / 100)
                for steps, (_, whole), (_, percent) in zip(
                    counts, wholes, written, strict=True
                )
            )
            whole = sum(n * each for n, (_, each) in zip(counts, wholes, strict=True))
            assert near(1 - busy / whole, facts["idle"][stage], 0, 0.02)
        # On a busy machine Python may cost more of so short a step.
        assert "stages that wait for each other" in facts["words"], facts
        # The activations between the two, and their gradients: 32 float32 each row.
        if executions == 1:
            least = ROWS * 32 * 4 * 2
            assert least <= facts["bytes"] < least * 1.2
            assert series(board, "bytes/per_step")[-1][1] == facts["bytes"]
    # There's one call in an epoch: to make its iterator may take long beside it, too.
    facts = found[f"4 {STEPS}"]
    aside = facts["phases"]["outside"] + facts["phases"]["input"]
    if aside < 0.15 * facts["step"]:
        assert facts["limit"] == "stages", facts
        assert "1. Move layers from stage 1, the slowest, " in facts["words"]

    assert all(found["same"])
    before, after = found["graphs"]
    assert before == after
    board = Board(tmp_path / "plain" / "scaling")
    # See `test_one_device`.
    assert all(percent > 0 for _, percent in series(board, "efficiency/percent"))

    # The other callbacks: one worker's state is its own, and has been.
    assert found["began"]
    rates = [0.1 * (1 + min(step / 4, 1)) for step in range(STEPS)]
    assert found["rates"] == pytest.approx(rates, rel=1e-6)
    # With ScalingTensorBoard, which measured no step, and without: all have stages.
    for name, first, stop in (("rare", 10, 14), ("placed", 2, 6)):
        check_timeline(tmp_path / f"{name}.json", 1, first, stop)
        check_stages(tmp_path / f"{name}.json", 4)
    # Outside of the window only the step before has clocks, which traces them.
    assert found["clocked"] == [1 + 4, 1 + 4]

    late = found["input"]
    assert late["limit"] == "input"
    # The next batch is read while the step runs.
    rest = late["step"] - late["phases"]["input"]
    assert late["phases"]["input"] > 0.8 * (READ - rest)
    # Meanwhile stages have nothing to do.
    assert all(idle > 1 - rest / late["step"] - 0.02 for idle in late["idle"])


def check_timeline(path, ranks, first=2, stop=6):
    """It has the steps of its window, of all ranks."""
    found = json.loads(path.read_text())["traceEvents"]
    pids = sorted({e["pid"] for e in found})
    assert len(pids) == ranks
    for pid in pids:
        names = [e["name"] for e in found if e["pid"] == pid and e["ph"] == "X"]
        assert [n for n in names if n.startswith("step ")] == [
            f"step {step}" for step in range(first, stop)
        ]
        assert ("all_reduce" in names) == (ranks > 1)
        assert "compute" in names or "compute, update" in names


def check_stages(path, parts, forward=(0, 0), backward=(0, 0)):
    """Each stage takes its micro-batches in order, inside of each step."""
    order = [f"forward {i}" for i in range(parts)]
    order += [f"backward {i}" for i in reversed(range(parts))]
    found = json.loads(path.read_text())["traceEvents"]
    for pid in {e["pid"] for e in found}:
        mine = [e for e in found if e["pid"] == pid and e["ph"] == "X"]
        steps = [e for e in mine if e["name"].startswith("step ")]
        threads = sorted({e["tid"] for e in mine if e["cat"] == "stage"})
        assert len(threads) == 2
        for stage, thread in enumerate(threads):
            lane = [e for e in mine if e["tid"] == thread]
            for step in steps:
                inside = [
                    e
                    for e in lane
                    if e["ts"] >= step["ts"]
                    and e["ts"] + e["dur"] <= step["ts"] + step["dur"]
                ]
                names = [e["name"] for e in inside if e["name"] != "compute"]
                assert names == order, step
                for each in inside:
                    slept = forward if "forward" in each["name"] else backward
                    if each["name"] != "compute":
                        assert each["dur"] > 1e6 * slept[stage]
            ends = 0.0
            for each in lane:
                assert each["ts"] >= ends - 0.01
                ends = each["ts"] + each["dur"]


def test_stages_of_several_workers(tmp_path):
    """`RingStrategy(placement=...)`, with all callbacks at once."""
    chief, other = run(HYBRID, 2, tmp_path)
    assert chief["weights"] == other["weights"]
    rates = [0.1 * (1 + min(step / 4, 1)) for step in range(2 * STEPS)]
    for found in (chief, other):
        assert found["rates"] == pytest.approx(rates, rel=1e-6)
    check_timeline(tmp_path / "hybrid.json", 2)
    check_stages(tmp_path / "hybrid.json", 2, FORWARD, BACKWARD)
    assert "idle" not in other
    # The second epoch by another clock: with making its iterator, which may take long.
    board = Board(tmp_path / "hybrid" / "scaling")
    (_, whole), (_, speed) = (
        series(board, tag)[-1]
        for tag in ("step_seconds/whole", "examples_per_second/all")
    )
    assert near(whole, chief["seconds"] / STEPS, 0.3)
    assert near(speed, ROWS * STEPS / chief["seconds"], 0.3)
    assert near(chief["speed"], ROWS / chief["step"], 0.1)
    assert near(sum(chief["phases"].values()), chief["step"], 1e-6)
    # One worker, with its devices and micro-batches, takes the whole batch in as long
    # as each of two takes its half: layers sleep whatever they are given.
    alone = ROWS / chief["baseline"] - chief["phases"]["outside"]
    assert 2 * sum(FORWARD[1:] + BACKWARD[1:]) < alone < 1.2 * chief["step"], chief
    assert near(chief["efficiency"], chief["speed"] / chief["baseline"] / 2, 1e-6)
    # The transport's counter. Of two workers each sends half of the gradients twice.
    middle = [found["sent"][len(found["sent"]) // 2] for found in (chief, other)]
    assert near(chief["bytes"], sum(middle) / 2, 0.05), (chief["bytes"], middle)
    assert chief["gradients"] < chief["bytes"] < 1.1 * chief["gradients"]
    written = series(board, "job/learning_rate")
    assert [step for step, _ in written] == [STEPS, 2 * STEPS]
    assert [rate for _, rate in written] == pytest.approx([0.2, 0.2], rel=1e-6)
    assert series(board, "job/workers") == [(STEPS, 2), (2 * STEPS, 2)]
    assert [rows for _, rows in series(board, "job/global_batch")] == [ROWS, ROWS]
    for stage in (0, 1):
        slept = 2 * (FORWARD[stage] + BACKWARD[stage])
        expected = 1 - slept / chief["step"]
        assert expected - 0.2 < chief["idle"][stage] <= expected + 0.01, chief
        assert len(series(board, f"idle_percent/stage_{stage}")) == 2
