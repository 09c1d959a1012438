"""Steps that are repeated after a change of the workers: the numbers stay the same."""

from __future__ import annotations

import pytest

from places import SUPPORT
from sessions import Session
from workers import Workers

pytestmark = pytest.mark.timeout(400)

SCRIPT = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
"""
SCRIPT += """
import hashlib
import json
import keras
import numpy as np
import tensorflow as tf
import kerasdist
from elastic_double import ElasticDouble
from keras import layers

if REPLICAS > 1:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * REPLICAS,
    )
strategy = kerasdist.RingStrategy([f"CPU:{i}" for i in range(REPLICAS)], timeout=60)
double = ElasticDouble(strategy)
rng = np.random.default_rng(0)
x = rng.normal(size=(70, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

def digest(variables):
    values = [np.ascontiguousarray(v) for v in variables]
    return hashlib.sha256(b"".join(v.tobytes() for v in values)).hexdigest()

def outcome(model, optimizers, history):
    return {
        "weights": digest(v.numpy() for v in model.variables),
        "sums": [float(abs(w).sum()) for w in model.get_weights()],
        "optimizers": digest(v.numpy() for o in optimizers for v in o.variables),
        "iterations": [int(o.iterations) for o in optimizers],
        "history": history,
        "step": strategy.communicator.step,
    }

def run(train, fail_at=()):
    strategy.communicator.step = 0
    keras.utils.set_random_seed(7)
    double.begin(fail_at)
    first = double.epoch
    found = train()
    found["changes"] = double.epoch - first
    found["sections"] = double.sections
    found["collectives"] = double.count
    return found

def compare(train):
    '''Runs without a failure, and with some: at the first step's first collective,
    in the middle of a step, at a step's last one, in the reading of the metrics.'''
    with double.absent():
        plain = run(train)
    calm = run(train)
    firsts = [first for first, _ in calm["sections"]]
    # The last section is the last epoch's reading.
    in_step, reading = firsts[3] + (firsts[4] - firsts[3]) // 2, firsts[-1]
    # Each failure repeats what its section had begun, which counts, too.
    last_of_step = firsts[5] - 1
    points = [0, in_step, last_of_step, reading]
    shifted, repeated = [], 0
    for point in points:
        shifted.append(point + repeated)
        section = max(first for first in firsts if first <= point)
        repeated += point - section + 1
    hit = run(train, shifted)
    print("RESULT", json.dumps([plain, calm, hit]), flush=True)

"""


@pytest.fixture(scope="module")
def session():
    with Session("REPLICAS = 1\n" + SCRIPT, 2, deadline=300) as made:
        yield made


COMPARE = "\ncompare(train)\n"


@pytest.fixture
def check(session):
    """A function that runs the training of one replica in each worker."""
    return lambda train: checked(session.run(train + COMPARE))


def checked(results):
    for plain, calm, hit in results:
        # Gradients that are accumulated are reduced at other times.
        assert calm["sums"] == pytest.approx(plain["sums"], rel=1e-5)
        assert calm["iterations"] == plain["iterations"]
        for name, values in plain["history"].items():
            assert calm["history"][name] == pytest.approx(values, rel=1e-5), name
        assert calm["changes"] == 0
        assert hit["changes"] == 4
        assert [failed for _, failed in hit["sections"]].count(True) == 4
        for same in ("weights", "optimizers", "iterations", "step"):
            assert hit[same] == calm[same], same
        assert hit["history"].keys() == calm["history"].keys()
        for name, values in calm["history"].items():
            # The workers' parts are added up in another order.
            assert hit["history"][name] == pytest.approx(values, rel=1e-6), name
    assert results[0][2]["history"] == results[1][2]["history"]
    return results


# What is between the input and the output, what `compile` is told, and the data. By
# default two epochs of batches of 16, the last of 6.
PLAIN = """
optimizer, metrics, more, options = "adam", ["accuracy"], {}, {"batch_size": 16}
data, middle, output, loss = (x, y), [], lambda: layers.Dense(2), entropy
"""
TRAIN = """
def train():
    ends = []
    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            ends.append(batch)
    with strategy.scope():
        m = keras.Sequential([
            keras.Input((6,)), *(make() for make in middle), output()])
        made = optimizer if isinstance(optimizer, str) else optimizer()
        m.compile(made, loss, metrics=[
            each if isinstance(each, str) else each() for each in metrics
        ], jit_compile=False, **more)
    history = m.fit(*data, epochs=2, verbose=0, callbacks=[Ends()], **options).history
    history = {name.rstrip("_0123456789"): v for name, v in history.items()}
    return {**outcome(m, [m.optimizer], history), "ends": ends}
"""
STATISTICS = """
middle = [
    lambda: layers.Dense(8), layers.BatchNormalization, lambda: layers.Dropout(0.3)]
"""


def test_a_model_with_statistics_masks_and_metrics(check):
    check(PLAIN + STATISTICS + TRAIN)


@pytest.mark.soak
def test_two_replicas():
    script = "REPLICAS = 2\n" + SCRIPT + PLAIN + STATISTICS + TRAIN + COMPARE
    with Workers(script, 2, deadline=300) as job:
        checked([finished.result for finished in job.succeed()])


@pytest.mark.soak
@pytest.mark.parametrize(
    "changes",
    [
        # 4 x 5000 numbers: summed in every second step.
        """
metrics = [lambda: keras.metrics.AUC(num_thresholds=5000)]
output, loss = lambda: layers.Dense(1, "sigmoid"), "mse"
""",
        """
optimizer = lambda: keras.optimizers.Adam(
    0.01, gradient_accumulation_steps=2, use_ema=True)
""",
        "more = {'run_eagerly': True}; middle = [lambda: layers.Dropout(0.2)]",
        # A loss that is scaled.
        """
middle = [lambda: layers.Dense(8, dtype="mixed_float16")]
optimizer = lambda: keras.optimizers.LossScaleOptimizer(
    keras.optimizers.SGD(0.1, momentum=0.9), dynamic_growth_steps=3)
""",
        # An elastic job shuffles items in an order of its own.
        """
class Items(keras.utils.PyDataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return x[16 * i : 16 * i + 16], y[16 * i : 16 * i + 16]
data, options = (Items(),), {"shuffle": False}
""",
    ],
    ids=["metrics", "accumulated", "eager", "scaled", "items"],
)
def test_other_steps(check, changes):
    check(PLAIN + changes + TRAIN)


@pytest.mark.soak
def test_several_steps_in_one_execution(check):
    # Of 5 batches: the data end in the second execution.
    results = check(PLAIN + "more = {'steps_per_execution': 4}" + TRAIN)
    assert [each["ends"] for each in results[0]] == [[3, 7, 3, 7]] * 3


@pytest.mark.soak
def test_a_step_with_two_optimizers(check):
    check("""
class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.generator = layers.Dense(6)
        self.critic = layers.Dense(1)
        self.loss_of_critic = keras.metrics.Mean(name="critic")

    def compile(self, one, two, **more):
        super().compile(**more)
        self.one, self.two = one, two

    def call(self, x):
        return self.critic(self.generator(x))

    def train_step(self, data):
        x = data[0]
        with tf.GradientTape() as tape:
            fake = self.generator(x)
            loss = tf.reduce_mean(self.critic(x)) - tf.reduce_mean(self.critic(fake))
            loss += sum(tf.reduce_sum(w ** 2) for w in self.critic.trainable_weights)
        weights = self.critic.trainable_weights
        self.two.apply_gradients(zip(tape.gradient(loss, weights), weights))
        with tf.GradientTape() as tape:
            score = tf.reduce_mean(self.critic(self.generator(x)))
        weights = self.generator.trainable_weights
        self.one.apply_gradients(zip(tape.gradient(score, weights), weights))
        self.loss_of_critic.update_state(loss)
        return {"critic": self.loss_of_critic.result(), "score": score}

def train():
    with strategy.scope():
        m = Gan()
        m.build((None, 6))
        one, two = keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.02)
        m.compile(one, two, jit_compile=False)
    history = m.fit(x, y, batch_size=16, epochs=2, verbose=0).history
    return outcome(m, [one, two], history)
""")


@pytest.mark.soak
def test_single_batches(check):
    check("""
def train():
    with strategy.scope():
        m = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
        m.compile("adam", entropy, metrics=["accuracy"], jit_compile=False)
    logs = [m.train_on_batch(x[:16], y[:16], return_dict=True) for _ in range(6)]
    history = {name: [each[name] for each in logs] for name in logs[0]}
    return outcome(m, [m.optimizer], history)
""")


def test_evaluations_and_predictions_are_begun_again(session):
    first, second = session.run("""
keras.utils.set_random_seed(7)
with strategy.scope():
    m = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    m.compile("sgd", entropy, metrics=["accuracy"], jit_compile=False)

def repeated(call, fail_at=()):
    double.begin(fail_at)
    first = double.epoch
    result = call()
    return {
        "result": np.asarray(result).tolist(),
        "changes": double.epoch - first,
        "collectives": double.count,
    }

found = {}
for name, call in {
    "evaluate": lambda: m.evaluate(x, y, batch_size=16, verbose=0),
    "predict": lambda: m.predict(x, batch_size=16, verbose=0),
    "test_on_batch": lambda: m.test_on_batch(x[:10], y[:10]),
    "predict_on_batch": lambda: m.predict_on_batch(x[:10]),
}.items():
    call()  # the first time variables are created, by collectives
    calm = repeated(call)
    last = calm["collectives"] - 1
    # The second failure is in the repetition, at the same collective.
    found[name] = calm, repeated(call, [last, 2 * last + 1])
print("RESULT", json.dumps(found), flush=True)
""")
    for name, (calm, hit) in first.items():
        assert calm["collectives"] > 0, name
        assert (calm["changes"], hit["changes"]) == (0, 2), name
        assert hit["result"] == calm["result"], name
        assert second[name][1]["result"] == hit["result"], name
