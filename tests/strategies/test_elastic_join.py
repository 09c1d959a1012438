import signal

import numpy as np
import pytest
from elastic_jobs import elastic_script
from soak import soak

from workers import Workers

SCRIPT = elastic_script("""
victim, kind, size = sys.argv[1:4]
victim, size = int(victim), int(size)
# Of a newcomer that comes at the end of an epoch's data.
late = "LATE" in os.environ
if late:
    from kerasdist._keras.elastic import joining
    joining.POLL_SECONDS = 0.0
    begun, ready = (sys.argv[0] + end for end in (f".{me}", ".ready"))
    while os.path.exists(begun) and not os.path.exists(ready):
        time.sleep(0.01)
    open(begun, "w").close()
create = getattr(kerasdist, os.environ.get("STRATEGY", "RingStrategy"))
shard = "off" if kind.startswith("own") else "rows"
strategy = create(elastic=True, startup_timeout=60, shard=shard)
again = not alone and strategy.communicator.joining

def wait_for_newcomer():
    # Until the one that was lost has been started again.
    for _ in range(4000):
        if again or strategy.size == size or strategy.communicator.membership.waiting:
            break
        time.sleep(0.01)

class Rows(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="rows")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self):
        return self.total

class Scaled(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(
            shape=(), initializer="ones", trainable=False, name="scale"
        )

    def call(self, inputs):
        return inputs * self.scale

with strategy.scope():
    model = classifier(strategy, Scaled(), metrics=["accuracy", Rows()])

class Items(Batches):
    scale = 1.0

    def __getitem__(self, number):
        rows, labels = super().__getitem__(number)
        return rows * self.scale, labels

    def on_epoch_end(self):
        self.scale *= 0.9

class Pace(keras.callbacks.Callback):
    taken = 0
    rank = me

    def __init__(self):
        super().__init__()
        self.mine = f"rank {me}"
        self.epochs, self.begun = [], 0

    def on_train_batch_begin(self, batch, logs=None):
        self.begun += 1
        # Not by its number: once more would change it once more.
        scale = self.model.layers[0].scale
        scale.assign(scale * 0.999)

    def on_train_batch_end(self, batch, logs=None):
        self.taken += 1
        if not alone:
            time.sleep(0.02)
        if late and batch == 7 and self.epochs == [0, 1, 2, 3] and not alone:
            open(ready, "w").close()
            wait_for_newcomer()
            time.sleep(1.0)  # it asks
        if me == victim and not again and self.taken == 9:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)
        if epoch == 3 and not alone and not late:
            wait_for_newcomer()

def drawn():
    # What has drawn from NumPy's generator before decides on the order; so that it's
    # never the others' by chance, the newcomer has other rows, too.
    for number in 32 * np.random.permutation(8) + again:
        yield x[number : number + 32], y[number : number + 32]

def pairs(seed):
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    return untuned(rows.shuffle(250, seed=seed).batch(32))

checks = tf.data.Dataset.from_tensor_slices((x[:50], y[:50])).shuffle(50).batch(16)
data = {
    "arrays": lambda: dict(x=x, y=y, batch_size=32, validation_data=(x[:50], y[:50])),
    "endless": lambda: dict(
        x=pairs(3).repeat(), steps_per_epoch=5, validation_data=checks
    ),
    "items": lambda: dict(
        x=Items(32, x, y, workers=2), validation_data=Items(32, x, y, workers=0)
    ),
    "unknown": lambda: dict(x=pairs(3).filter(lambda a, b: tf.constant(True))),
    "own": lambda: dict(x=x[me::2], y=y[me::2], batch_size=16),
    "own_unknown": lambda: dict(x=untuned(
        tf.data.Dataset.from_tensor_slices((x[me::2], y[me::2])).batch(16)
    ).filter(lambda a, b: tf.constant(True))),
    "drawn": lambda: dict(x=tf.data.Dataset.from_generator(
        drawn, output_signature=(
            tf.TensorSpec([None, 8], tf.float32), tf.TensorSpec([None], tf.int64)
        )
    )),
}[kind]()

pace = Pace()
callbacks = [
    pace,
    keras.callbacks.EarlyStopping("loss", patience=50, restore_best_weights=True),
    keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.05),
    keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.95),
]
history = model.fit(**data, epochs=6, verbose=0, callbacks=callbacks)
found = [history.epoch, lists(history.history), pace.begun, pace.epochs]
assert (pace.mine, pace.rank) == (f"rank {me}", me)
result([found, whole(model), strategy.size, int(model.optimizer.iterations.numpy())])
""")


def undisturbed(kind):
    """Return the result of one process; of two where plain Keras differs.

    It draws the order of items by itself, and counts steps that find no data.
    """
    size = 2 if kind in ("items", "unknown") else 1
    env = {} if size == 2 else {"TF_CONFIG": None}
    arguments = ["-1", kind, str(size)]
    return Workers(SCRIPT, size, arguments, env=env, deadline=120.0).run()[0].result


def joined(kind, victim, servers=0):
    kind, _, late = kind.partition(" ")
    arguments = [str(victim), kind, "2"]
    env = {"STRATEGY": "ParameterServerStrategy"} if servers else {}
    env |= {"LATE": late} if late else {}
    with Workers(
        *(SCRIPT, 2, arguments, env), handover=False, deadline=120.0, servers=servers
    ) as job:
        assert job.wait_one(victim).returncode == -signal.SIGKILL
        job.start_again(victim)
        return [each.result for each in job.succeed()[:2]]


def flat(value):
    if isinstance(value, dict):
        value = [value[name] for name in sorted(value)]
    if isinstance(value, list):
        return np.concatenate([flat(each) for each in value])
    return np.ravel(value)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "victim", "servers"),
    [
        *(("arrays", 0, 0), ("unknown", 1, 0), ("items", 1, 0), ("endless", 1, 0)),
        *(
            ("endless", 0, 0),
            ("arrays", 0, 2),
            ("arrays", 1, 1),
            ("unknown late", 1, 0),
        ),
    ],
)
def test_the_numbers_are_those_of_one_process(kind, victim, servers):
    expected = undisturbed(kind.partition(" ")[0])
    results = joined(kind, victim, servers)
    for found in results:
        assert found[2] == 2
        assert found[3] == expected[3]
        assert found[0][1].keys() == expected[0][1].keys()
        np.testing.assert_allclose(
            flat(found[:2]), flat(expected[:2]), rtol=1e-4, atol=1e-5
        )
    # To the bit among the workers.
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ["own", soak("own_unknown late")])
def test_a_newcomer_begins_with_its_own_data_in_the_next_epoch(kind):
    one, other = joined(kind, 1)
    assert one == other
    assert one[2] == 2
    assert one[3] == 48
    rows = one[0][1]["rows"]
    # One worker's from the loss in the second epoch on, until it joins.
    assert rows[0] == rows[-1] == 250
    assert 125 < rows[1] < 250
    assert set(rows[2:]) == {125, 250}
    assert sorted(rows[2:]) == rows[2:]


@pytest.mark.soak
def test_an_order_that_cannot_be_repeated_is_refused():
    """The newcomer ends with an error, and the others continue."""
    arguments = ["1", "drawn", "2"]
    with Workers(SCRIPT, 2, arguments, handover=False, deadline=120.0) as job:
        job.wait_one(1)
        job.start_again(1)
        newcomer = job.wait_one(1)
        assert newcomer.returncode == 1
        message = "This worker can't join the job. Received: other data"
        assert message in newcomer.output
        left = job.wait_one(0)
        assert left.returncode == 0
        assert left.result[2] == 1
