"""Gradient accumulation: one collective of the gradients per k steps.

That the numbers are those of one process is in `cases`; here is what is sent, and
what becomes of a window that is open when something is saved or begins.
"""

import numpy as np
import pytest
from scripts import with_prelude

from workers import Workers

pytestmark = [pytest.mark.timeout(400), pytest.mark.soak]

SCRIPT = with_prelude("""
from kerasdist.collectives.checked import CheckedCommunicator

folder = os.environ["FOLDER"]
strategy = kerasdist.RingStrategy(timeout=60)
sent = []  # bytes of each all_reduce
original = CheckedCommunicator.all_reduce

def all_reduce(self, buffers, op="sum", **more):
    sent.append(sum(np.asarray(buffer).nbytes for buffer in buffers))
    return original(self, buffers, op, **more)

CheckedCommunicator.all_reduce = all_reduce
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 4)).astype("float32")
y = (x.sum(1) > 0).astype("int64")

def build(steps, **more):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        m = keras.Sequential([keras.Input((4,)), keras.layers.Dense(50)])
        m.compile(
            keras.optimizers.SGD(
                0.5, momentum=0.9, gradient_accumulation_steps=steps, **more
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return m

def fit(m, batch_size, callbacks=(), epochs=1):
    sent.clear()
    m.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0,
          callbacks=list(callbacks))
    return sent[:]

def numbers(variables):
    return [np.asarray(v).tolist() for v in variables]

found = {}
# 5 and 10 steps, each with one update.
found["sent"] = [fit(build(5), 8), fit(build(10), 4)]
# Every window is open at the end of an epoch but the last: 3, 2, then 1 step.
m = build(3, global_clipnorm=0.1)
names = folder + "/{epoch}-{batch}.keras"
found["open"] = fit(m, 9, [keras.callbacks.ModelCheckpoint(names, save_freq=4)], 3)
found["weights"] = numbers(m.get_weights())
found["files"] = sorted(os.listdir(folder))
for name in found["files"]:
    with strategy.scope():
        loaded = keras.models.load_model(os.path.join(folder, name))
    found[name] = numbers(loaded.optimizer.variables)
fit(loaded, 9)
found["continued"] = numbers(loaded.get_weights())

# A loop of the user's, which ends in the midst of a window. Gradients are summed.
m = build(3)

@tf.function
def step(factor):
    def run(factor):
        variables = m.trainable_variables
        gradients = [factor * tf.ones_like(v.value) for v in variables]
        m.optimizer.apply_gradients(zip(gradients, variables))
    strategy.run(run, args=(factor,))

with strategy.scope():
    m.optimizer.build(m.trainable_variables)
for number in range(4):
    mine = 3.0 if strategy.size == 1 else 1.0 + strategy.rank
    step(tf.constant(mine * number))
found["loop"] = numbers(m.get_weights())
fit(m, 8)
found["after the loop"] = numbers(m.get_weights())
result(found)
""")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    said = []
    for size in (1, 2):
        env = {"FOLDER": str(tmp_path_factory.mktemp("saved"))}
        with Workers(SCRIPT, size, env=env, deadline=190) as job:
            said.append([finished.result for finished in job.succeed()])
    return said


GRADIENTS = 4 * (4 * 50 + 50)  # bytes


def test_gradients_are_sent_once_per_window(jobs):
    five, ten = jobs[1][0]["sent"]
    assert [size for size in five if size >= GRADIENTS] == [GRADIENTS]
    # Nothing else is sent per step: not even how many rows the global batch has.
    assert len(five) == len(ten)


def test_open_windows_are_shared_when_they_may_be_saved(jobs):
    large = [size for size in jobs[1][0]["open"] if size >= GRADIENTS]
    # 15 steps, 5 updates. Open: after two of three files, and two of three epochs.
    updates, saved, ends = 5, 2, 2
    assert len(large) <= updates + saved + ends
    (alone,), (chief, other) = jobs
    assert len(alone["files"]) == 3
    for name in alone["files"]:
        assert chief[name] == other[name]
        for mine, expected in zip(chief[name], alone[name], strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-7)


def test_weights_are_those_of_one_process(jobs):
    (alone,), (chief, other) = jobs
    for what in ("weights", "continued", "loop"):
        assert chief[what] == other[what]
        for mine, expected in zip(chief[what], alone[what], strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-7)
    # `fit` begins in the midst of a window: each rank has its own accumulators, which
    # isn't a wrong initial state.
    assert chief["after the loop"] == other["after the loop"]
