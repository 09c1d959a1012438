import pytest

from places import SUPPORT
from sessions import Session

SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(SUPPORT)!r})
import keras
import numpy as np
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2,
)
from played_layouts import Played, one_process, take_all

x = np.arange(26, dtype="float32")[:, None]
slices = tf.data.Dataset.from_tensor_slices

def given(make, **options):
    def data():
        keras.utils.set_random_seed(1)
        return {{"x": make(), **options}}
    return data

def arrays(**options):
    def make():
        keras.utils.set_random_seed(1)  # and the orders of epochs
        return {{"x": x, "y": x * 2, "batch_size": 5, "shuffle": True}} | options
    return make

class Items(keras.utils.PyDataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        rows = x[5 * index:5 * index + 5]
        return rows, rows * 2

def items(shuffle, **options):
    return given(lambda: Items(**options), shuffle=shuffle)

known = {{}}

def check(steps, epochs, data, **options):
    expected = known.get((epochs, data))
    if expected is None:
        expected = known[epochs, data] = one_process(epochs, data)
    found = take_all(steps, epochs, data, **options)
    assert found == expected, (steps, options, found, expected)
    return found
"""


@pytest.fixture(scope="module")
def run():
    with Session(SCRIPT, 1, deadline=200) as session:
        yield lambda body: session.run(body + "print('RESULT', 1, flush=True)\n")


@pytest.mark.soak
def test_arrays_when_a_worker_is_lost(run):
    """3 workers, then 2; batches of 2 rows leave replicas without rows."""
    run("""
data = arrays()
for step, aborted in ((5, True), (6, False), (6, True)):
    found = check({0: "abc", step: "bc"}, 2, data, aborted=aborted)
for options in [{"shuffle": "batch"}, {"batch_size": 2}]:
    check({0: "abc", 4: "bc"}, 1, arrays(**options))
assert len(found) == 12
assert sorted(row[0][0] for part in found[:6] for row in part) == list(range(26))
assert found[:6] != found[6:]
""")


def test_arrays_go_on_over_epochs(run):
    """`steps_per_epoch` isn't the length of the data."""
    run("""
found = check({0: "abc", 4: "ca", 7: "a", 9: "ab"}, 5, arrays(steps_per_epoch=2))
assert len(found) == 10
""")


def test_leaves_of_all_kinds_are_divided(run):
    """Several inputs, weights, text, and sparse data; a layout that stays the same."""
    run("""
import scipy.sparse
text = tf.constant([f"row {i}" for i in range(26)])
sparse = scipy.sparse.csr_matrix(np.eye(26, dtype="float32"))
weights = [x[:, 0], x[:, 0]]
many = arrays(x={"a": x, "b": x + 1, "c": text}, y=[x, x], sample_weight=weights)
check({0: "abc", 2: "bc", 3: "bc", 4: "c"}, 1, many)
check({0: "ab", 2: "b"}, 1, arrays(x=sparse, shuffle=False), local=2)
""")


@pytest.mark.soak
def test_datasets_when_a_worker_is_lost(run):
    """3 workers, then 2; the last batch is partial, and has fewer rows than workers."""
    run("""
data = given(lambda: slices((x, x * 2)).shuffle(26).batch(4))
found = check({0: "abc", 2: "bc", 7: "bca"}, 2, data)
assert sorted(row[0][0] for part in found[:7] for row in part) == list(range(26))
assert found[:7] != found[7:]
""")


def test_datasets_go_on_over_epochs(run):
    """`steps_per_epoch` isn't the length of the data."""
    run("""
data = given(lambda: slices((x, x)).repeat().batch(5), steps_per_epoch=3)
found = check({0: "abc", 3: "ca", 6: "a"}, 3, data, aborted=False)
assert len(found) == 9
""")


def test_workers_change_twice_before_a_batch_is_read(run):
    """The batch of the unfinished step isn't lost, and not given twice."""
    run("""
played = Played()
played.place(0, [1, 1, 1])
for _, _, batches in played.epochs(x=slices(x).batch(6)):
    break

def following():
    return [row[0][0] for row in played.rows(next(batches.inner))[0]]

assert following() == [0, 1]
batches.commit()
assert following() == [6, 7]
for place in ((0, [1, 1]), (1, [1, 1]), (1, [1, 1, 1])):
    played.place(*place)
    batches.renew()
    if place[1] == [1, 1]:
        batches.inner
assert following() == [8, 9]
batches.renew()
assert following() == [8, 9]
batches.commit()
batches.renew()
assert following() == [14, 15]
""")


@pytest.mark.soak
def test_each_item_is_used_once(run):
    """Also with the dataset's own threads, which read ahead."""
    run("""
check({0: "abc", 4: "bc", 5: "c"}, 1, items(False))
check({0: "ab", 6: "b"}, 2, items(False, workers=2))
""")


@pytest.mark.soak
def test_shuffled_items_keep_their_order(run):
    """It's the order of the same workers without a change."""
    run("""
data = items(True)
expected = take_all({0: "ab"}, 2, data)
assert sorted(row[0][0] for part in expected[:6] for row in part) == list(range(26))
assert expected[:6] != expected[6:]
assert take_all({0: "ab", 6: "b"}, 2, data, local=2) == expected
""")
