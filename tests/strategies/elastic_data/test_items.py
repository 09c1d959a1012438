"""Items of a PyDataset are divided again when the workers change."""

from __future__ import annotations

from places import SUPPORT
from workers import Workers

SCRIPT = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import keras
import numpy as np
from played_layouts import one_process, take_all

x = np.arange(26, dtype="float32")[:, None]

class Items(keras.utils.PyDataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        rows = x[5 * index:5 * index + 5]
        return rows, rows * 2

def given(shuffle, **options):
    def data():
        keras.utils.set_random_seed(1)
        return {{"x": Items(**options), "shuffle": shuffle}}
    return data
"""


def run(body):
    script = SCRIPT + body + "print('RESULT', 1, flush=True)\n"
    with Workers(script, 1, deadline=200) as job:
        job.succeed()


def test_each_item_is_used_once():
    """Also with the dataset's own threads, which read ahead."""
    run("""
for options, losses in (({}, (3, 5)), ({"workers": 2}, (6,))):
    data = given(False, **options)
    for step in losses:
        steps = {0: "abc", step: "bc", step + 1: "c"}
        assert take_all(steps, 2, data) == one_process(2, data), (options, step)
""")


def test_shuffled_items_keep_their_order():
    """It's the order of the same workers without a change."""
    run("""
data = given(True)
expected = take_all({0: "abc"}, 2, data)
assert sorted(row[0][0] for part in expected[:6] for row in part) == list(range(26))
assert expected[:6] != expected[6:]
for step in (6,):
    assert take_all({0: "abc", step: "cb"}, 2, data, local=2) == expected
""")
