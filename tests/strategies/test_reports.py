import pytest
from scripts import PRELUDE

from sessions import Session

BEFORE = """
import logging
x = np.random.default_rng(0).normal(size=(23, 4)).astype("float32")
y = x.sum(1, keepdims=True)
rank = strategy.rank

def model(*layers):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        made = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        made.compile("sgd", "mse")
    return made

@contextlib.contextmanager
def lines_said():
    said, handler, logger = [], logging.Handler(), logging.getLogger("kerasdist")
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield said
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
"""


@pytest.fixture(scope="module")
def run():
    setup = PRELUDE + "strategy = kerasdist.RingStrategy(timeout=60)\n"
    with Session(setup, 2, before=BEFORE) as session:
        yield session.run


def test_predictions_may_be_strings(run):
    found = run("""
class Named(keras.Model):
    def call(self, x):
        return {"sign": tf.where(x > 0, "plus", "minus"), "same": x}

with strategy.scope():
    named = Named()
found = named.predict(x, batch_size=8, verbose=0)
expected = np.where(x > 0, b"plus", b"minus")
result([bool((found["sign"] == expected).all()), bool((found["same"] == x).all())])
""")
    assert found == [[True, True]] * 2


def test_temporary_folders_are_each_ranks_own(run):
    """A file may be read in the next line, although others remove theirs."""
    found = run("""
import tempfile
trained = model()
loaded = []
for number in range(2):
    with tempfile.TemporaryDirectory() as folder:
        if rank == 1:
            time.sleep(0.1 * number)  # the chief has removed its own
        path = os.path.join(folder, "w.weights.h5")
        best = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        trained.fit(x, y, batch_size=8, verbose=0, callbacks=[best])
        trained.load_weights(path)
        whole = os.path.join(folder, "model.keras")
        trained.save(whole)
        again = keras.models.load_model(whole)
        loaded.append([w.tolist() for w in again.get_weights()])
result([len(loaded), loaded[-1]])
""")
    assert found[0][0] == 2
    assert found[0] == found[1]


def test_cache_files_are_each_ranks_own(run, tmp_path):
    found = run(
        """
data = tf.data.Dataset.from_tensor_slices((x, y)).cache(os.environ["FILE"]).batch(8)
losses = model().fit(data, epochs=3, verbose=0).history["loss"]
result(losses)
""",
        FILE=str(tmp_path / "cached"),
    )
    assert len(found[0]) == 3
    assert found[0] == found[1]
    names = {path.name.partition(".data")[0] for path in tmp_path.iterdir()}
    assert names >= {"cached.index", "cached.rank-1.index"}


def test_vocabularies_that_differ_are_found_before_the_first_step(run):
    found = run("""
words = ["a", "b", "c"]
with strategy.scope():
    inputs = keras.Input((1,), dtype="string")
    lookup = keras.layers.StringLookup(vocabulary=words[::-1] if rank else words)
    numbers = keras.ops.cast(lookup(inputs), "float32")
    looking = keras.Model(inputs, keras.layers.Dense(1)(numbers))
    looking.compile("sgd", "mse")
texts = tf.constant([["a"], ["b"], ["c"], ["a"]])
result(refused(lambda: looking.fit(texts, np.ones((4, 1)), verbose=0)))
""")
    assert found[0] == found[1]
    assert "look up words in different vocabularies" in found[0]
    assert "of ranks [1] have other words, or another order" in found[0]
    assert "PYTHONHASHSEED" in found[0]


def test_state_in_mixed_precision_has_its_own_dtype(run):
    found = run("""
class Rows(keras.layers.Layer):
    def build(self, shape):
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False)
    def call(self, x, training=False):
        if training:
            self.rows.assign_add(tf.cast(tf.shape(x)[0], tf.float16))
            self.mean.assign(0.5 * self.mean + tf.reduce_mean(x))
        return x

counted = Rows(dtype="mixed_float16")
model(counted).fit(x, y, batch_size=8, epochs=4, verbose=0)
result([float(counted.rows), counted.mean.dtype])
""")
    assert found == [[4 * 23.0, "float32"]] * 2


def test_functions_that_cannot_be_those_of_all_rows_are_named(run):
    first, second = run("""
class Odd(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="odd")
        self.kept = self.add_variable((3,), "zeros", name="kept")
    def update_state(self, y, p, sample_weight=None):
        self.kept.assign(tf.sort(p[:, 0])[:3])
    def result(self):
        return keras.ops.sum(self.kept)

def fixed(y, p):
    return tf.reduce_mean(tf.reshape(p - y, [int(p.shape[0])]) ** 2)

made = model()
made.compile("sgd", fixed, metrics=[Odd()])
with lines_said() as lines:
    made.fit(x[:16], y[:16], batch_size=8, verbose=0)
result([[line for line in lines if name in line] for name in ("'fixed'", "'odd'")])
""")
    (loss,), (metric,) = first
    assert "the loss 'fixed' can't be looked at by itself" in loss
    assert "its result may differ from that of one process" in metric
    assert second == [[], []]


@pytest.mark.soak
def test_ends_of_data_that_keras_counts_as_steps_are_told_of(run):
    """Also with `verbose=0`: Adam's updates differ from plain Keras's."""
    first, second = run("""
made = model()
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
with lines_said() as lines:
    made.fit(data, epochs=2, verbose=0)
    known = len(lines)
    made.fit(data.filter(lambda x, y: True), epochs=2, verbose=0)
result([int(made.optimizer.iterations), [
    number >= known for number, line in enumerate(lines)
    if "counts the steps that were taken" in line]])
""")
    assert first == [12, [True]]
    assert second == [12, []]
