"""Gradients of embeddings: what is sent, and that the numbers stay the same."""

import numpy as np
import pytest
import tensorflow as tf
from scripts import with_prelude
from soak import soak

from kerasdist.strategies.reduce.sparse_parts import rows_of
from workers import Workers

pytestmark = pytest.mark.timeout(400)

SCRIPT = with_prelude("""
from kerasdist.collectives.checked import CheckedCommunicator

strategy = kerasdist.RingStrategy(timeout=60)
sent = []  # of each exchange: this worker's slices; of all collectives: how many
original = CheckedCommunicator.exchange_rows

def exchange_rows(self, tables, *args, **more):
    before = self.sequence
    found = original(self, tables, *args, **more)
    # A header, and then the slices or the table.
    kind = "table" if tables[0].rows and len(found[1]) == tables[0].rows else "slices"
    sent.append([kind, len(tables[0].indices), self.sequence - before])
    return found

CheckedCommunicator.exchange_rows = exchange_rows
rng = np.random.default_rng(0)
y = rng.integers(0, 2, size=27)

def fit(optimizer, table, used, batch_size=16, eagerly=False):
    '''Train on sentences of 30 words, `used` different ones, of a table of some.'''
    x = np.random.default_rng(1).integers(0, used, size=(27, 30)) * (table // used)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        m = keras.Sequential([
            keras.Input((30,), dtype="int64"),
            keras.layers.Embedding(table, 8),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2),
        ])
        m.compile(
            optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            run_eagerly=eagerly,  # takes less time
        )
    sent.clear()
    m.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return [[w.tolist() for w in m.get_weights()], sent[:]]

o = keras.optimizers
windows = lambda: o.Adam(0.1, gradient_accumulation_steps=2)
found = {
    "sgd": fit(lambda: o.SGD(1.0), 1000, 10),
    "adam": fit(lambda: o.Adam(0.1), 1000, 10, eagerly=True),
    "few": fit(windows, 1000, 10, eagerly=True),
    "many": fit(windows, 12, 12, eagerly=True),
}
if "MORE" in os.environ:
    clipped, scaled = o.SGD(1.0, clipnorm=0.001), o.LossScaleOptimizer(windows())
    found["scaled adam"] = fit(lambda: scaled, 1000, 10, eagerly=True)
    found["table"] = fit(lambda: o.SGD(1.0), 12, 12)
    found["empty"] = fit(lambda: o.SGD(1.0), 1000, 10, 13, eagerly=True)
    found["clipped"] = fit(lambda: clipped, 1000, 10, eagerly=True)
result(found)
""")


@pytest.fixture(scope="module", params=[{}, soak({"MORE": "1"})], ids=["few", "all"])
def jobs(request):
    more = {"env": request.param, "deadline": 190}
    return [Workers(SCRIPT, size, **more).results() for size in (1, 2)]


def test_weights_are_those_of_one_process(jobs):
    (alone,), (chief, other) = jobs
    for case, (weights, _) in alone.items():
        assert chief[case][0] == other[case][0]
        for mine, expected in zip(chief[case][0], weights, strict=True):
            np.testing.assert_allclose(
                mine, expected, rtol=1e-5, atol=1e-6, err_msg=case
            )


def test_what_is_sent(jobs):
    sent = {case: sent for case, (_, sent) in jobs[1][0].items()}
    # What is linear is added up before it is sent.
    for case in sent.keys() & {"sgd", "scaled adam", "empty"}:
        for kind, rows, collectives in sent[case]:
            assert (kind, collectives) == ("slices", 2)
            assert rows <= 10  # of 8 x 30 slices
    # What isn't gets each slice, of 16 and 11 rows, of which the chief has 8 and 6.
    each = [["slices", rows * 30, 2] for rows in (8, 6)]
    assert sent["adam"] == each * 2
    if "table" in sent:  # of all
        assert sent["clipped"] == each * 2
        assert sent["table"] == [["table", 12, 2]] * 4
    # Accumulated tables are sent by their rows: four steps, two updates.
    assert sent["few"] == [["slices", 10, 2]] * 2
    assert sent["many"] == [["table", 12, 2]] * 2


@pytest.mark.parametrize("shape", [(5,), (5, 2), (5, 2, 3)])
def test_rows_of(shape):
    table = np.zeros(shape, "float32")
    table[1], table[3] = np.nan, -1
    table.reshape(5, -1)[3, 1:] = 0
    slices = rows_of(tf.constant(table))
    assert slices.indices.numpy().tolist() == [1, 3]
    np.testing.assert_array_equal(tf.convert_to_tensor(slices), table)
