import json

import pytest
from soak import soak

from asynchronous import DIGESTS, SETUP
from sessions import Session

BEFORE = (
    """
rank, client = strategy.rank, strategy.extended.workers.client
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)

class Counts(keras.Model):
    \"\"\"Adds 1 to a row of its table for each time that it's looked up.\"\"\"
    def __init__(self, rows=4000, elements=8, constraint=None):
        super().__init__()
        self.table = keras.layers.Embedding(
            rows, elements, embeddings_initializer="zeros",
            embeddings_constraint=constraint)
    def call(self, x):
        return tf.reduce_sum(self.table(x), axis=-1)
    def train_step(self, data):
        data, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            # The mean over the batch's rows, as all losses are.
            loss = -tf.reduce_sum(self(data)) / tf.cast(tf.shape(data)[0], tf.float32)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {}

def build(make, optimizer):
    with strategy.scope():
        m = make()
        m.compile(optimizer())
        m(np.zeros(1, "int32"))
    return m

"""
    + DIGESTS
)


def job(size=2, replicas=1, staleness=None):
    env = {"DEVICES": str(replicas), "STALENESS": json.dumps(staleness)}
    return Session(SETUP, size, before=BEFORE, servers=2, env=env)


@pytest.fixture(scope="module")
def run():
    with job() as free, job(staleness=0) as in_step, job(replicas=2) as double:
        jobs = {(2, 1, None): free, (2, 1, 0): in_step, (2, 2, None): double}

        def run(body, size=2, replicas=1, staleness=None, **names):
            body = "".join(f"{k} = {v!r}\n" for k, v in names.items()) + body
            options = (size, replicas, staleness)
            if options in jobs:
                return jobs[options].run(body)
            with job(*options) as another:
                return another.run(body)

        yield run


COUNTING = """
m = build(lambda: Counts(constraint=constraint), lambda: keras.optimizers.SGD(32.0))
x = rng.integers(0, 4000, size=640).astype("int32") // 3
digests = Digests()
m.fit(x, batch_size=32, epochs=3, verbose=0, callbacks=[digests])
expected = np.bincount(x, minlength=4000)[:, None] * np.full(8, 3.0)
copy = strategy.extended.workers.copies(m.table.embeddings.value)[0]
shared = np.shares_memory(*(copy.read_value()._numpy() for _ in "ab"))
result([[d for d, _ in digests.found], client.tables[-1].layout.variables[0].sparse,
        shared, float(np.abs(m.get_weights()[0] - expected).max())])
"""


@pytest.mark.parametrize(
    "options",
    [
        soak({"size": 3, "staleness": 2}, id="bounded"),
        pytest.param({}, id="free"),
        soak({"constraint": "non_neg", "replicas": 2}, id="compared_two"),
    ],
)
def test_no_change_of_any_worker_is_missing_or_there_twice(run, options):
    """Steps of 1 and sums of whole numbers: all of them are exact."""
    results = run(COUNTING, **{"constraint": None, **options})
    for digests, sparse, read_without_copy, error in results:
        assert digests == results[0][0]
        assert len(set(digests)) == 3
        assert (sparse, read_without_copy, error) == (True, True, 0)


@pytest.mark.soak
def test_bytes_grow_with_the_rows_touched_and_not_with_the_table(run):
    """Rows of 64 float32 and an index each, there and back: and little else."""
    body = """
class Note(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.before = client.traffic.bytes_sent, client.traffic.bytes_received
    def on_train_batch_end(self, batch, logs=None):
        sent = client.traffic.bytes_sent - self.before[0]
        found.append([sent, client.traffic.bytes_received - self.before[1]])

counts = {}
for rows in (20_000, 200_000):
    m = build(lambda: Counts(rows, 64), lambda: keras.optimizers.SGD(0.1))
    for touched in (10, 1000):
        found = []
        # Batches that have no row in common.
        x = np.arange(8 * touched, dtype="int32") * (rows // (8 * touched))
        m.fit(x, batch_size=touched, epochs=1, verbose=0, callbacks=[Note()])
        counts[f"{rows} {touched}"] = found
result(counts)
"""
    results = run(body, staleness=0)
    row_bytes = 64 * 4 + 4
    for touched in (10, 1000):
        size = touched * row_bytes
        for rows in (20_000, 200_000):
            each = [found[f"{rows} {touched}"] for found in results]
            assert sum(map(len, each)) == 8
            # More than that: claims of batches and what frames each message.
            assert all(0 <= sent - size < 4000 for steps in each for sent, _ in steps)
            for steps in each:
                # One's own rows, and each batch of the other worker once.
                received = sum(received for _, received in steps)
                assert len(steps) * size <= received < 8 * (size + 4000)


@pytest.mark.soak
def test_what_else_changes_rows(run):
    """Between epochs rank 0's rows are everybody's; in the midst of one they aren't."""
    body = """
class Set(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        table.scatter_update(tf.IndexedSlices([[-7.0] * 8], [3999]))
    def on_epoch_end(self, epoch, logs=None):
        self.found = getattr(self, "found", []) + [float(table[3999, 0])]
        if epoch == 0:
            table.scatter_update(tf.IndexedSlices([[5.0 + rank] * 8], [3998]))

m = build(Counts, lambda: keras.optimizers.SGD(1.0))
table = strategy.experimental_local_results(m.table.embeddings.value)[0]
x = np.arange(160, dtype="int32")
callback = Set()
m.fit(x, batch_size=1, epochs=2, verbose=0, callbacks=[callback])
result([callback.found, m.get_weights()[0][:, 0].tolist()])
"""
    for found, values in run(body):
        assert found == [0, 0]
        assert values[:160] == [2.0] * 160
        assert values[160:] == [0.0] * (4000 - 162) + [5.0, 0.0]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("eager", "replicas", "rows"),
    [(False, 1, 960), (True, 2, 4000), soak(False, 1, 4000)],
)
def test_steps_outside_of_fit(run, eager, replicas, rows):
    """Also the first one, which opens the table; eagerly it was once lost."""
    body = """
m = build(lambda: Counts(rows), lambda: keras.optimizers.SGD(4.0))
m.run_eagerly = eager
x = np.arange(160, dtype="int32")
for start in range(0, 40, 4):
    m.train_on_batch(x[start + 40 * rank:][:4])
# Here the workers meet.
m.predict(x, verbose=0)
outside = m.get_weights()[0][:, 0].tolist()
table = client.tables[-1]
dataset = tf.data.Dataset.from_tensor_slices(x).batch(4, drop_remainder=True)

def step(batch):
    strategy.run(m.train_step, args=(batch,))

step = step if eager else tf.function(step)
for batch in strategy.experimental_distribute_dataset(dataset):
    step(batch)
result([outside, m.get_weights()[0][:, 0].tolist(), table.layout.variables[0].sparse])
"""
    names = {"eager": eager, "rows": rows}
    for outside, after, sparse in run(body, replicas=replicas, **names):
        assert sparse == (rows == 4000)
        rest = [0.0] * (len(outside) - 160)
        assert outside == [1.0] * 80 + [0.0] * 80 + rest
        # A loop's own gradients are summed over replicas.
        assert after == [1.0 + replicas] * 80 + [float(replicas)] * 80 + rest
