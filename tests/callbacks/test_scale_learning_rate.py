"""ScaleLearningRate: the rate of every step against what is computed by hand.

The models here have a gradient of exactly 1: by how much a weight has sunk is the rate
that a step was taken with.
"""

import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from scripts import with_prelude
from soak import soak

from kerasdist.callbacks import ScaleLearningRate
from kerasdist.callbacks.scale_learning_rate import steps_behind
from workers import Workers

pytestmark = pytest.mark.timeout(150)

COMMON = with_prelude("""
from kerasdist.callbacks import BroadcastInitialState, ScaleLearningRate

folder = os.environ.get("FOLDER", "")
x = np.ones((24, 1), "float32")
y = np.zeros((24, 1), "float32")

class Slope(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return y_pred[:, 0]

class Rates(keras.callbacks.Callback):
    def __init__(self, optimizer=None):
        super().__init__()
        self.optimizer, self.read, self.weights = optimizer, [], []
    def on_train_batch_begin(self, batch, logs=None):
        if not self.weights:
            self.weights.append(float(self.model.get_weights()[0][0, 0]))
        optimizer = self.optimizer or self.model.optimizer
        self.read.append(float(getattr(optimizer, "learning_rate", 0)))
    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(float(self.model.get_weights()[0][0, 0]))
    def found(self):
        return [(-np.diff(self.weights)).tolist(), self.read]

def build(rate=0.125, optimizer=keras.optimizers.SGD, **more):
    m = keras.Sequential([
        keras.Input((1,)),
        keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
    ])
    m.compile(optimizer(rate), Slope(), **more)
    return m

def scoped(*args, **more):
    with strategy.scope():
        return build(*args, **more)

class Gan(keras.Model):
    "Two weights with an optimizer each, as the parts of a GAN have."
    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
                      for _ in range(2)]
        for part in self.parts:
            part.build((None, 1))
        self.built = True
    def compile(self, first, *others):
        super().compile()
        self.first, self.others = first, others
    def call(self, x):
        return self.parts[0](x) + self.parts[1](x)
    def train_step(self, data):
        for part, optimizer in zip(self.parts, [self.first, *self.others]):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(part(data[0]))
            weights = part.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}

def gan():
    m = Gan()
    m.compile(keras.optimizers.SGD(0.125), keras.optimizers.SGD(0.5))
    return m

def sunk(m):
    return [-float(weight[0, 0]) for weight in m.get_weights()]

def fit(m, callbacks, epochs=3, batch_size=4, rate_of=None, **more):
    rates = Rates(rate_of)
    history = m.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=0,
                    callbacks=[*callbacks, rates], **more)
    return [*rates.found(), history.history.get("learning_rate")]
""")

here: dict = {}
exec(COMMON, here)  # the same in this process
build, fit, gan, sunk = (here[name] for name in ("build", "fit", "gan", "sunk"))


def warming_up():
    """Twice the rate after 9 steps."""
    return ScaleLearningRate(warmup_epochs=1.5, base_batch_size=2, verbose=0)


def expected(steps, base=0.125, factor=2.0, warmup=9, first=0):
    """The rates of `steps` steps: what the docstring says, in float64."""
    found = []
    for step in range(first, first + steps):
        share = min(step / warmup, 1.0) if warmup else 1.0
        rate = base(step) if callable(base) else base
        found.append(rate * (1 + (factor - 1) * share))
    return found


def check(found, rates):
    np.testing.assert_allclose(found[0], rates, rtol=1e-5)
    np.testing.assert_allclose(found[1], rates, rtol=1e-6)


# One process without a strategy.


def test_it_scales_by_the_batch_size_and_logs_one_line(said, tmp_path):
    m = build()
    scale = ScaleLearningRate(warmup_epochs=1.5, base_batch_size=1)
    check(fit(m, [scale]), expected(18, factor=4, warmup=9))
    assert (scale.factor, scale.steps, scale.base_learning_rate) == (4.0, 9, 0.125)
    assert said() == [
        "kerasdist: learning rate 0.125 x 4 (rule 'linear', global batch 4 instead of "
        "1) = 0.5, 9 step(s) of warm-up"
    ]
    # A saved model is that of plain Keras.
    plain = build()
    first, second = ({**each.optimizer.get_config(), "name": ""} for each in (m, plain))
    assert first == second
    m.save(tmp_path / "m.keras")
    with zipfile.ZipFile(tmp_path / "m.keras") as file:
        assert b"kerasdist" not in file.read("config.json")
    known = {"Slope": here["Slope"]}
    again = keras.models.load_model(tmp_path / "m.keras", custom_objects=known)
    assert float(again.optimizer.learning_rate) == 0.125
    assert [v.path for v in again.optimizer.variables] == [
        v.path for v in m.optimizer.variables
    ]


@pytest.mark.parametrize(
    ("options", "factor", "warmup"),
    [
        ({"rule": "sqrt", "warmup_steps": 7, "base_batch_size": 1}, 2.0, 7),
        ({"rule": "none", "base_batch_size": 1}, 1.0, 0),
        ({"warmup_epochs": 0, "base_batch_size": 2}, 2.0, 0),
        # A smaller batch: the longer steps aren't the safe ones.
        ({"base_batch_size": 16}, 0.25, 0),
        ({}, 1.0, 0),
    ],
)
def test_rules(options, factor, warmup):
    scale = ScaleLearningRate(**options, verbose=0)
    check(fit(build(), [scale]), expected(18, factor=factor, warmup=warmup))
    assert scale.steps == warmup


@pytest.mark.soak
def test_every_optimizer_that_is_wrapped():
    def wrapped(rate):
        inner = keras.optimizers.SGD(rate)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0)

    def accumulating(rate):
        return keras.optimizers.SGD(rate, gradient_accumulation_steps=3)

    rates = expected(18)
    check(fit(build(optimizer=wrapped), [warming_up()]), rates)
    found = fit(build(optimizer=accumulating), [warming_up()])
    np.testing.assert_allclose(found[1], rates, rtol=1e-6)
    kept = [rate if step % 3 == 2 else 0.0 for step, rate in enumerate(rates)]
    np.testing.assert_allclose(found[0], kept, rtol=1e-5)
    # Chosen by variable; older Kerases have none of these.
    if hasattr(keras.optimizers, "MultiOptimizer"):
        inner = keras.optimizers.SGD(0.125)
        m = build(optimizer=lambda _: keras.optimizers.MultiOptimizer(lambda _: inner))
        check(fit(m, [warming_up()], rate_of=inner), rates)


@pytest.mark.parametrize("first", [soak(True), False])
def test_with_keras_schedulers_in_either_order(first):
    def in_order(callbacks):
        scale = warming_up()
        return [scale, *callbacks] if first else [*callbacks, scale]

    # What it's given is what it has set: the base rate.
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    found = fit(build(), in_order([halve]))
    check(found, expected(18, lambda step: 0.0625 * 0.5 ** (step // 6)))
    # In the logs it's the rate of the step that comes next.
    np.testing.assert_allclose(found[2][:1], [0.0625 * (1 + 6 / 9)], rtol=1e-6)

    plateau = keras.callbacks.ReduceLROnPlateau(
        "loss", factor=0.5, patience=1, min_delta=1e6, min_lr=0.04
    )
    found = fit(build(), in_order([plateau]), epochs=5)
    base = [0.125, 0.125, 0.0625, 0.04, 0.04]
    check(found, expected(30, lambda step: base[step // 6]))
    after = [0.125 * (1 + 6 / 9), 0.25, 0.125, 0.08, 0.08]
    np.testing.assert_allclose(found[2], after, rtol=1e-6)


def test_a_callback_of_ones_own_reads_and_sets_the_rate_of_the_next_step():
    class Halve(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch:
                optimizer = self.model.optimizer
                optimizer.learning_rate = optimizer.learning_rate * 0.5

    scale = warming_up()
    rates = expected(18, lambda step: 0.125 * 0.5 ** (step // 6))
    check(fit(build(), [scale, Halve()]), rates)
    scale.base_learning_rate = 0.5
    assert scale.base_learning_rate == 0.5
    optimizer = scale.model.optimizer
    assert float(optimizer.learning_rate) == 1.0
    # As in scripts for Keras, where it's a variable.
    optimizer.learning_rate.assign(optimizer.learning_rate * 0.25)
    assert scale.base_learning_rate == 0.125


def test_several_optimizers(said):
    m = gan()
    names = [each.name for each in (m.optimizer, m.first, *m.others)]
    scale = ScaleLearningRate(warmup_epochs=1.5, base_batch_size=2)
    fit(m, [scale])
    total = sum(expected(18))
    np.testing.assert_allclose(sunk(m), [total, 4 * total], rtol=1e-5)
    assert said() == [
        f"kerasdist: learning rate 0.001 ({names[0]}), 0.125 ({names[1]}), 0.5 "
        f"({names[2]}) x 2 (rule 'linear', global batch 4 instead of 2) = 0.002, 0.25, "
        "1, 9 step(s) of warm-up"
    ]


def test_other_ways_to_call_fit():
    """With an evaluation at the beginning, and a CallbackList that knows nothing."""

    class First(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.evaluate(here["x"], here["y"], batch_size=24, verbose=0)

    m = build()
    scale = warming_up()
    given = keras.callbacks.CallbackList([First(), scale], add_history=True, model=m)
    m.fit(here["x"], here["y"], batch_size=4, epochs=1, callbacks=given)
    assert (scale.factor, scale.steps) == (2.0, 9)


def test_several_fits_are_one_warm_up(said):
    m = build()
    # What was traced without the callback doesn't know of it.
    check(fit(m, [], epochs=1), expected(6, factor=1))
    m.optimizer.iterations.assign(0)

    def scaled(**more):
        return fit(m, [ScaleLearningRate(base_batch_size=2, **more)])

    check(scaled(warmup_epochs=4), expected(18, warmup=24))
    check(scaled(warmup_epochs=4), expected(18, warmup=24, first=18))
    lines = said()
    assert lines[1].endswith("= 0.25, 24 step(s) of warm-up, 18 of them behind")
    # The target of another growth of the batch, from the base rate that it was.
    found = fit(m, [ScaleLearningRate(base_batch_size=1, verbose=0)], epochs=1)
    check(found, expected(6, factor=4, warmup=0))


def test_where_a_warm_up_goes_on():
    # (steps taken, epoch, batches of it, steps per epoch, before, steps of the warm-up)
    assert steps_behind(0, 0, 0, 6, None, 30) == 0
    assert steps_behind(6, 0, 0, 6, None, 30) == 6
    assert steps_behind(4, 0, 4, 6, None, 30) == 4
    # Resumed by the same number of workers, in the midst of an epoch too.
    assert steps_behind(18, 3, 0, 6, None, 30) == 18
    assert steps_behind(20, 3, 2, 6, None, 30) == 20
    # By others: epochs count, which were of 12 steps. 12 may be 2 epochs of 6, too.
    assert steps_behind(36, 3, 0, 6, None, 30) == 18
    assert steps_behind(12, 1, 0, 6, None, 30) == 6
    assert steps_behind(12, 1, 0, 8, None, 40) == 8
    assert steps_behind(18, 3, 0, 12, None, 60) == 36
    # In the midst of an epoch: 1 1/3 epochs.
    assert steps_behind(16, 1, 4, 6, None, 30) == 8
    # An epoch was begun three times, or by an optimizer that's new.
    assert steps_behind(14, 1, 2, 6, None, 30) == 7
    assert steps_behind(0, 3, 2, 6, None, 30) == 18
    # After another fit of this process: as large a part of it.
    assert steps_behind(18, 0, 0, 3, (18, 24), 12) == 9
    assert steps_behind(40, 0, 0, 3, (40, 24), 12) == 12


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match=r"^`ScaleLearningRate` can't be made\. ") as e:
        ScaleLearningRate("cubic", -1, warmup_steps=0.5, base_batch_size=0)
    for part in ("rule='cubic'", "warmup_epochs=-1", "warmup_steps=0.5", "_size=0"):
        assert part in str(e.value)
    with pytest.raises(ValueError, match=r"expected one of them; and batch_size=8 "):
        ScaleLearningRate(warmup_epochs=3, warmup_steps=10, batch_size=8)
    m = build()
    rows = tf.TensorSpec((None, 1))
    unknown = tf.data.Dataset.from_generator(
        lambda: iter([(here["x"], here["y"])] * 6), output_signature=(rows, rows)
    )
    quiet = {"verbose": 0, "shuffle": False}
    given = {"base_batch_size": 6}
    with pytest.raises(ValueError, match=r"^The global batch size isn't known"):
        m.fit(unknown, callbacks=[ScaleLearningRate(**given)], **quiet)
    given["batch_size"] = 24
    with pytest.raises(ValueError, match=r"^The number of steps in `warmup_epochs` is"):
        m.fit(unknown, callbacks=[ScaleLearningRate(**given)], **quiet)
    scale = ScaleLearningRate(**given, warmup_steps=3, verbose=0)
    unknown = unknown.apply(tf.data.experimental.assert_cardinality(6))
    m.fit(unknown, callbacks=[scale], **quiet)
    assert (scale.factor, scale.steps) == (4.0, 3)


XLA = """
logical_devices(2)
with tf.device("/device:CPU:1"):
    m = build(jit_compile=True)
    result(fit(m, [ScaleLearningRate(warmup_epochs=1.5, base_batch_size=2)]))
"""


@pytest.mark.soak
def test_what_xla_compiles_is_on_one_device():
    """As on a GPU, where Keras compiles by default: not with variables of the host."""
    with Workers(COMMON + XLA, 1, deadline=60) as job:
        (finished,) = job.succeed()
    check(finished.result, expected(18))


# With strategies.

RING = """
strategy = kerasdist.RingStrategy(timeout=60)
# A rate that Keras sets, in two fits.
scale = ScaleLearningRate(warmup_epochs=1.5)
m = scoped()
scheduler = keras.callbacks.LearningRateScheduler(lambda e, rate: rate * 0.5)
found = {"scheduler": fit(m, [scheduler, scale])}
found["again"] = fit(m, [ScaleLearningRate(warmup_epochs=1.5)], epochs=1)
found["factor"] = scale.factor
# A schedule, and several steps in one execution.
decay = keras.optimizers.schedules.ExponentialDecay(0.125, 1, 0.9)
found["execution"] = fit(scoped(decay, steps_per_execution=4), [scale])

# It was killed in the midst of its second epoch; then all goes on, with what only the
# chief can read.
class Killed(Exception): pass
class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (1, 3):
            raise Killed
def backup():
    return keras.callbacks.BackupAndRestore(
        f"{folder}/resume_{strategy.rank}", save_freq=4)
try:
    fit(scoped(), [ScaleLearningRate(warmup_epochs=2), backup(), Kill()])
except Killed:
    pass
share = BroadcastInitialState(verbose=0)
found["resumed"] = fit(scoped(), [ScaleLearningRate(warmup_epochs=2), backup(), share])

# What others go on with, see below: an epoch of 6 steps.
m = scoped()
kept = keras.callbacks.BackupAndRestore(folder + "/others", delete_checkpoint=False)
fit(m, [ScaleLearningRate(warmup_epochs=5), kept], epochs=1)
try:
    fit(m, [ScaleLearningRate(warmup_epochs=2 + strategy.rank)])
except ValueError as error:
    found["differ"] = str(error)
scale = ScaleLearningRate(warmup_epochs=1.5, base_batch_size=2)
own = kerasdist.RingStrategy(shard="off", timeout=60)
with own.scope():
    m = build()
found["own"] = fit(m, [scale], batch_size=2)
result(found)
"""

OTHERS = """
strategy = kerasdist.RingStrategy(timeout=60)
kept = keras.callbacks.BackupAndRestore(folder + "/others", delete_checkpoint=False)
scale = ScaleLearningRate(warmup_epochs=5)
result(fit(scoped(), [scale, kept], batch_size=6, epochs=4))
"""


def test_ring_and_another_number_of_workers(tmp_path):
    env = {"FOLDER": str(tmp_path)}
    with Workers(COMMON + RING, 2, env=env, deadline=120) as job:
        finished = job.succeed()
    for each in finished:
        found = each.result
        rates = expected(18, lambda step: 0.0625 * 0.5 ** (step // 6))
        check(found["scheduler"], rates)
        check(found["again"], expected(6, 0.125**2, first=18))
        assert found["factor"] == 2.0
        rates = expected(18, lambda step: 0.125 * 0.9**step)
        # The last one of an epoch has two steps.
        ends = [(i, min(i + 4, e + 6)) for e in (0, 6, 12) for i in (e, e + 4)]
        sums = [sum(rates[begin:end]) for begin, end in ends]
        np.testing.assert_allclose(found["execution"][0], sums, rtol=1e-5)
        # Keras begins the epoch again; the optimizer has taken 8 steps.
        check(found["resumed"], expected(12, warmup=12, first=8))
        assert found["differ"] == (
            "`ScaleLearningRate` must be given the same arguments and data on all "
            "ranks. Received: factor 2 and 12 steps of warm-up on rank 0; factor 2 and "
            "18 steps of warm-up on rank 1. Leave out the condition on the rank, and "
            "use arrays and batches of the same length on all ranks."
        )
        # Batches of 2 rows from each of two workers.
        check(found["own"], expected(36, factor=2, warmup=18))
    lines = [line for line in finished[0].output.splitlines() if " x " in line]
    assert lines[0] == (
        "kerasdist: learning rate 0.0625 x 2 (rule 'linear', 2 replica(s)) = 0.125, "
        "9 step(s) of warm-up"
    )
    assert "kerasdist: learning rate" not in finished[1].output
    # An epoch has passed, of 6 steps; now it's 4 steps. The base rate is what it was,
    # the target that of 3 workers.
    with Workers(COMMON + OTHERS, 3, env=env, deadline=60) as job:
        finished = job.succeed()
    for each in finished:
        check(each.result, expected(12, factor=3, warmup=20, first=4))
    assert "20 step(s) of warm-up, 4 of them behind" in finished[0].output


ASYNC = """
strategy = kerasdist.ParameterServerStrategy("async", timeout=60)
from kerasdist._keras.learning_rate import steps_of
steps = []
class Steps(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        steps.append(int(steps_of(self.model.optimizer)))
plain = fit(scoped(), [ScaleLearningRate()])
m = scoped()
found = fit(m, [ScaleLearningRate(warmup_epochs=1.5, base_batch_size=2), Steps()])
result([plain, found, steps, float(m.get_weights()[0][0, 0])])
"""


@pytest.mark.soak
def test_asynchronous_workers():
    """Each step is one worker's; the warm-up counts the steps of all."""
    with Workers(COMMON + ASYNC, 2, servers=1, deadline=90) as job:
        finished = job.succeed()[:2]
    results = [each.result for each in finished]
    taken = 0
    for plain, found, steps, _ in results:
        np.testing.assert_allclose(plain[1], [0.125] * len(plain[1]))
        assert len(steps) == len(found[1])
        taken += len(steps)
        by_hand = [expected(1, first=step)[0] for step in steps]
        np.testing.assert_allclose(found[1], by_hand, rtol=1e-6)
    assert taken == 18
    # The weights have sunk by all rates of all workers together.
    total = sum(sum(found[1]) for _, found, _, _ in results)
    for *_, weight in results:
        assert weight == pytest.approx(-total, rel=1e-5)
