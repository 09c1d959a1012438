"""Datasets are divided again when the workers change, and each batch is used once."""

from __future__ import annotations

import pytest

from places import SUPPORT
from workers import Workers

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

def check(steps, epochs, data, **options):
    expected = one_process(epochs, data)
    found = take_all(steps, epochs, data, **options)
    assert found == expected, (steps, options, found, expected)
    return found
"""


def run(body):
    with Workers(
        SCRIPT + body + "print('RESULT', 1, flush=True)\n", 1, deadline=200
    ) as job:
        job.succeed()


def test_a_worker_is_lost_at_any_step():
    """3 workers, then 2; the last batch is partial, and has fewer rows than workers."""
    run("""
data = given(lambda: slices((x, x * 2)).shuffle(26).batch(4))
for step in (1, 2, 3, 6, 7, 8, 12, 13):
    aborted = step % 3 != 0
    found = check({0: "abc", step: "bc"}, 2, data, aborted=aborted)
assert sorted(row[0][0] for part in found[:7] for row in part) == list(range(26))
assert found[:7] != found[7:]
""")


@pytest.mark.soak
def test_workers_change_several_times():
    """Also down to one worker, which needs no facts, and up again."""
    run("""
for steps in [
    {0: "ab", 5: "b", 6: "ba", 7: "bac", 11: "c"},
    {0: "a", 1: "ab", 2: "abc", 3: "abcd", 4: "bcd", 9: "cd", 10: "dc"},
]:
    for local, size, aborted in [(1, 5, True), (2, 3, False)]:
        data = given(lambda: slices((x, x)).batch(size))
        check(steps, 2, data, local=local, aborted=aborted)
""")


def test_an_iterator_goes_on_over_epochs():
    """`steps_per_epoch` isn't the length of the data."""
    run("""
for make in (
    lambda: slices((x, x)).batch(5).repeat(), lambda: slices((x, x)).repeat().batch(5)
):
    data = given(make, steps_per_epoch=3)
    for step in (2, 3, 7):
        found = check({0: "abc", step: "ca", step + 3: "a"}, 4, data)
        assert len(found) == 12
""")


@pytest.mark.soak
def test_elements_of_all_kinds_are_divided():
    """Dictionaries, None, text, ragged and sparse tensors, unknown shapes."""
    run("""
text = tf.constant([f"row {i}" for i in range(26)])
ragged = tf.RaggedTensor.from_row_lengths(tf.range(52.0), [2, 0, 4] * 8 + [2, 2])
sparse = tf.sparse.from_dense(np.eye(26, dtype="float32"))

def unknown(rows):
    rows = tf.numpy_function(lambda r: r, [rows], tf.float32)
    return rows, rows

for make in (
    lambda: slices(({"a": x, "b": text}, x)).batch(4),
    lambda: slices((x, x)).batch(4).map(lambda a, b: ({"a": a, "none": None}, b)),
    lambda: slices((ragged, x)).batch(4),
    lambda: slices((sparse, x)).batch(4),
    lambda: slices((x, x)).batch(5, drop_remainder=True),
    lambda: slices(x).batch(4).map(unknown),
    lambda: tf.data.Dataset.zip(slices(x).batch(4), slices(x).batch(4)),
):
    check({0: "abc", 2: "bc", 3: "c"}, 1, given(make))
    check({0: "abc", 2: "bca", 4: "bc"}, 1, given(make), local=2, aborted=False)
""")


def test_workers_change_twice_before_a_batch_is_read():
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
