"""`ScalingTensorBoard`: what it writes is what is so, by another measurement.

Each job of several workers trains twice: with a rank whose layers are slow, and with
data that come slowly, an optimizer that is slow, and a callback that is. How slow is
known: a part of a step takes as long at least, and more where the machine is busy with
something else.
"""

import collections
import json
import math
import re
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from scripts import with_prelude
from tensorboard.util import tensor_util

import kerasdist
from board import Board, near, series, text
from kerasdist.callbacks import ScalingTensorBoard
from kerasdist.callbacks.summaries import PHASES
from kerasdist.prediction import report
from kerasdist.prediction.profile import HostLink, Profile
from kerasdist.prediction.simulation import Setup, predict
from workers import Workers

pytestmark = pytest.mark.timeout(150)

SLOW = 0.04  # seconds that a slow rank's layer sleeps in each step
READ, UPDATE, CALLBACK = 0.25, 0.006, 0.004  # seconds

SCRIPT = with_prelude("""
import dataclasses, statistics
from kerasdist.callbacks import ScaleLearningRate, ScalingTensorBoard

# Or who sleeps in a graph would hold up all others that want the one thread.
tf.config.threading.set_inter_op_parallelism_threads(4)
kind, folder = os.environ["KIND"], os.environ["FOLDER"]
if kind == "ring":
    strategy = kerasdist.RingStrategy(transport="shared_memory", timeout=60)
else:
    strategy = kerasdist.ParameterServerStrategy(kind, timeout=60, heartbeat_timeout=5)
rank, asynchronous = strategy.rank, kind == "async"
rng = np.random.default_rng(0)
x = rng.normal(size=(240, 16)).astype("float32")
y = rng.integers(0, 4, size=240)

def sleep(seconds):
    def call(value):
        time.sleep(seconds)
        return value
    return lambda tensor: tf.ensure_shape(
        tf.numpy_function(call, [tensor], tensor.dtype), tensor.shape)

class Slow(keras.layers.Layer):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def call(self, inputs):
        if not self.seconds:
            return inputs
        return inputs * sleep(self.seconds)(tf.constant(1.0))

class SlowSGD(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        if variable.shape == (4,):
            gradient = gradient * sleep(UPDATE)(tf.constant(1.0))
        super().update_step(gradient, variable, learning_rate)

def build(seconds, optimizer):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        m = keras.Sequential([
            keras.Input((16,)), keras.layers.Dense(256, activation="relu"),
            Slow(seconds), keras.layers.Dense(4)])
        m.compile(
            optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return m

class Watch(keras.callbacks.Callback):
    '''Another measurement: the counters.'''

    def __init__(self, seconds=0.0):
        super().__init__()
        self.seconds = seconds
        self.sent, self.before = [], None

    def on_epoch_begin(self, epoch, logs=None):
        self.before = None

    def on_train_batch_begin(self, batch, logs=None):
        now = counter()
        if self.before is not None:
            self.sent.append(now - self.before)
        self.before = now
        time.sleep(self.seconds)

def counter():
    return getattr(strategy, "bytes_sent", 0)

def run(name, m, data, watch, epochs=4, callbacks=(), **more):
    # After the board: what its callbacks do isn't in the bytes of a step.
    board = ScalingTensorBoard(
        folder + "/" + name, baseline=1000, update_freq=8, verbose=rank == 0)
    m.fit(
        **data, epochs=epochs, verbose=0, callbacks=[*callbacks, board, watch], **more)
    facts = {
        "sent": statistics.median(watch.sent),
        "gradients": sum(4 * v.numpy().size for v in m.trainable_weights),
    }
    if board.figures is not None:
        facts["figures"] = dataclasses.asdict(board.figures)
        facts["verdict"] = dataclasses.asdict(board.verdict)
    return facts
""")

BODY = """
found = {}
m = build(SLOW if rank == 1 else 0, lambda: keras.optimizers.SGD(0.1))
# Where nobody waits for who is slow, 20 steps were over in 50 ms: what happens once,
# like a collection of garbage, would count for as much.
batch = 4 if asynchronous else 12
found["slow"] = run("slow", m, {"x": x, "y": y, "batch_size": batch}, Watch())
found["staleness"] = getattr(strategy, "staleness", {})
if asynchronous and rank == 0:
    # What the server has counted, by rank.
    client = strategy.extended.workers.client
    found["served"] = client.stats()[0]["tables"][-1]["observed"]

@tf.function
def read(x, y):
    return sleep(READ)(x), y

data = tf.data.Dataset.from_tensor_slices((x, y)).batch(48).map(read)
schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
m = build(0, lambda: SlowSGD(schedule))
scale = ScaleLearningRate(
    warmup_steps=10, base_batch_size=24, batch_size=48, verbose=0)
found["input"] = run("input", m, {"x": data}, Watch(CALLBACK), 3, [scale])
print("RESULT", json.dumps(found))
"""
ALL = "examples_per_second/all"
CONSTANTS = f"SLOW, READ, UPDATE, CALLBACK = {SLOW}, {READ}, {UPDATE}, {CALLBACK}\n"


def check_counts(kind, chief, other, output, folder):
    asynchronous = kind == "async"
    slow, late = chief["slow"], chief["input"]
    figures, throttled = slow["figures"], late["figures"]
    # A step: samples of all workers, or of the one that takes it.
    for found, batch in ((figures, 4 if asynchronous else 12), (throttled, 48)):
        assert found["workers"] == 2
        assert near(found["global_batch"], batch, 0.01)
        assert near(sum(found["phases"].values()), found["step_seconds"], 1e-6)
    assert (figures["arrays"], throttled["arrays"]) == (True, False)
    assert other["slow"].get("figures") is None
    assert figures["busy"]["1"] > SLOW
    if not asynchronous:
        # The mean of both, of which one may not sleep; scaled to the window.
        assert figures["phases"]["compute"] > 0.4 * SLOW
    phases = throttled["phases"]
    assert throttled["step_seconds"] > 0.8 * READ
    # The next batch is read while the step runs.
    rest = sum(phases.values()) - phases["input"]
    assert phases["input"] > 0.8 * (READ - rest)
    assert phases["update"] > UPDATE
    assert phases["outside"] > CALLBACK

    # Bytes: the counters of the transport. Frames' headers are a few.
    if kind == "ring":
        # Each gradient begins at a multiple of 64 bytes.
        more = figures["bytes_per_step"] - slow["gradients"]
        assert 0 <= more < 64 * 4
    else:
        mean = (slow["sent"] + other["slow"]["sent"]) / 2
        assert near(figures["bytes_per_step"], mean, 0.05)

    # Staleness: what the strategy counts.
    counts = collections.Counter()
    for facts in (chief, other):
        counts.update({int(lag): n for lag, n in facts["staleness"].items()})
    assert {int(lag): n for lag, n in figures["staleness"].items()} == dict(counts)
    assert bool(counts) == asynchronous
    if asynchronous:
        # And what the server has counted, which isn't asked by the callback.
        for rank, facts in enumerate((chief, other)):
            assert chief["served"][str(rank)] == facts["staleness"]

    # And so it stands in the file.
    board = Board(folder / "slow" / "scaling")
    check_file(board, figures, asynchronous)
    if asynchronous:
        check_staleness(board, counts)
    check_rates(Board(folder / "input" / "scaling"), asynchronous)
    assert slow["verdict"]["headline"] in text(board, "verdict")[-1]
    assert slow["verdict"]["headline"] in output
    assert "examples/s" in output


def check_file(board, figures, asynchronous):
    speeds = series(board, ALL)
    assert series(board, "job/workers") == [(step, 2.0) for step, _ in speeds]
    efficient = series(board, "efficiency/percent")
    for (_, percent), (_, speed) in zip(efficient, speeds, strict=True):
        assert near(percent, 100 * speed / 2000, 1e-5)
    rates = [rate for _, rate in series(board, "job/learning_rate")]
    assert rates == pytest.approx([0.1] * len(rates))
    steps = [step for step, _ in speeds]
    assert steps == sorted(set(steps))
    if asynchronous:
        # All batches of an epoch, whoever took them.
        assert steps == [60, 120, 180, 240]
    else:
        assert steps == [*range(8, 81, 8)]

    # What is a mean over the whole `fit` lies between the windows' values.
    def between(name, whole):
        values = [value for _, value in series(board, name)]
        assert min(values) * (1 - 1e-5) <= whole <= max(values) * (1 + 1e-5), name

    parts = dict(figures["phases"])
    for phase in ("input", "compute", "pack", "update", "outside"):
        between(f"step_seconds/{phase}", parts[phase])
    between("step_seconds/whole", figures["step_seconds"])
    between("bytes/per_step", figures["bytes_per_step"])
    between("job/global_batch", 4 if asynchronous else 12)
    for rank in "01":
        between(f"examples_per_second/rank_{rank}", figures["by_rank"][rank])
        between(f"busy_seconds/rank_{rank}", figures["busy"][rank])
    achieved = [speed for _, speed in series(board, "bandwidth/achieved")]
    assert 0 < figures["bandwidth"] <= max(achieved) * (1 + 1e-5)
    links = {link for _, link in series(board, "bandwidth/link")}
    assert [*links] == pytest.approx([figures["link"]])
    # The parts of each window add up to a step of it.
    for number, (_, whole) in enumerate(series(board, "step_seconds/whole")):
        seconds = [series(board, f"step_seconds/{p}")[number][1] for p in PHASES]
        shares = [series(board, f"step_percent/{p}")[number][1] for p in PHASES]
        assert near(sum(seconds), whole, 1e-5)
        assert shares == pytest.approx([100 * s / whole for s in seconds], abs=1e-3)


def check_staleness(board, counts):
    """The windows' histograms have all reads, in the buckets of their staleness."""
    totals = []
    for event in board.Tensors("staleness/reads"):
        buckets = tensor_util.make_ndarray(event.tensor_proto)
        totals.append(buckets[:, 2].sum())
        for left, right, count in buckets:
            assert not count or any(left - 0.01 < lag < right + 0.01 for lag in counts)
    assert sum(totals) == sum(counts.values())
    means = [mean for _, mean in series(board, "staleness/mean")]
    lags = sum(lag * n for lag, n in counts.items())
    assert np.dot(means, totals) == pytest.approx(lags)
    assert max(most for _, most in series(board, "staleness/max")) == max(counts)


def check_rates(board, asynchronous):
    """0.1, halved every 5 steps, and doubled over 10 steps: batches are 48, not 24."""
    rates = series(board, "job/learning_rate")
    assert [step for step, _ in rates] == ([5, 10, 15] if asynchronous else [8, 15])
    for step, rate in rates:
        expected = 0.1 * 0.5 ** (step / 5) * (1 + min(step / 10, 1))
        assert rate == pytest.approx(expected, rel=1e-5)


CALIBRATED = """
from kerasdist.callbacks import job_view

job_view.SECONDS = 0.05

def picky(inputs):
    tf.debugging.assert_greater(tf.reduce_max(tf.abs(inputs)), 0.0)
    return inputs

def outcome(callbacks=()):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        m = keras.Sequential([
            keras.Input((16,)), keras.layers.Dense(32),
            keras.layers.BatchNormalization(), keras.layers.Dropout(0.3),
            keras.layers.Dense(4)])
        m.compile(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"], steps_per_execution=2)
    history = m.fit(
        x, y, batch_size=30, verbose=0, callbacks=list(callbacks), shuffle=False
    ).history
    state = [*m.variables, *m.metrics_variables, *m.optimizer.variables]
    return [history, *(v.numpy().tolist() for v in state)]

plain, found = outcome(), {}
# Each window is shorter than what comes before the calibration.
often, fails = (
    ScalingTensorBoard(folder + name, calibrate=True, verbose=0, update_freq=1)
    for name in ("/often", "/picky"))
found["often"] = [outcome([often]) == plain, often.figures and often.figures.baseline]
with strategy.scope():
    m = keras.Sequential([
        keras.Input((16,)), keras.layers.Lambda(picky), keras.layers.Dense(4)])
    m.compile("sgd", "mse")
m.fit(x, x[:, :4], batch_size=60, verbose=0, callbacks=[fails])
found["picky"] = fails.figures and fails.figures.baseline
open(folder + "/file", "w").close()
try:
    outcome([ScalingTensorBoard(folder + "/file")])
except ValueError as error:
    found["refused"] = str(error)
print("RESULT", json.dumps(found))
"""
LOST = """
class Leave(keras.callbacks.Callback):
    epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        if rank == 1 and epoch == 2:
            os._exit(0)
        self.epochs.append(epoch)

    def on_epoch_end(self, epoch, logs=None):
        if epoch > 1:
            # Until the new one has trained, too: it needs a core to start.
            time.sleep(0.1)
            trained = os.path.join(folder, "trained")
            if rank == 1 and len(self.epochs) == 2:
                open(trained, "w").close()
            self.model.stop_training = rank == 0 and os.path.exists(trained)

m = build(0, lambda: keras.optimizers.SGD(0.1))
board = ScalingTensorBoard(folder + "/lost", update_freq="epoch")
m.fit(x, y, batch_size=12, epochs=10_000, verbose=0, callbacks=[board, Leave()])
print("RESULT", json.dumps(Leave.epochs))
"""


def test_figures_are_what_is_counted(tmp_path):
    """All but how fast it is, which depends on what else the machine does."""
    env = {"KIND": "ring", "FOLDER": str(tmp_path)}
    with Workers(CONSTANTS + SCRIPT + BODY, 2, env=env, deadline=140) as job:
        workers = job.succeed()
    chief, other = (worker.result for worker in workers)
    check_counts("ring", chief, other, workers[0].output, tmp_path)


@pytest.mark.soak
def test_a_calibration_changes_nothing(tmp_path):
    env = {"KIND": "ring", "FOLDER": str(tmp_path)}
    found = Workers(SCRIPT + CALIBRATED, 2, env=env, deadline=140).results()
    check_calibration(*found, tmp_path)


@pytest.mark.soak
def test_figures_of_asynchronous_workers_are_what_is_counted(tmp_path):
    env = {"KIND": "async", "FOLDER": str(tmp_path)}
    more = {"env": env, "deadline": 120, "servers": 1}
    with Workers(CONSTANTS + SCRIPT + BODY, 2, **more) as job:
        chief, other = job.succeed()[:2]
    check_counts("async", chief.result, other.result, chief.output, tmp_path)


def check_calibration(chief, other, folder):
    """Weights, optimizer, metrics and streams of random numbers stay as they are.

    The first epoch's metrics once had the steps on zeros in them.
    """
    same, speed = chief["often"]
    assert same
    assert other["often"] == [True, None]
    assert speed > 0
    board = Board(folder / "often" / "scaling")
    told = text(board, "events")[0]
    assert re.search(r"One worker alone takes .*s for a step on 30 sam", told)
    assert all(percent > 0 for _, percent in series(board, "efficiency/percent"))
    # Who wants to know how fast a job is doesn't want to end it.
    assert chief["picky"] is other["picky"] is None
    told = text(Board(folder / "picky" / "scaling"), "events")[0]
    assert "here (a step on zeros fails: InvalidArgumentError: " in told
    # Before anything has begun, and on all workers.
    path = re.escape(str(folder / "file"))
    expected = rf"`log_dir` must be .*chief .*log_dir='{path}': .*not a directory"
    for facts in (chief, other):
        assert re.search(expected, facts["refused"])


@pytest.mark.soak
def test_workers_that_are_lost_and_join_are_events(tmp_path):
    env = {"KIND": "async", "FOLDER": str(tmp_path)}
    with Workers(
        *(CONSTANTS + SCRIPT + LOST, 2),
        env=env,
        deadline=100,
        servers=1,
        handover=False,
    ) as job:
        job.wait_one(1)
        job.start_again(1)
        new = job.wait_one(1).result
        epochs = job.wait_one(0).result
    board = Board(tmp_path / "lost" / "scaling")
    told = "\n".join(text(board, "events"))
    assert re.search(r"rank 1 \(127.0.0.1:\d+\) was lost at its step \d+", told)
    assert "1 worker trains from here on: rank 0" in told
    assert re.search(r"rank 1 \(127.0.0.1:\d+\) joined at its step \d+", told)
    assert "2 workers train from here on: ranks 0, 1" in told
    # Those who have trained in each epoch, by their own word.
    assert new
    assert new[0] > 2
    trained = [2 if epoch in (0, 1, *new) else 1 for epoch in epochs]
    assert [n for _, n in series(board, "job/workers")] == trained
    # Of a process's first epoch nothing is known if it had one step, and traced.
    told = len(series(board, "examples_per_second/rank_1"))
    assert trained.count(2) - 2 <= told <= trained.count(2)
    assert text(board, "verdict")[-1].startswith("### This job is limited by ")


# One worker, in this process.

X = np.ones((64, 4), np.float32)


@pytest.fixture
def strategy():
    made = kerasdist.RingStrategy()
    yield made
    made.close()


def build(strategy, *layers, **more):
    with strategy.scope():
        dense = keras.layers.Dense(2, name="first")
        model = keras.Sequential([keras.Input((4,)), dense, *layers])
        model.compile("sgd", "mse", **more)
    return model


def fit(model, *callbacks, epochs=3):
    model.fit(
        X, X[:, :2], batch_size=8, epochs=epochs, verbose=0, callbacks=[*callbacks]
    )


@pytest.mark.parametrize(
    ("compiled", "traced"),
    [
        # The first call of a graph traces, and isn't counted: neither the one that is
        # measured, nor, if steps are short and only some are, the one that isn't.
        ({"steps_per_execution": 4}, {4, 8}),
        ({"run_eagerly": True}, {0}),
        ({"jit_compile": True}, {1}),
    ],
)
def test_one_worker(strategy, tmp_path, compiled, traced, said):
    board = ScalingTensorBoard(tmp_path, update_freq="epoch", baseline=10)
    begin = time.monotonic()
    fit(build(strategy, **compiled), board)
    figures = board.figures
    assert figures.steps * figures.step_seconds < time.monotonic() - begin
    assert 24 - figures.steps in traced
    assert figures.global_batch == 8
    assert figures.phases["wait"] == 0
    assert figures.phases["compute"] > 0
    # What is inside of a step that XLA compiles isn't known.
    assert (figures.phases["update"] == 0) == ("jit_compile" in compiled)
    assert sum(figures.phases.values()) == pytest.approx(figures.step_seconds)
    assert figures.slowest is None
    found = Board(tmp_path / "scaling")
    assert len(series(found, "examples_per_second/all")) == 3
    assert [s for s, _ in series(found, "job/workers")] == [8, 16, 24]
    assert "bytes/per_step" not in found.Tags()["tensors"]
    assert "how this job scales" in said()[-1]


class Fails(keras.callbacks.Callback):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_epoch_end(self, epoch, logs=None):
        raise self.error


def check_told(model, folder):
    board = ScalingTensorBoard(folder, update_freq=4, verbose=0)
    with pytest.raises(OverflowError):
        fit(model, board, Fails(OverflowError("Too much.")))
    assert not model.distribute_strategy.extended.kerasdist.timer.running
    told = text(Board(folder / "scaling"), "events")
    assert told == ["- `fit` ended with OverflowError: Too much."]
    assert board.verdict is not None


def test_a_model_can_be_trained_again_with_or_without(strategy, tmp_path):
    """Also after a `fit` that has failed, was interrupted, or refused."""
    timer = strategy.extended.kerasdist.timer
    board = ScalingTensorBoard(tmp_path, verbose=0)
    other = ScalingTensorBoard(tmp_path / "other", verbose=0)
    model = build(strategy)
    # Two of them would measure half of it each.
    with pytest.raises(
        ValueError, match=r"^A .fit. must have only one ScalingTensorBoard.*/other'"
    ):
        fit(model, board, other)
    assert not timer.running
    fit(model, board)
    first = board.figures
    assert first.steps in (22, 23)
    assert not timer.running
    fit(model, epochs=1)
    model.evaluate(X, X[:, :2], verbose=0, callbacks=[])
    fit(model, board, epochs=1)
    assert board.figures is not first
    # Traced already, with the clock in it: every step counts.
    assert board.figures.steps == 8
    fit(model, other, epochs=2)
    # Those that aren't measured are what they are without it: traced already, too.
    assert other.figures.steps == 16
    # Nobody tells callbacks of a Ctrl-C: the clock ran on.
    with pytest.raises(KeyboardInterrupt):
        fit(model, board, Fails(KeyboardInterrupt()))
    fit(model, board, epochs=1)
    assert board.figures.steps == 8
    check_told(model, tmp_path / "failed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"baseline": -1}, r"Received: baseline=-1; expected a positive number"),
        ({"baseline": math.inf}, r"Received: baseline=inf; "),
        ({"calibrate": "yes"}, r"Received: calibrate='yes'; expected True or False\."),
        ({"log_dir": 5, "baseline": 0}, r"log_dir=5; .*; and baseline=0; .*\."),
        ({"baseline": 5, "calibrate": True}, r"=5 and calibrate=True; expected one of"),
        ({"update_freq": "batch"}, r"Received: update_freq='batch'; expected 'auto', "),
        ({"prediction": 3}, r"Received: prediction=3; expected the path of a file"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ScalingTensorBoard(**{"log_dir": "unused", **arguments})


def test_a_prediction_stands_beside_what_is_measured(strategy, tmp_path, said):
    link, file = HostLink(1e-4, 1e-9), tmp_path / "prediction.json"
    profile = Profile(rows=8, compute=(30.0,), update=10.0)
    guess = {n: predict(profile, Setup(link=link), n) for n in (1, 2)}
    board = ScalingTensorBoard(tmp_path, prediction=file)
    model = build(strategy)
    for written in (None, "{}", "[1]", '{"workers": {"1": {"step_s": 1}}}', "x"):
        if written is not None:
            file.write_text(written)
        with pytest.raises(ValueError, match=r"`prediction` must be a file .*\.json"):
            fit(model, board)
    file.write_text(json.dumps(report.to_json(profile, guess, None)))
    fit(model, board)
    assert board.figures.predicted == guess[1]
    assert board.figures.predicted_rows == pytest.approx(8)
    lines = Board(tmp_path / "scaling" / "predicted")
    assert {s for _, s in series(lines, "step_seconds/whole")} == {40.0}
    assert series(lines, "examples_per_second")[0][1] == pytest.approx(0.2)
    sentence = r"100% shorter than the 40.00 s that were predicted \(36.00 s to 44"
    assert re.search(sentence, said()[-1])
    assert "The prediction was for" not in said()[-1]


def test_without_a_strategy_of_ours_nothing_is_written(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"Received: a model with .*RingStrategy\(\)"):
        fit(model, ScalingTensorBoard(tmp_path), epochs=1)
    assert not list(Path(tmp_path).iterdir())
    assert not kerasdist.RingStrategy().extended.kerasdist.timer.running


SLEEP = 0.005


class Slow(keras.layers.Layer):
    def call(self, inputs):
        def late(value):
            time.sleep(SLEEP)
            return value

        one = tf.reduce_sum(tf.stop_gradient(inputs) * 0) + 1.0
        late_one = tf.numpy_function(late, [one], tf.float32)
        return inputs * tf.ensure_shape(late_one, [])


def test_stages(tmp_path):
    """One device: all that it doesn't compute or update it idles. See `stage_clock`."""
    strategy = kerasdist.ModelParallelStrategy(
        {".*first": "CPU:0"}, devices=["CPU:0"], micro_batches=2
    )
    model = build(strategy, Slow())
    board = ScalingTensorBoard(tmp_path, update_freq="epoch", verbose=0)
    fit(model, board)
    figures = board.figures
    assert figures.steps in (22, 23)  # the calls that have traced don't count
    assert figures.global_batch == 8
    # The layer sleeps once for each micro-batch.
    assert figures.phases["compute"] > 2 * SLEEP
    (idle,) = figures.idle
    assert idle < 1 - 2 * SLEEP / figures.step_seconds + 0.01
    found = Board(tmp_path / "scaling")
    assert len(series(found, "idle_percent/stage_0")) == 3
    # Nothing goes from device to device.
    assert "bytes/per_step" not in found.Tags()["tensors"]
    check_told(model, tmp_path / "failed")
