"""Batches that are dealt out: each of them once, over all workers, whoever is free."""

from __future__ import annotations

import itertools
import json
import re
import types

import pytest
from scripts import PRELUDE
from soak import soak

from kerasdist.parameter_server import END
from kerasdist.strategies.asynchronous.dynamic_batches import AsyncDataset
from sessions import Session
from workers import Workers

pytestmark = pytest.mark.timeout(150)

# Sample i is the number i: what a step was given can be read off.
SETUP = (
    PRELUDE
    + """
devices = int(os.environ.get("DEVICES", "1"))
logical_devices(devices)
strategy = kerasdist.ParameterServerStrategy(
    "async", devices=[f"CPU:{i}" for i in range(devices)], timeout=40,
    startup_timeout=60, shard=os.environ.get("SHARD", "rows"))
rank = strategy.rank
"""
)
BEFORE = """
keras.utils.set_random_seed(1)

class Log(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.taken = []
    def call(self, x):
        return self.dense(x)
    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        def note(x):
            self.taken.append([int(v) for v in x[:, 0]])
            return np.int64(0)
        with tf.control_dependencies([tf.numpy_function(note, [x], tf.int64)]):
            return super().train_step((x, x))

class Batches(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs, self.numbers = [], []
    def on_epoch_begin(self, epoch, logs=None):
        self.model.taken.clear()
        self.numbers = []
    def on_train_batch_end(self, batch, logs=None):
        self.numbers.append(batch)
    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append([list(self.model.taken), self.numbers])

with strategy.scope():
    model = Log()
    model.compile("sgd", "mse")
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
    model.fit(data, verbose=0, **{"callbacks": [log], "epochs": 3, **more})

"""
AFTER = "\nresult(log.epochs)\n"


@pytest.fixture(scope="module")
def run():
    with Session(SETUP, 2, before=BEFORE, servers=1) as session:
        yield lambda body: session.run(body + AFTER)


def run_apart(body, **env):
    """In a job with settings of its own."""
    script = SETUP + BEFORE + body + AFTER
    with Workers(script, 2, servers=1, env=env, deadline=120) as job:
        return [worker.result for worker in job.succeed()[:2]]


def taken(results, epoch):
    """All workers' batches of an epoch, in the order of their numbers."""
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


def test_arrays():
    # On two devices: a replica without rows would be seen taking a row of zeros.
    results = run_apart("fit(x[:48], batch_size=7, shuffle=False)", DEVICES="2")
    sevens = [list(range(start, min(start + 7, 48))) for start in range(0, 48, 7)]
    for epoch in range(3):
        assert taken(results, epoch) == sevens


def test_shuffled_arrays_have_an_order_of_their_own_in_each_epoch(run):
    results = run("fit(x, batch_size=5)")
    epochs = [taken(results, epoch) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(50))
    assert len({json.dumps(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize(
    "data",
    [
        "tf.data.Dataset.from_tensor_slices((x, x)).batch(5)",
        # Of unknown length.
        "tf.data.Dataset.from_tensor_slices((x, x)).batch(5).filter(lambda a, b: True)",
        "Items()",
        "Items(workers=2, use_multiprocessing=False)",
    ],
    ids=["dataset", "unknown_length", "pydataset", "pydataset_with_threads"],
)
def test_datasets(run, data):
    results = run(f"fit({data}, shuffle=False)")
    for epoch in range(3):
        assert taken(results, epoch) == FIVES


def test_a_shuffled_dataset_is_shuffled_alike_on_all_workers(run):
    body = "fit(tf.data.Dataset.from_tensor_slices((x, x)).shuffle(50).batch(5))"
    results = run(body)
    for epoch in range(3):
        assert sorted(itertools.chain(*taken(results, epoch))) == list(range(50))


def test_datasets_that_differ_are_an_error_on_all_workers(run):
    body = """
import random
d = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(50, seed=rank).batch(5)
try:
    fit(d)
except ValueError as error:
    log.epochs = str(error)
"""
    for message in run(body):
        assert message.startswith("The workers read different global batches")


def test_items_are_read_by_one_worker(run):
    body = """
items = Items()
fit(items, epochs=1)
Items.read.sort()
log.epochs = [Items.read, log.epochs[0][1]]
"""
    results = run(body)
    # Item 0 is read by all, to build the model and to compare it.
    read = [index for worker in results for index in worker[0] if index]
    assert sorted(read) == list(range(1, 10))


def test_steps_per_epoch_are_of_all_workers_and_go_on_in_the_data(run):
    body = """
data = tf.data.Dataset.from_tensor_slices((x, x)).batch(5).repeat()
fit(data, steps_per_epoch=4)
fit(x, batch_size=5, steps_per_epoch=5, shuffle=False, epochs=2)
"""
    results = run(body)
    cycle = FIVES + FIVES
    assert [taken(results, e) for e in range(3)] == [
        cycle[0:4],
        cycle[4:8],
        cycle[8:12],
    ]
    assert [taken(results, e) for e in (3, 4)] == [FIVES[:5], FIVES[5:]]


def test_data_that_run_out_before_the_steps_begin_anew(run):
    body = """
data = tf.data.Dataset.from_tensor_slices((x, x)).batch(5).filter(lambda a, b: True)
fit(data, steps_per_epoch=8, epochs=3)
"""
    results = run(body)
    epochs = [taken(results, epoch) for epoch in range(3)]
    assert epochs == [FIVES[:8], FIVES[8:], FIVES[:8]]


def test_each_workers_own_data_until_its_own_end():
    body = """
mine = x[:5 * (rank + 1)]
fit(mine, batch_size=5, shuffle=False, epochs=2)
data = tf.data.Dataset.from_tensor_slices((mine, mine)).batch(5).repeat()
fit(data, steps_per_epoch=6, epochs=1)
"""
    results = run_apart(body, SHARD="off")
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


@pytest.mark.parametrize("devices", ["1", soak("2")])
def test_custom_loops(devices):
    """As TensorFlow's guides write them; the first step creates the variables."""
    body = (
        LOOP
        + """
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

def within():
    return float(train_all(iter(loop)))

def over_the_dataset():
    return float(train_dataset())

def total_of(batches):
    total = tf.constant(0.0)
    for batch in batches:
        total += run(batch)
    return total

for kind in (plain, with_a_function, with_next, within, over_the_dataset):
    new()
    train, train_all = tf.function(run), tf.function(total_of)
    train_next = tf.function(lambda batches: run(next(batches)))
    train_dataset = tf.function(lambda: total_of(loop))
    epochs = []
    for epoch in range(3):
        mine.clear()
        ones = kind()
        epochs.append([[batch for batch in mine if batch], ones, float(mean.result()),
                       [w.tolist() for w in dense.get_weights()]])
    log.epochs.append([kind.__name__, epochs, len(traced)])
"""
    )
    kinds = list(zip(*run_apart(body, DEVICES=devices), strict=True))
    assert len(kinds) == 5
    for workers in kinds:
        name = workers[0][0]
        for epoch in range(3):
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
            assert max(traces for *_, traces in workers) <= 2 * int(devices), name


def test_a_batch_for_one_worker_and_loops_that_are_left(run):
    """Workers take other numbers of batches, and meet after each pass in any case."""
    body = (
        LOOP
        + """
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
"""
    )
    first, second = run(body)
    assert first[0] + second[0] == 1
    assert [first[1], second[1]] == [2.0, 2.0]
    # Rank 1 may find that the other one has taken all.
    assert 1 <= first[2] <= 3
    assert second[2] <= 6
    weights = [worker[3] for worker in (first, second) if worker[3]]
    assert all(w == weights[0] for w in weights)


def test_ranks_at_different_places_are_told_where(run):
    body = (
        LOOP
        + """
other = strategy.experimental_distribute_dataset(data)
new()
text = ""
try:
    for batch in (loop if rank == 0 else other):
        run(batch)
except kerasdist.errors.CollectiveMismatch as error:
    text = str(error)
log.epochs = text
"""
    )
    for text in run(body):
        assert re.search(
            r"rank 0 ends pass 1 of dataset (\d+); rank 1 ends pass 1", text
        )


def test_a_variable_whose_value_is_computed_from_a_batch():
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
    for devices in "12":
        values = [v for found in run_apart(body, DEVICES=devices) for v in found]
        assert set(values) == {50.0}


def test_checkpoints_within_passes(run, tmp_path):
    """Ranks are at different steps: each with a folder of its own, which it removes."""
    body = (
        f"FOLDER = {str(tmp_path)!r}"
        + LOOP
        + """
new()
checkpoint = tf.train.Checkpoint(dense=dense, optimizer=optimizer)
own = os.path.join(FOLDER, f"workertemp_{rank}") if rank else FOLDER
manager = tf.train.CheckpointManager(checkpoint, own, max_to_keep=1)
saved = 0
for epoch in range(4):
    for number, batch in enumerate(loop):
        run(batch)
        if number % (2 + rank) == 0:
            manager.save()
            saved += 1
            if rank:
                tf.io.gfile.rmtree(own)
log.epochs = [saved, [w.tolist() for w in dense.get_weights()]]
if rank == 0:
    dense.set_weights([0 * w for w in dense.get_weights()])
    manager.restore_or_initialize()
    log.epochs.append(int(np.any(dense.get_weights()[0])))
"""
    )
    (saved, weights, restored), (_, theirs) = run(body)
    assert saved
    assert weights == theirs
    assert restored == 1
    assert not (tmp_path / "workertemp_1").exists()


def test_a_reading_thread_that_claims_meanwhile_does_not_undo_the_end():
    class Raced(AsyncDataset):
        """The other thread always comes in between."""

        _last = property(lambda self: 7, lambda self, number: None)

    told = []

    def claim(dataset, epoch, *, limit, last):
        told.append(last)

    workers = types.SimpleNamespace(client=types.SimpleNamespace(claim=claim))
    Raced(workers, None, None, None, 1, lambda dataset: None).end_for_all()
    assert told == [END]
