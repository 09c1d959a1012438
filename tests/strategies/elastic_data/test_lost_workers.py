import signal

import pytest
from scripts import with_prelude
from soak import soak

from workers import Workers

SCRIPT = with_prelude("""
size = int(sys.argv[1])
x = np.random.default_rng(0).random((62, 4), "float32")
y = x.sum(axis=1, keepdims=True) ** 2
slices = tf.data.Dataset.from_tensor_slices

def data(kind):
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": 8, "shuffle": False}
    if kind == "dataset":
        batches = slices(({"in": x}, y)).shuffle(62, seed=3).batch(8)
        return {"x": batches.map(lambda a, b: (a, b, None))}
    if kind == "distributed":
        batches = slices((x, y)).shuffle(62, seed=3).batch(8)
        return {"x": strategy.experimental_distribute_dataset(batches)}
    if kind == "items":
        return {"x": Batches(8, x, y), "shuffle": False}

strategy = kerasdist.RingStrategy(elastic=size > 1, timeout=60)
rank = strategy.rank

class Killed(keras.callbacks.Callback):
    "In the first fit rank 1 in its second epoch, in the second fit rank 0."
    steps = 0
    def on_train_batch_begin(self, batch, logs=None):
        Killed.steps += 1
        if size > 1 and (rank, Killed.steps) in [(1, 11), (0, 29)]:
            os.kill(os.getpid(), signal.SIGKILL)

class PerRow(keras.layers.Layer):
    "Adds one number per row: Keras takes their mean."
    def call(self, inputs):
        squares = keras.ops.square(inputs)
        self.add_loss(0.1 * keras.ops.mean(squares, axis=-1, keepdims=True))
        return inputs

values, held = [], slices((x[:20], y[:20])).batch(8)
for kind in sys.argv[2:]:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        given = keras.Input((4,), name="in")
        hidden = PerRow()(keras.layers.Dense(3)(given))
        model = keras.Model(given, keras.layers.Dense(1)(hidden))
        adam, compiled = keras.optimizers.Adam(0.01), kind in ("distributed", "arrays")
        model.compile(adam, "mse", metrics=["mae"], jit_compile=compiled)
    if size > 1 and not values:
        result(refused(lambda: model.fit(x + rank, y, batch_size=8, verbose=0)))
    fitted = model.fit(
        **data(kind), epochs=2, verbose=0, callbacks=[Killed()], validation_data=held)
    for name in sorted(fitted.history):
        values += [float(v) for v in fitted.history[name]]
    values += [float(v) for w in model.get_weights() for v in w.ravel()]
result(values)
""")


@pytest.mark.parametrize(
    "kinds", [("dataset", "items"), soak(("arrays", "distributed"))]
)
def test_weights_and_metrics_are_those_of_one_process(kinds):
    """Ranks 1 and 0 of 3 are killed: every row counts exactly once all the same.

    Data that differ are refused, as a lost chief's can't be used.
    """
    expected = Workers(SCRIPT, 1, ["1", *kinds], deadline=120).run()[0].result
    with Workers(SCRIPT, 3, ["3", *kinds], deadline=180) as job:
        survivor = job.wait_one(2)
        lost = [job.wait_one(rank).returncode for rank in (0, 1)]
    assert lost == [-signal.SIGKILL] * 2
    assert "isn't known to be made of" not in survivor.output
    refusal, found = survivor.results
    assert "With elastic=True the chief's data can't be used" in refusal
    assert "data='chief'" not in refusal
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


OWN = with_prelude("""
strategy = kerasdist.RingStrategy(elastic=True, shard="off", timeout=60)
rank = strategy.rank
x = np.full((40, 1), rank, "float32")

class Killed(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if rank == 1 and batch == 3:
            os.kill(os.getpid(), signal.SIGKILL)

with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensor_slices((x, x)).batch(4)
model.fit(data, epochs=2, verbose=0, callbacks=[Killed()])
result(int(model.optimizer.iterations.numpy()))
""")


@pytest.mark.soak
def test_the_rest_of_a_lost_workers_own_data_is_skipped():
    with Workers(OWN, 3, deadline=120) as job:
        found = [job.wait_one(rank) for rank in (0, 2)]
    assert [each.result for each in found] == [20, 20]
    line = "1 worker(s) with data of their own were lost"
    assert [each.output.count(line) for each in found] == [1, 0]
