"""Data that differ between the workers: the chief's are used, or it's an error.

The reference is one process that has the chief's data: its weights, its losses, its
predictions. Each rank makes "random" data of its own by `random_of(rank)`, so that the
reference can make the chief's.
"""

import numpy as np
import pytest
from scripts import with_prelude

import kerasdist
from sessions import Session

WORKER = with_prelude("""
logical_devices(2)
strategy = kerasdist.RingStrategy(devices=["CPU:0"], timeout=60)
rank, size, scope = strategy.rank, strategy.size, strategy.scope
def another(**options):
    return kerasdist.RingStrategy(timeout=60, **options).scope
""")

PLAIN = with_prelude("""
logical_devices(2)
rank, scope = 0, contextlib.nullcontext
def another(**options):
    return scope
""")

BEFORE = """
tf.random.set_seed(3)
rows = np.random.default_rng(5)
X = rows.normal(size=(400, 8)).astype("float32")
Y = X.sum(axis=1, keepdims=True) + rows.normal(size=(400, 1)).astype("float32")

def result(*value):
    print("RESULT", json.dumps(value), flush=True)

def random_of(rank):
    return np.random.default_rng(100 + rank)

def build(**more):
    with scope():
        m = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, "linear")])
        m.compile(keras.optimizers.SGD(0.02), "mse", **more)
    m.set_weights([np.full((8, 1), 0.1), np.zeros(1)])
    return m

def numbers(m, *more):
    flat = [w.ravel() for w in m.get_weights()] + [np.ravel(v) for v in more]
    return [float(v) for v in np.concatenate(flat)]

def refusal(m, call):
    '''The error's text, and how many steps have been taken.'''
    return [refused(call), int(m.optimizer.iterations.numpy())]

class Items(keras.utils.PyDataset):
    def __init__(self, x, y, random=None, every=False):
        super().__init__()
        self.x, self.y, self.order = x, y, np.arange(len(x))
        self.random, self.every = random, every
        if random is not None and not every:
            random.shuffle(self.order)
    def __len__(self):
        return len(self.x) // 50
    def __getitem__(self, index):
        chosen = self.order[50 * index:50 * index + 50]
        return self.x[chosen], self.y[chosen]
    def on_epoch_end(self):
        if self.every:
            self.random.shuffle(self.order)
"""


@pytest.fixture(scope="module")
def run():
    with Session(WORKER, 2, before=BEFORE) as session:
        yield session.finish


@pytest.fixture(scope="module")
def alone():
    more = {"env": {"TF_CONFIG": None}, "handover": False}
    with Session(PLAIN, 1, before=BEFORE, **more) as session:
        yield session.finish


@pytest.fixture(scope="module")
def check(run, alone):
    """All ranks have the numbers of one process that has the chief's data."""

    def compare(body):
        (expected,) = alone(body)
        workers = run(body)
        assert len(expected.results) > 0
        for worker in workers:
            for ours, theirs in zip(worker.results, expected.results, strict=True):
                np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5, atol=1e-6)
        return workers

    return compare


@pytest.mark.soak
def test_arrays_in_another_order_or_split_are_the_chiefs(check):
    """Each rank had split them in its own way: rows were trained on and tested on."""
    body = """
m = build()
def trial(name, x, y, val, more=False):
    h = m.fit(x, y, batch_size=50, epochs=2, shuffle=False, verbose=0,
              validation_data=val)
    found = [*h.history.values()]
    if more:
        found += [m.evaluate(*val, verbose=0), m.predict(val[0], verbose=0)]
    result(name, numbers(m, *found))

r = random_of(rank)
p = r.permutation(400)                                 # train_test_split
trial("split", X[p[:300]], Y[p[:300]], (X[p[300:]], Y[p[300:]]), more=True)
chosen = r.permutation(400) < 305 - 6 * rank           # 7 batches, and 6
trial("mask", X[chosen], Y[chosen], (X[~chosen], Y[~chosen]))
labels = np.random.default_rng(1).integers(0, 4, (400, 1)).astype("float32")
noisy = X + r.normal(size=X.shape).astype("float32")   # other inputs, same targets
trial("noise", noisy, labels, (noisy[:37], labels[:37]))
"""
    chief, other = check(body)
    assert chief.output.count("the chief's arrays are used") == 1
    assert "are sent once" in chief.output
    assert "the chief's arrays" not in other.output


def test_what_may_be_a_workers_own_part_is_an_error_before_the_first_step(run):
    body = """
scope = another()
m = build()
duplicates = np.random.default_rng(rank).integers(0, 2, (400, 8)).astype("float32")
twice = np.concatenate([X[:200]] * 2)[np.random.default_rng(0).permutation(400)]
positions = np.arange(200, dtype="float32")[:, None] * np.ones(8, "float32")
for x, y in (
    (X[rank::2], Y[rank::2]),                       # a shard
    (X[200 * rank:][:190 + rank], Y[200 * rank:][:190 + rank]),
    (duplicates, duplicates[:, :1]),                # few distinct rows
    (twice[200 * rank:][:200], None),               # each row is in the data twice
    (positions, Y[200 * rank:][:200]),              # the same inputs
    (X[rank::2], np.repeat(np.arange(4.0), 50)),    # the same sorted labels
):
    if y is None:
        y = x[:, :1]
    result(refusal(m, lambda: m.fit(x, y, verbose=0)))
"""
    for worker in run(body):
        assert len(worker.results) == 6
        for [[message, steps]] in worker.results:
            assert message.startswith("The workers were given different arrays")
            assert "shard='off'" in message
            assert "data='chief'" in message
            assert "keras.utils.set_random_seed" in message
            assert steps == 0


def test_the_difference_is_an_error_or_no_matter_if_that_is_asked_for(check, run):
    body = """
scope = another(data="same")
p = random_of(rank).permutation(400)
dataset = tf.data.Dataset.from_tensor_slices((X[p], Y[p])).batch(50)
def generate():
    yield X[p], Y[p]
m = build()
result([refusal(m, lambda: m.fit(X[p], Y[p], verbose=0)),
        refusal(m, lambda: m.fit(Items(X[p], Y[p]), verbose=0)),
        refusal(m, lambda: m.train_on_batch(X[p], Y[p])),
        refusal(m, lambda: m.fit(dataset, verbose=0)),
        refusal(m, lambda: m.fit(generate(), verbose=0))])
"""
    for worker in run(body):
        (errors,) = worker.result
        starts = (
            "All workers must be given the same data",
            "The workers' PyDatasets hold different items",
            "All workers must be given the same global batch",
            "The workers read different global batches",
            "The workers read different global batches",
        )
        for (message, steps), start in zip(errors, starts, strict=True):
            assert message.startswith(start)
            assert "data='chief'" in message
            assert steps <= 2
    body = """
scope = another(data="chief")
x, y = (some[200 * rank:][:200 - 60 * rank] for some in (X, Y))  # 4 batches, and 3
m = build()
m.fit(x, y, batch_size=50, shuffle=False, verbose=0)
m.fit(Items(x, y), shuffle=False, verbose=0)
result("chief", numbers(m, m.train_on_batch(x, y)))
"""
    check(body)


def test_datasets_and_generators_that_differ_are_the_chiefs(check):
    """Also at the end of a source that can be read only once: no batch is lost."""
    body = """
m = build()
def trial(name, make, more=False):
    h = m.fit(make(0), verbose=0, shuffle=False, validation_data=make(1))
    found = [*h.history.values()]
    if more:
        found += [m.evaluate(make(2), verbose=0, steps=4),
                  m.predict(make(3), verbose=0, steps=4)]
    result(name, numbers(m, *found))

r = random_of(rank)
def shuffled(number):
    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    return rows.shuffle(400, seed=10 * rank + 1).batch(64)
def listed(number):                                    # uneven, of unknown length
    p = r.permutation(400)
    d = tf.data.Dataset.from_tensor_slices((X[p], Y[p])).batch(64)
    return d.filter(lambda x, y: True)
def draw(x, y):
    while True:
        chosen = r.integers(0, len(x), 32)
        yield x[chosen], y[chosen]
trial("shuffled", shuffled)
trial("listed", listed)
h = m.fit(draw(X, Y), epochs=3, steps_per_epoch=4, verbose=0)
result("generator", numbers(m, *h.history.values()))
def ends():
    for i in range(5):
        yield X[10 * i:10 * i + 9 + i], Y[10 * i:10 * i + 9 + i]
h = m.fit(ends(), verbose=0)
result("ends", numbers(m, *h.history.values(), m.predict(ends(), verbose=0)))
trial("items", lambda n: Items(X, Y, random_of(rank + 5 * n)), True)
# The first batches are compared; no pass begins twice for that.
passes, taken = [], []
def generate():
    passes.append(1)
    for i in range(0, 400, 40):
        taken.append(i)
        yield X[i:i + 40], Y[i:i + 40]
specs = tf.TensorSpec((None, 8)), tf.TensorSpec((None, 1))
same = tf.data.Dataset.from_generator(generate, output_signature=specs)
h = m.fit(same, epochs=2, verbose=0)
result("the same is read once", numbers(m, len(passes), len(taken)))
h = m.fit(Items(X, Y, random_of(rank), every=True), epochs=2, shuffle=False, verbose=0)
result("reordered after each epoch", numbers(m, *h.history.values()))
"""
    chief, _ = check(body)
    for kind in ("datasets", "generators", "PyDatasets"):
        assert chief.output.count(f"the chief's {kind} are used") == 1


def test_each_workers_own_part_of_a_dataset_is_named(run):
    body = """
scope = another()
m = build()
d = tf.data.Dataset.from_tensor_slices((X, Y))
def generate(x, y):
    yield x, y
def steps(first):
    for i in range(first, 400, size):
        yield X[i:i + 1], Y[i:i + 1]
def asks():
    for i in range(strategy.rank, 400, strategy.size):
        yield X[i:i + 1], Y[i:i + 1]
specs = tf.TensorSpec((None, 8)), tf.TensorSpec((None, 1))
def inside(i):
    return d.shard(2, rank).batch(10)
for data in (
    d.shard(size, rank).batch(20),
    tf.data.Dataset.range(2).flat_map(inside),
    d.skip(200 * rank).take(200).batch(20),
    tf.data.Dataset.from_tensor_slices((X[rank::2], Y[rank::2])).batch(20),
    generate(X[rank::2], Y[rank::2]),
    steps(rank),
    tf.data.Dataset.from_generator(asks, output_signature=specs),
    Items(X[rank::2], Y[rank::2]),
):
    result(refusal(m, lambda: m.fit(data, verbose=0)))
"""
    found = (
        "a `shard` in the pipeline, rank 0: shard(num_shards=2, index=0)",
        "a `shard` in the pipeline",
        "count of SkipDataset",
        "rows of rank 1 that were looked up are among rank 0's",
        "they are made from x: 0 of 200 rows",
        "first=0 on rank 0 and 1 on rank 1",
        "asks for the worker's place",
        "they are made from x: 0 of 200 rows",
    )
    for worker in run(body):
        for [[message, steps]], what in zip(worker.results, found, strict=True):
            assert "look like each worker's own part" in message
            assert what in message
            assert "shard='off'" in message
            assert steps == 0


def test_what_the_chiefs_generator_raises_is_raised_on_all_workers(run):
    body = """
def generate():
    for i in range(4):
        yield X[:20], Y[:20]
    raise KeyError("no more files")
m = build()
result(refused(lambda: m.fit(generate(), verbose=0)))
"""
    chief, other = run(body)
    assert "no more files" in chief.result[0]
    assert "The chief's data, which are used on all workers" in other.result[0]
    assert "no more files" in other.result[0]


def test_batches_that_differ(check, run):
    """They were mixed: each rank took its rows of a batch that no other had."""
    body = """
p = random_of(rank).permutation(400)
m = build()
for _ in range(2):
    loss = m.train_on_batch(X[p], Y[p])
result("batch", numbers(m, loss, m.test_on_batch(X[p], Y[p]), m.predict_on_batch(X[p])))
"""
    chief, _ = check(body)
    assert chief.output.count("the chief's batches are used") == 1
    body = """
scope = another()
m = build()
chosen = random_of(rank).integers(0, 400, 8)
result(refusal(m, lambda: m.train_on_batch(X[chosen], Y[chosen])))
"""
    for worker in run(body):
        ((message, steps),) = worker.result
        assert message.startswith("The workers were given different batches")
        assert "data='chief'" in message
        assert steps == 0


def test_the_argument_is_checked():
    with pytest.raises(ValueError, match="Received: data='any'"):
        kerasdist.RingStrategy(data="any")
