import itertools
import threading
import types

import numpy as np
import pytest
import tensorflow as tf
from scripts import NOTING, PRELUDE

from kerasdist._keras.data import pydataset
from kerasdist.collectives.row_exchange import equal_part
from kerasdist.strategies.data.encoding import decode, unpack
from kerasdist.strategies.data.pydataset_exchange import ItemForm
from pace import bound
from workers import Workers

SCRIPT = PRELUDE + NOTING
SCRIPT += """
keras.utils.set_random_seed(1)  # and the orders of epochs
strategy = kerasdist.RingStrategy(timeout=60)
rank, size = strategy.rank, strategy.size
x = np.arange(42, dtype="float32")[:, None]
model = noting(1e-6)

class Items(keras.utils.PyDataset):
    '''Notes which items are read.'''
    def __init__(self, length=7, **options):
        super().__init__(**options)
        self.length, self.read, self.calls = length, [], []
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        self.read.append(index)
        return self.item(index)
    def item(self, index):
        rows = x[6 * index:6 * index + 6]
        return rows, rows

def taken(log):
    '''What was noted since the last time.'''
    result, log[:] = list(log), []
    return result

"""


READ = """
class Calls(Items):
    def on_epoch_begin(self):
        self.calls.append("begin")
    def on_epoch_end(self):
        self.calls.append("end")

class Shuffling(Items):
    order = np.arange(7)
    random = np.random.default_rng(3)
    def item(self, index):
        return super().item(self.order[index])
    def on_epoch_end(self):
        self.random.shuffle(self.order)

class Augmenting(Items):
    def item(self, index):
        rows, labels = super().item(index)
        return rows + np.random.uniform(0, 0.5, rows.shape), labels

seen = {}
items = Items()
model.fit(items, epochs=2, shuffle=False, verbose=0)
seen["in order read"], seen["in order"] = taken(items.read), taken(trained)
model.fit(items, epochs=2, verbose=0)
seen["shuffled read"], seen["shuffled"] = taken(items.read), taken(trained)
predicted = model.predict(items, verbose=0)
seen["predicted"] = taken(items.read), len(predicted)
evaluated = model.evaluate(items, verbose=0)
seen["evaluated"] = taken(items.read), evaluated
items = Items(workers=2)
model.fit(items, verbose=0)
seen["threads read"], seen["threads"] = taken(items.read), taken(trained)
items = Calls(workers=2)
model.fit(items, epochs=2, verbose=0)
seen["calls"] = items.calls
taken(trained)
model.fit(Items(workers=2, use_multiprocessing=True), verbose=0)
seen["processes"] = taken(trained)
items = Shuffling(2)
items.length = 7
model.fit(items, epochs=2, shuffle=False, verbose=0)
seen["shuffling"] = taken(trained)
model.fit(Augmenting(), epochs=1, shuffle=False, verbose=0)
seen["augmenting"] = taken(trained)
import threading
seen["left"] = [t.name for t in threading.enumerate() if t.name.startswith("Worker_")]
result(seen)
"""

OTHERS = """
class Strings(Items):
    def item(self, index):
        return tf.constant([["1"], ["2"], ["3"]]), np.ones((3, 1))

strings = Strings(4)
with strategy.scope():
    inputs = keras.Input((1,), dtype="string")
    numbers = keras.layers.Lambda(
        lambda s: tf.reshape(tf.strings.to_number(s), [-1, 1]), (1,))(inputs)
    m = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(numbers))
    m.compile("sgd", "mse")
predicted = m.predict(strings, verbose=0)
m.fit(strings, verbose=0)
result([predicted.ravel().tolist(), sorted(set(strings.read))])

class Own(Items):
    def item(self, index):
        rows = x[6 * index:6 * index + 6] + 100 * rank
        return rows, rows

class Unseeded(Items):
    def __init__(self):
        super().__init__()
        self.order = np.arange(7)
    def item(self, index):
        rows, labels = super().item(self.order[index])
        return rows + np.random.default_rng().uniform(0, 0.5, rows.shape), labels
    def on_epoch_end(self):
        if trained:
            self.order = (self.order + rank) % 7

class Broken(Items):
    def item(self, index):
        if index == 5:
            raise KeyError("no such row")
        return super().item(index)

other = Items()
if rank == 1:
    other.item = lambda index: (x[:6].astype("float64"), x[:6])
result([
    refused(lambda: model.fit(Items(5 + rank), verbose=0)),
    refused(lambda: model.fit(Own(), verbose=0)),
    refused(lambda: model.fit(other, verbose=0)),
    len(taken(trained)),
    refused(lambda: model.fit(Unseeded(), epochs=3, verbose=0)),
    len(trained),
    len(model.fit(Items(), verbose=2).history["loss"]),
])
try:
    model.fit(Broken(workers=2), shuffle=False, verbose=0)
except (KeyError, kerasdist.errors.WorkerLost) as error:
    result([type(error).__name__, str(error)])
    raise SystemExit(0 if rank == 0 else 1)
"""


@pytest.fixture(scope="module")
def job():
    with Workers(SCRIPT + READ + OTHERS, 2, deadline=150) as started:
        return started.wait()


def test_each_worker_reads_its_share_and_its_rows_of_all(job):
    results = [finished.results[0] for finished in job]
    whole = [list(range(6 * i, 6 * i + 6)) for i in range(7)]

    def steps(what):
        parts = [seen[what] for seen in results]
        return [list(itertools.chain(*step)) for step in zip(*parts, strict=True)]

    for rank, seen in enumerate(results):
        own = list(range(rank, 7, 2))
        # Item 0 is read by all, once for each call, to be compared.
        assert seen["in order read"] == [0, *own, *own]
        assert seen["predicted"] == [[0, *own], 42]
        assert seen["evaluated"][0] == [0, *own]
        assert seen["evaluated"][1] == results[0]["evaluated"][1]
        assert len(seen["shuffled read"]) == 1 + 2 * len(own)
        assert seen["calls"] == ["end", "begin", "end", "begin", "end"]
        assert len(seen["threads read"]) == 1 + len(own)
        assert seen["left"] == []
    assert steps("in order") == whole * 2
    shuffled = steps("shuffled")
    assert sorted(shuffled[:7]) == sorted(shuffled[7:]) == whole
    assert whole != shuffled[:7] != shuffled[7:]
    read = [index for seen in results for index in seen["shuffled read"][1:]]
    assert sorted(read) == sorted([*range(7), *range(7)])
    assert sorted(steps("threads")) == sorted(steps("processes")) == whole
    shuffling = steps("shuffling")
    assert sorted(shuffling[:7]) == sorted(shuffling[7:]) == whole
    assert shuffling[:7] != shuffling[7:]
    assert steps("augmenting") == whole


def test_other_datasets_and_what_getitem_raises(job):
    """What can't be exchanged is read by all, as before; differences are errors.

    They are errors on all ranks alike, so that the strategy can still be used.
    """
    here, there = job
    for finished in (here, there):
        _, (predicted, read), errors, _ = finished.results
        assert predicted == [1, 2, 3] * 4
        assert read == [0, 1, 2, 3]
        length, own, other, none, unseeded, one_epoch, after = errors
        assert "rank 0: length=5, shuffle=True" in length
        assert "rank 1: length=6, shuffle=True" in length
        assert own.startswith("The workers were given different PyDatasets")
        assert "PyDatasets of different forms. Received: rank 0: x: float32[2]" in other
        assert none == 0
        # The labels aren't random: they give it away.
        assert unseeded.startswith("The workers were given different PyDatasets")
        assert one_epoch == 7
        assert after == 1
    assert (
        "kerasdist: 2 workers with 2 replicas in all, global batch 6, per worker "
        "3, 7 batch(es), about 42 samples, about 21 of them here, learning rate 1e-06"
    ) in here.output
    assert there.results[3] == ["KeyError", "'no such row'"]
    assert here.results[3][0] == "WorkerLost"
    assert "Rank 1" in here.results[3][1]


@pytest.mark.parametrize("dtype", ["float16", "bool"])
def test_an_item_becomes_bytes_and_back(dtype):
    item = {"b": (np.ones((3, 2), dtype), None), "a": np.zeros((3, 0, 5), dtype)}
    form = ItemForm(item)
    assert form.exchangeable
    longer = {"b": (np.ones((4, 7), dtype), None), "a": np.zeros((4, 1, 2), dtype)}
    for index, other in enumerate([item, longer]):
        facts, leaves = unpack(form.pack(index, other))
        assert facts == {"index": index}
        back = tf.nest.pack_sequence_as(form.example, list(map(decode, leaves)))
        assert back["b"][1] is None
        np.testing.assert_array_equal(back["a"], other["a"])
        np.testing.assert_array_equal(back["b"][0], other["b"][0])
        assert back["a"].dtype == dtype
    with pytest.raises(ValueError, match=r"^All items of a PyDataset must have"):
        form.pack(2, {"b": (np.ones(3, dtype), None), "a": item["a"]})


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 12])
def test_parts_in_rank_order_are_the_batch(rows):
    parts = [list(range(rows))[equal_part(rows, 3, replica)] for replica in range(3)]
    assert list(itertools.chain(*parts)) == list(range(rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_reading_thread_that_does_not_end_is_left_to_itself(monkeypatch):
    """A pool of processes that hangs in its start, for instance."""
    monkeypatch.setattr(pydataset, "CLOSE_SECONDS", 0.2)
    end, before = threading.Event(), set(threading.enumerate())

    def hang(*_):
        end.wait(bound(60))
        return types.SimpleNamespace(close=end.set)

    keras_module = pydataset.py_dataset_adapter
    monkeypatch.setattr(keras_module, "get_pool_class", lambda processes: hang)
    kind = type("Data", (keras_module.PyDataset,), {"num_batches": 3})
    adapter = types.SimpleNamespace(py_dataset=kind(workers=1), shuffle=False)
    reader = pydataset.ItemData(adapter).reader(0, 1, None)
    (stuck,) = set(threading.enumerate()) - before
    reader.close()
    assert stuck.is_alive()
    end.set()
    stuck.join(bound(10))
    assert not stuck.is_alive()
