import itertools
import json
import re
import types

import pytest
from scripts import NOTING
from soak import soak

from asynchronous import SETUP
from kerasdist.parameter_server import END
from kerasdist.strategies.asynchronous.dynamic_batches import AsyncDataset
from sessions import Session

# Sample i is the number i: what a step was given can be read off.
BEFORE = NOTING
BEFORE += """
rank = strategy.rank
keras.utils.set_random_seed(1)
model = noting(0.01)

class Batches(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs, self.numbers = [], []
    def on_epoch_begin(self, epoch, logs=None):
        trained.clear()
        self.numbers = []
    def on_train_batch_end(self, batch, logs=None):
        self.numbers.append(batch)
    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append([list(trained), self.numbers])

x = np.arange(50, dtype="float32")[:, None]
log = Batches()

class Items(keras.utils.PyDataset):
    read = []
    def __len__(self):
        return 10
    def __getitem__(self, index):
        self.read.append(index)
        part = x[index * 5:index * 5 + 5]
        return part, part

def fit(data, **more):
    if isinstance(data, np.ndarray):
        more["y"] = data
    model.fit(data, verbose=0, **{"callbacks": [log], "epochs": 2, **more})

"""
AFTER = "\nresult(log.epochs)\n"


def job(**env):
    return Session(SETUP, 2, before=BEFORE, servers=1, env=env)


@pytest.fixture(scope="module")
def run():
    with job() as session:
        yield lambda body: session.run(body + AFTER)


@pytest.fixture(scope="module")
def double():
    with job(DEVICES="2") as session:
        yield lambda body: session.run(body + AFTER)


def taken(results, epoch):
    found = {}
    for worker in results:
        batches, numbers = worker[epoch]
        # With several replicas each logs its part of a batch.
        parts = len(batches) // max(1, len(numbers))
        for number, start in zip(numbers, itertools.count(0, parts), strict=False):
            assert number not in found, f"batch {number} was taken twice"
            found[number] = sorted(itertools.chain(*batches[start : start + parts]))
    assert sorted(found) == list(range(len(found)))
    return [found[number] for number in sorted(found)]


FIVES = [list(range(start, start + 5)) for start in range(0, 50, 5)]


@pytest.mark.soak
def test_arrays(double):
    """In an order of their own in each epoch, if they are shuffled.

    On two devices: a replica without rows would be seen taking a row of zeros.
    """
    results = double("""
fit(x[:48], batch_size=7, shuffle=False, epochs=3)
fit(x[:48], batch_size=7, epochs=3)
""")
    sevens = [list(range(start, min(start + 7, 48))) for start in range(0, 48, 7)]
    epochs = [taken(results, epoch) for epoch in range(6)]
    assert epochs[:3] == [sevens] * 3
    for epoch in epochs[3:]:
        assert sorted(itertools.chain(*epoch)) == list(range(48))
    assert len({json.dumps(epoch) for epoch in epochs[3:]}) == 3


# What is trained on in two epochs, or None for any order.
DATASETS = {
    "fit(slices((x, x)).batch(5))": [FIVES] * 2,
    "fit(of_unknown_length)": [FIVES] * 2,
    "fit(slices((x, x)).shuffle(50).batch(5))": None,
    # Arrays whose orders differ are the chief's.
    "fit(np.random.default_rng(rank).permutation(x), batch_size=5)": None,
    "fit(Items(), shuffle=False)": [FIVES] * 2,
    "fit(Items(workers=2, use_multiprocessing=False), shuffle=False)": [FIVES] * 2,
    # Steps are of all workers, and go on in the data.
    "fit(slices((x, x)).batch(5).repeat(), steps_per_epoch=4)": [FIVES[:4], FIVES[4:8]],
    "fit(x, batch_size=5, steps_per_epoch=5, shuffle=False)": [FIVES[:5], FIVES[5:]],
    # Data that run out before the steps begin anew.
    "fit(of_unknown_length, steps_per_epoch=8)": [FIVES[:8], FIVES[8:]],
}


def test_datasets(run):
    body = """
slices = tf.data.Dataset.from_tensor_slices
of_unknown_length = slices((x, x)).batch(5).filter(lambda a, b: True)
"""
    found = run(body + "\n".join(DATASETS))
    for number, (fit, expected) in enumerate(DATASETS.items()):
        epochs = [taken(found, 2 * number + epoch) for epoch in range(2)]
        if expected is None:
            rows = [sorted(itertools.chain(*epoch)) for epoch in epochs]
            assert rows == [list(range(50))] * 2
        else:
            assert epochs == expected, fit


def test_items_are_read_by_one_worker_and_datasets_may_not_differ(run):
    body = """
fit(Items(), epochs=1)
many = np.tile(x, (60, 1))  # of few, one worker might take all
d = tf.data.Dataset.from_tensor_slices((many, many)).shuffle(50, seed=rank).batch(5)
log.epochs = [Items.read, refused(lambda: fit(d))]
"""
    results = run(body)
    # Item 0 is read by all, to build the model and to compare it.
    read = [index for items, _ in results for index in items if index]
    assert sorted(read) == list(range(1, 10))
    for _, message in results:
        assert message.startswith("The workers read different global batches")


@pytest.mark.soak
def test_each_workers_own_data_until_its_own_end():
    body = """
mine = x[:5 * (rank + 1)]
fit(mine, batch_size=5, shuffle=False, epochs=2)
data = tf.data.Dataset.from_tensor_slices((mine, mine)).batch(5).repeat()
fit(data, steps_per_epoch=6, epochs=1)
"""
    with job(SHARD="off") as session:
        results = session.run(body + AFTER)
    for rank, worker in enumerate(results):
        for epoch in range(2):
            assert worker[epoch] == [FIVES[: rank + 1], list(range(rank + 1))]
    # An own dataset without an end: the steps are those of all workers.
    assert sum(len(worker[2][1]) for worker in results) == 6
    numbers = [number for worker in results for number in worker[2][1]]
    assert sorted(numbers) == list(range(6))


def test_a_file_per_worker(run, tmp_path):
    for number in range(2):
        lines = "\n".join(map(str, range(number * 10, number * 10 + 10)))
        (tmp_path / f"{number}.txt").write_text(lines + "\n")
    body = """
import glob
names = sorted(glob.glob(FOLDER + "/*.txt"))
data = tf.data.Dataset.from_tensor_slices(names).flat_map(tf.data.TextLineDataset)
data = data.map(lambda s: tf.strings.to_number(s)[None]).map(lambda v: (v, v)).batch(5)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.FILE)
fit(data.with_options(options), epochs=2)
"""
    results = run(f"FOLDER = {str(tmp_path)!r}\n" + body)
    for rank, worker in enumerate(results):
        for epoch in range(2):
            assert worker[epoch][0] == FIVES[2 * rank : 2 * rank + 2]


def test_who_stops_ends_the_epoch_for_all(run):
    """Rank 1 stops after its first batch: nobody goes through all the rest."""
    body = """
class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = self.model.stop_training or rank == 1
fit(np.tile(x, (800, 1)), batch_size=5, epochs=3, callbacks=[log, Stop()])
"""
    results = run(body)
    assert [len(worker) for worker in results] == [1, 1]
    assert len(results[1][0][1]) == 1
    assert sum(len(worker[0][1]) for worker in results) < 8_000


LOOP = """
def new():
    global dense, optimizer, mean
    with strategy.scope():
        # The first step creates their variables.
        dense, optimizer = keras.layers.Dense(1), keras.optimizers.Adam(0.01)
        mean = keras.metrics.Mean()
    traced.clear()

def step(batch):
    a, b = batch
    traced.append(1)
    def note(a):
        mine.append([int(v) for v in a[:, 0]])
        return np.int64(0)
    with tf.control_dependencies([tf.numpy_function(note, [a], tf.int64)]):
        a = tf.identity(a)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((dense(a) - b) ** 2)
    optimizer.apply_gradients(
        zip(tape.gradient(loss, dense.trainable_variables), dense.trainable_variables))
    mean.update_state(1.0)
    return tf.constant(1.0)

def run(batch):
    return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

mine, traced = [], []
data = tf.data.Dataset.from_tensor_slices((x, x)).batch(5)
loop = strategy.experimental_distribute_dataset(data)
"""


@pytest.mark.soak
@pytest.mark.parametrize("devices", [1, soak(2)])
def test_custom_loops(run, double, devices):
    """As TensorFlow's guides write them; the first step creates the variables."""
    body = LOOP
    body += """
def plain():
    return sum(float(run(batch)) for batch in loop)

def with_a_function():
    return sum(float(train(batch)) for batch in loop)

def with_next():
    total, iterator = 0.0, iter(loop)
    while True:
        try:
            total += float(train_next(iterator))
        except tf.errors.OutOfRangeError:
            return total

def over_the_dataset():
    return float(train_dataset())

def total_of(batches):
    total = tf.constant(0.0)
    for batch in batches:
        total += run(batch)
    return total

for kind in (plain, with_a_function, with_next, over_the_dataset):
    new()
    train = tf.function(run)
    train_next = tf.function(lambda batches: run(next(batches)))
    train_dataset = tf.function(lambda: total_of(loop))
    epochs = []
    for epoch in range(2):
        mine.clear()
        ones = kind()
        epochs.append([[batch for batch in mine if batch], ones, float(mean.result()),
                       [w.tolist() for w in dense.get_weights()]])
    log.epochs.append([kind.__name__, epochs, len(traced)])
"""
    results = (run if devices == 1 else double)(body)
    kinds = list(zip(*results, strict=True))
    assert len(kinds) == 4
    for workers in kinds:
        name = workers[0][0]
        for epoch in range(2):
            each = [epochs[epoch] for _, epochs, _ in workers]
            batches = [batch for batches, *_ in each for batch in batches]
            flat = sorted(itertools.chain(*batches))
            assert flat == list(range(50)), name
            # A reduction in a pass is over this worker's replicas.
            for own, ones, *_ in each:
                assert ones == len(own), name
            assert {mean for *_, mean, _ in each} <= {1.0}, name
            # Who had no batch so far has no variables.
            assert len({str(w) for *_, w in each if w}) == 1, name
        if name != "plain":
            assert max(traces for *_, traces in workers) <= 2 * devices, name


@pytest.mark.soak
def test_a_batch_for_one_worker_and_loops_that_are_left(run):
    """Workers take other numbers of batches, and meet after each pass in any case."""
    body = LOOP
    body += """
one = strategy.experimental_distribute_dataset(data.take(1))
new()
ones = [float(run(batch)) for batch in one]
mine.clear()
for epoch in range(3):
    for number, batch in enumerate(loop):
        run(batch)
        if number == rank:
            break
together = strategy.reduce("SUM", tf.constant(1.0), axis=None)
log.epochs = [len(ones), float(together), len(mine),
              [w.tolist() for w in dense.get_weights()]]
two = [strategy.experimental_distribute_dataset(data) for _ in range(2)]
log.epochs.append(refused(lambda: [run(batch) for batch in two[rank]]))
"""
    first, second = run(body)
    assert first[0] + second[0] == 1
    assert [first[1], second[1]] == [2.0, 2.0]
    # Rank 1 may find that the other one has taken all.
    assert 1 <= first[2] <= 3
    assert second[2] <= 6
    weights = [worker[3] for worker in (first, second) if worker[3]]
    assert all(w == weights[0] for w in weights)
    for *_, mismatch in (first, second):
        assert re.search(r"rank 0 ends pass 1 of dataset \d+; rank 1 ends", mismatch)


@pytest.mark.soak
def test_a_variable_whose_value_is_computed_from_a_batch(double):
    """No step is lost, also not the first, in which it has no value at first."""
    body = """
held = []
with strategy.scope():
    optimizer = keras.optimizers.SGD(1.0)

def step(batch):
    if not held:
        held.append(tf.Variable(tf.reduce_sum(0 * batch) + 100.0))
    with tf.GradientTape() as tape:
        loss = held[0] * tf.cast(tf.shape(batch)[0], tf.float32)
    optimizer.apply(tape.gradient(loss, held), held)

@tf.function
def train(batch):
    strategy.run(step, args=(batch,))

data = tf.data.Dataset.from_tensor_slices(x).batch(5)
for batch in strategy.experimental_distribute_dataset(data):
    train(batch)
log.epochs = [float(each.numpy()) for each in held]
"""
    values = [value for found in double(body) for value in found]
    assert set(values) == {50.0}


def test_a_reading_thread_that_claims_meanwhile_does_not_undo_the_end():
    class Raced(AsyncDataset):
        _last = property(lambda self: 7, lambda self, number: None)

    told = []

    def claim(dataset, epoch, *, limit, last):
        told.append(last)

    workers = types.SimpleNamespace(client=types.SimpleNamespace(claim=claim))
    data = types.SimpleNamespace(workers=workers, weights=None, timer=None)
    Raced(data, None, 1).end_for_all()
    assert told == [END]
