"""Arrays are divided again when the workers change, and each row is used once."""

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

def arrays(**options):
    def make():
        keras.utils.set_random_seed(1)  # and the orders of epochs
        return {{"x": x, "y": x * 2, "batch_size": 5, "shuffle": True}} | options
    return make

def check(steps, epochs, data, **options):
    expected = one_process(epochs, data)
    found = take_all(steps, epochs, data, **options)
    assert found == expected, (steps, options, found, expected)
    return found
"""


def run(body):
    with Workers(SCRIPT + body, 1, deadline=200) as job:
        return job.succeed()[0].result


def test_a_worker_is_lost_at_any_step():
    """3 workers, then 2; batches of 2 rows leave replicas without rows."""
    body = """
for step in range(1, 12):
    for aborted in (True, False):
        found = check({0: "abc", step: "bc"}, 2, arrays(), aborted=aborted)
for options in [{"shuffle": False}, {"shuffle": "batch"}, {"batch_size": 2}]:
    for step in (1, 4, 8):
        check({0: "abc", step: "bc"}, 2, arrays(**options))
assert len(found) == 12
assert sorted(row[0][0] for part in found[:6] for row in part) == list(range(26))
assert found[:6] != found[6:]
print("RESULT", 1, flush=True)
"""
    run(body)


@pytest.mark.soak
def test_workers_change_several_times():
    """Also down to one worker, which needs no facts, and up again."""
    body = """
for steps in [
    {0: "abc", 2: "ac", 3: "c"}, {0: "ab", 5: "b", 6: "ba", 7: "bac", 11: "c"},
    {0: "a", 1: "ab", 2: "abc", 3: "abcd", 4: "bcd", 9: "cd", 10: "dc"},
]:
    for local, size, aborted in [(1, 5, True), (1, 3, False), (2, 7, True)]:
        check(steps, 2, arrays(batch_size=size), local=local, aborted=aborted)
print("RESULT", 1, flush=True)
"""
    run(body)


def test_an_iterator_goes_on_over_epochs():
    """`steps_per_epoch` isn't the length of the data."""
    body = """
for per_epoch in (2, 3):
    data = arrays(steps_per_epoch=per_epoch)
    for step in range(1, 9):
        found = check({0: "abc", step: "ca", step + 3: "a"}, 5, data)
        assert len(found) == 5 * per_epoch
print("RESULT", 1, flush=True)
"""
    run(body)


def test_leaves_of_all_kinds_are_divided():
    """Several inputs, weights, text, and sparse data."""
    body = """
import scipy.sparse
text = tf.constant([f"row {i}" for i in range(26)])
sparse = scipy.sparse.csr_matrix(np.eye(26, dtype="float32"))
weights = [x[:, 0], x[:, 0]]
many = arrays(x={"a": x, "b": x + 1, "c": text}, y=[x, x], sample_weight=weights)
for data in (many, arrays(x=sparse, shuffle=False)):
    for local in (1, 2):
        check({0: "abc", 2: "bc", 4: "c"}, 1, data, local=local)
print("RESULT", 1, flush=True)
"""
    run(body)


def test_the_workers_that_stay_do_not_change():
    """The same layout: a step that was aborted gets the same part again."""
    body = """
check({0: "abc", 2: "abc", 3: "abc"}, 1, arrays())
print("RESULT", 1, flush=True)
"""
    run(body)
