import numpy as np
import pytest
from scripts import with_prelude

from sessions import Session
from workers import Workers

SETUP = with_prelude("""
strategy = kerasdist.RingStrategy(timeout=60)
""")

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
"""


SCRIPT = SETUP + BEFORE


@pytest.fixture(scope="module")
def session():
    with Session(SETUP, 2, before=BEFORE, env={"FOLDER": ""}) as made:
        yield made


@pytest.fixture
def run(session, tmp_path):
    return lambda body: session.run(body, FOLDER=str(tmp_path))


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
result([rates, len(history.epoch), state(m)])
"""
    a, b = run(body)
    assert a == b
    assert a[1] < 20
    rates = [rate for rate, _ in a[0]]
    assert rates[1] < rates[0]


def test_a_stop_on_one_rank_stops_all_and_rates_become_the_chiefs(run):
    body = """
m = build()
class Odd(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.1 * (rank + 1)
    def on_train_batch_end(self, index, logs=None):
        if rank == 1 and self.model.optimizer.iterations == 5:
            self.model.stop_training = True
fit(m, [Odd()], epochs=10)
found = [int(m.optimizer.iterations), float(m.optimizer.learning_rate), state(m)]
# The last row is the last rank's.
nan = np.where(np.arange(40)[:, None] == 39, np.nan, x)
history = m.fit(nan, y, batch_size=16, epochs=10, shuffle=False, verbose=0,
                callbacks=[keras.callbacks.TerminateOnNaN()])
result([*found, len(history.epoch)])
"""
    a, b = run(body)
    assert a == b
    assert a[0] == 5
    assert a[1] == pytest.approx(0.1)
    assert a[3] == 1


@pytest.mark.soak
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
    # In the same job: a strategy whose workers all take the chief's state.
    more = """
strategy.close()
strategy = kerasdist.RingStrategy(timeout=60, initial_state="broadcast")
m = build()
before = state(m)
if rank == 1:
    m.set_weights([w + 1 for w in m.get_weights()])
m.fit(x, y, batch_size=16, epochs=1, verbose=2, shuffle=False)
result([before, state(m)])
"""
    env = {"FOLDER": str(tmp_path / "b")}
    chief, other = Workers(SCRIPT + body + more, 2, env=env, deadline=120).run()
    assert chief.results == other.results
    continued, (before, after) = chief.results
    assert continued[1:] == [[3, 4, 5], expected[2]]
    for mine, whole in zip(continued[0], expected[0], strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-5)
    assert before != after
    # The progress bar and the first line are the chief's.
    line = (
        "kerasdist: 2 workers with 2 replicas in all, global batch 16, per worker "
        "8, 40 samples, 20 of them here, learning rate 0.5"
    )
    assert line in chief.output
    assert "3/3 - " in chief.output
    assert "3/3" not in other.output
    assert "kerasdist: 2 worker" not in other.output


def test_different_initial_states_are_found_before_the_first_step(run):
    body = """
m = build()
if rank == 1:
    m.set_weights([w + 1 for w in m.get_weights()])
result([refused(lambda: fit(m, [])), int(m.optimizer.iterations)])
"""
    for message, steps in run(body):
        assert "begin to train from different states" in message
        assert "kernel" in message
        assert "ranks [1] differ" in message
        assert "initial_state='broadcast'" in message
        assert steps == 0


DRIFT = """
m = build()
bias = m.layers[-1].bias
class Drift(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if rank == 1:
            bias.assign(CHANGED)
"""


def test_weights_that_have_become_different_end_fit_with_their_names(run):
    """After that epoch; here a callback writes to the weights of one rank."""
    body = "result([refused(lambda: fit(m, [Drift()])), len(m.history.epoch)])"
    for message, epochs in run(DRIFT.replace("CHANGED", "bias + 1") + body):
        assert "The workers hold different states after epoch 1." in message
        assert "1 of" in message
        assert "variables of ranks [1] differ" in message
        assert "bias" in message
        assert epochs == 0


def test_weights_that_differ_by_rounding_become_the_chiefs(session, tmp_path):
    body = DRIFT.replace("CHANGED", "bias * (1 + 1e-6)")
    body += "fit(m, [Drift()], epochs=2)\nresult(state(m))"
    chief, other = session.finish(body, FOLDER=str(tmp_path))
    assert chief.result == other.result
    assert chief.output.count("1 variable differed between the workers by round") == 1


def test_dropout_differs_per_replica_and_is_reproducible(run):
    body = """
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


def test_noise_of_tf_random_differs_per_replica_and_is_reproducible(run):
    body = """
def noise(eagerly):
    tf.random.set_seed(5)
    draw = lambda: tf.random.normal([])
    step = lambda: tf.stack([tf.cond(tf.constant(True), draw, draw), draw()])
    both = lambda: (strategy.run(step), draw())
    drawn = both if eagerly else tf.function(both)
    return [np.ravel(each).tolist() for _ in range(2) for each in drawn()]
for eagerly in (False, True):
    assert noise(eagerly) == noise(eagerly)
result([noise(False), noise(True)])
"""
    for first, second in zip(*run(body), strict=True):
        assert first[1::2] == second[1::2]  # outside of the step
        steps = first[::2] + second[::2]
        assert all(len(set(column)) == 4 for column in zip(*steps, strict=True))
