"""Where schedules and warm-ups of asynchronous workers go on after an interruption.

The workers take the batches of an epoch in their order, each after the one before it:
so how many steps each has heard of at which step is known by hand.

    two of them, interrupted ── again, in the same process
         └── one worker, interrupted ── itself again
                  └── two of them
"""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
from scripts import PRELUDE

from kerasdist.strategies.asynchronous.tables import StepCount
from workers import Workers

pytestmark = pytest.mark.timeout(150)

COMMON = (
    PRELUDE
    + """
import shutil
from kerasdist.callbacks import BroadcastInitialState, ScaleLearningRate

folder = os.environ["FOLDER"]
x = np.ones((24, 1), "float32")
y = np.zeros((24, 1), "float32")

class Slope(keras.losses.Loss):
    "With a gradient of 1: a weight sinks by the rate."
    def call(self, y_true, y_pred):
        return y_pred[:, 0]

class Killed(Exception): pass

def build(scope):
    with scope:
        m = keras.Sequential([
            keras.Input((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ])
        schedule = keras.optimizers.schedules.ExponentialDecay(0.125, 1, 0.97)
        m.compile(keras.optimizers.SGD(schedule), Slope())
    return m

def fit(m, order, backup, *more, **warmup):
    "The weight, and the place and the rate of each step."
    kept = keras.callbacks.BackupAndRestore(
        backup, save_freq=1, delete_checkpoint=False)
    scale = ScaleLearningRate(base_batch_size=2, **(warmup or {"warmup_epochs": 3}))
    with contextlib.suppress(Killed):
        m.fit(x, y, batch_size=4, epochs=3, verbose=0,
              callbacks=[scale, kept, *more, order])
    return [float(m.get_weights()[0][0, 0]), order.found]
"""
)

IN_ORDER = """
strategy = kerasdist.ParameterServerStrategy("async", timeout=40)
rank = strategy.rank

class InOrder(keras.callbacks.Callback):
    "Notes the place and the rate of each step."
    def __init__(self, name, kill=None):
        super().__init__()
        self.name, self.kill, self.found, self.epoch = name, kill, [], None
    def path(self, *place):
        return os.path.join(folder, "_".join(map(str, [self.name, *place])))
    def wait_for(self, path):
        end = time.monotonic() + 30
        while not os.path.exists(path):
            if os.path.exists(self.path("killed")):
                raise Killed
            if time.monotonic() > end:
                raise TimeoutError(path)
            time.sleep(0.002)
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch, self.first = epoch, True
    def on_train_batch_begin(self, batch, logs=None):
        if self.first:
            # Each has a batch, before one of them takes them all.
            open(self.path("here", self.epoch, rank), "w").close()
            self.wait_for(self.path("here", self.epoch, 1 - rank))
        self.first = False
        if batch:
            self.wait_for(self.path(self.epoch, batch - 1))
        optimizer = self.model.optimizer
        self.found.append([self.epoch, batch, float(optimizer.learning_rate)])
    def on_train_batch_end(self, batch, logs=None):
        if self.kill == self.epoch and rank == 0:
            open(self.path("killed"), "w").close()
            raise Killed
        open(self.path(self.epoch, batch), "w").close()
"""

ASYNC = COMMON + IN_ORDER

INTERRUPTED = """
m = build(strategy.scope())
found = [fit(m, InOrder("first", kill=1), folder + "/backup")]
if rank == 0:
    shutil.copytree(folder + "/backup", folder + "/one")
# In the same process, with graphs that were traced before.
found.append(fit(m, InOrder("again"), folder + "/backup"))
result([*found, int(m.optimizer.iterations)])
"""

RESUMED = """
m = build(strategy.scope())
# Only the chief has the file.
share = BroadcastInitialState(verbose=0)
order = InOrder("resumed")
result(fit(m, order, f"{folder}/back_{rank}", share, warmup_steps=18))
"""

RATES = """
class Rates(keras.callbacks.Callback):
    "Notes the place and the rate of each step."
    def __init__(self, kill=None):
        super().__init__()
        self.kill, self.found = kill, []
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_begin(self, batch, logs=None):
        rate = float(self.model.optimizer.learning_rate)
        self.found.append([self.epoch, batch, rate])
    def on_train_batch_end(self, batch, logs=None):
        if self.kill == [self.epoch, batch]:
            raise Killed
"""

IN_STEP = COMMON + RATES

ONE_WORKER = """
# Without a strategy, and with a graph that was traced before.
m = build(contextlib.nullcontext())
m.fit(x, y, batch_size=4, verbose=0, callbacks=[ScaleLearningRate(verbose=0)])
found = [fit(m, Rates(kill=[2, 2]), folder + "/one")]
shutil.copytree(folder + "/one", folder + "/back_0")
m = build(kerasdist.RingStrategy().scope())
found.append(fit(m, Rates(), folder + "/one", warmup_steps=18))
result([*found, int(m.optimizer.iterations)])
"""


def rate(step):
    """By hand: the schedule, and a warm-up to twice that in 18 steps."""
    return 0.125 * 0.97**step * (1 + min(step / 18, 1.0))


def check(found, begin):
    """Each step of one rank, where each epoch begins with so many behind."""
    epoch, heard = None, 0
    for at, batch, read in found:
        if at != epoch:
            # Where an epoch begins all have heard of everything.
            epoch, heard = at, begin[at]
        assert read == pytest.approx(rate(heard), rel=1e-5), (at, batch)
        # A step ends with an exchange: it and all before it are heard of.
        heard = begin[at] + batch + 1
    return [read for _, _, read in found]


def check_all(results, begin, weight):
    """All steps of both ranks; the weight has sunk by their rates."""
    rates = [check(found, begin) for _, found in results]
    places = sorted(place[:2] for _, found in results for place in found)
    assert places == [[epoch, batch] for epoch in begin for batch in range(6)]
    assert all(rates)
    for last, _ in results:
        assert last == pytest.approx(weight - np.sum(rates[0] + rates[1]), rel=1e-5)


def check_in_step(found, weight, places, behind):
    """All steps of one worker, in step with all others; the weight has sunk by them."""
    last, steps = found
    assert [step[:2] for step in steps] == places
    rates = [step[2] for step in steps]
    by_hand = [rate(behind + i) for i in range(len(places))]
    np.testing.assert_allclose(rates, by_hand, rtol=1e-5)
    assert last == pytest.approx(weight - np.sum(by_hand), rel=1e-5)
    return last


def facts(path):
    return json.loads((path / "training_metadata.json").read_text())


def test_schedule_and_warm_up_go_on_with_the_steps_that_are_in_the_weights(tmp_path):
    env = {"FOLDER": str(tmp_path)}
    with Workers(ASYNC + INTERRUPTED, 2, servers=1, env=env, deadline=90) as job:
        results = [each.result for each in job.succeed()[:2]]
    chief, other = (first[1] for first, _, _ in results)
    check(chief, {0: 0, 1: 6})
    check(other, {0: 0, 1: 6})
    # What was saved is the weight after the chief's last step: it, and all before it.
    assert chief[-1][0] == 1
    behind = 6 + chief[-1][1] + 1
    rates = sorted(
        (place, found)
        for rank in (chief, other)
        for *place, found in rank
        if place <= chief[-1][:2]
    )
    assert len(rates) == behind
    weight = -sum(found for _, found in rates)
    assert results[0][0][0] == pytest.approx(weight, rel=1e-5)
    assert facts(tmp_path / "one") == {
        "epoch": 1,
        "batch": chief[-1][1],
        "kerasdist": {"steps": behind, "steps_of_epoch": behind - 6},
    }
    assert not list((tmp_path / "one").glob("*.new"))
    begin = {1: behind, 2: behind + 6}
    check_all([again for _, again, _ in results], begin, weight)
    # The optimizers' own: the chief's at the time, and since then each worker's.
    own = len(chief)
    assert [n for *_, n in results] == [own + len(again[1]) for _, again, _ in results]

    rest = [[epoch, batch] for epoch in (1, 2) for batch in range(6)]
    line = f"18 step(s) of warm-up, {behind} of them behind"
    with Workers(IN_STEP + ONE_WORKER, 1, env=env, deadline=60) as job:
        (alone,) = job.succeed()
    first, second, iterations = alone.result
    assert line in alone.output
    weight = check_in_step(first, weight, rest[:9], behind)
    behind += 9
    assert facts(tmp_path / "back_0") == {
        "epoch": 2,
        "batch": 2,
        "kerasdist": {"steps": behind, "steps_of_epoch": 3},
    }
    check_in_step(second, weight, rest[6:], behind)
    assert iterations == len(chief) + 9 + 6

    with Workers(ASYNC + RESUMED, 2, servers=1, env=env, deadline=90) as job:
        finished = job.succeed()[:2]
    check_all([each.result for each in finished], {2: behind}, weight)
    line = f"18 step(s) of warm-up, {min(behind, 18)} of them behind"
    assert line in finished[0].output


def test_it_counts_from_where_an_optimizer_was():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=3)
    count = StepCount("/device:CPU:0")
    assert (count.of(optimizer), count.progress()) == (None, None)
    # Two windows, and one of the third.
    optimizer.build([keras.Variable([0.0])])
    optimizer._iterations.assign(7)
    count.begin(optimizer, 0, None)
    count.begin_epoch()
    assert count.progress() == (7, 0)
    count.note(4)
    assert count.progress() == (19, 12)
    # What was pushed between two epochs is an update, but no step.
    count.exclude_update()
    count.begin_epoch()
    assert count.progress() == (16, 0)
    # Another `fit` goes on, one that is resumed as it is told.
    count.begin(optimizer, 4, None)
    assert count.progress() == (16, 0)
    count.begin(optimizer, 4, 31)
    assert count.progress() == (31, 15)
    other = StepCount("/device:CPU:0")
    other.join(optimizer, count.offset_of(optimizer))
    other.note(5)
    assert int(other.of(optimizer)) == 34
    # Of no weights there's no count.
    count.begin(None, 0, None)
    assert count.progress() is None
