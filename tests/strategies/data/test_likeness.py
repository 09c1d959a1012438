import numpy as np
import pytest
import tensorflow as tf

from kerasdist.strategies.data.choice import (
    are_alike,
    count_known,
    is_telling,
    sample_rows,
)
from kerasdist.strategies.data.comparison import digest_of, row_hashes
from kerasdist.strategies.data.encoding import decode, encode, pack, unpack

RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(1000, 5)).astype(np.float32)
LABELS = RANDOM.integers(0, 10, 1000)


def hashes(array):
    return row_hashes([encode(array)])


def alike(chief, other):
    sample = sample_rows(hashes(other))
    repeated = max(sample.repeated, sample_rows(hashes(chief)).repeated)
    found = count_known(np.unique(hashes(chief)), sample.hashes)
    return are_alike(found, len(sample.hashes), repeated)


@pytest.mark.parametrize("distinct", [2, 50, 300, 2000])
def test_rows_that_repeat_do_not_make_shards_alike(distinct):
    rows = ROWS[:1, :] + RANDOM.integers(0, distinct, (4000, 1)).astype(np.float32)
    for order in (rows, np.sort(rows, axis=0)):
        assert not alike(order[0::2], order[1::2])
        assert not alike(order[:2000], order[2000:])
    doubled = np.concatenate([ROWS, ROWS])[RANDOM.permutation(2000)]
    assert not alike(doubled[:1000], doubled[1000:])


def test_which_targets_tell_that_the_data_are_the_same():
    assert is_telling(hashes(LABELS))
    assert is_telling(hashes(RANDOM.random(1000) < 0.5))
    for trivial in (
        np.zeros(1000),
        np.sort(LABELS),
        np.arange(1000) % 10,
        np.arange(1000.0),
        np.repeat(np.arange(10), 100),
        LABELS[:20],
    ):
        assert not is_telling(hashes(trivial))


TENSORS = [
    np.arange(12.0).reshape(4, 3),
    np.array([True, False, True, True]),
    np.zeros((4, 0)),
    np.array(["a", "bc", "", "é"]),
    tf.constant([["a", "b"], ["c", ""], ["d", "e"], ["a", "c"]]),
    tf.ragged.constant([[[1, 2], [3]], [[4]], [], [[], [5]]], dtype=tf.int64),
    tf.ragged.constant([["a", "bcd"], ["e"], [], ["f"]]),
    tf.sparse.from_dense([[0, 1.0], [2, 0], [0, 3], [0, 0]]),
    tf.cast([[1.5], [2.5], [3.5], [4.5]], tf.bfloat16),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: encode(t).form)
def test_a_rows_hash_goes_with_the_row(tensor):
    order = [2, 0, 3, 1]
    if isinstance(tensor, tf.SparseTensor):
        moved = tf.sparse.from_dense(tf.gather(tf.sparse.to_dense(tensor), order))
    else:
        moved = tf.gather(tensor, order)
    before, after = hashes(tensor), hashes(moved)
    assert list(after) == list(before[order])
    if encode(tensor).form not in ("float64[2]", "bool[1]"):
        assert len(set(before)) == 4
    # And the tensor comes back from its bytes.
    facts, leaves = unpack(pack({"a": 1}, [encode(tensor), encode(None)]))
    back = decode(leaves[0])
    assert facts == {"a": 1}
    assert decode(leaves[1]) is None
    assert digest_of([encode(back)]) == digest_of([encode(tensor)])
    assert encode(back).form == encode(tensor).form


def test_a_value_that_differs_shows_wherever_it_is_in_a_large_array():
    large = np.zeros((3000, 500), np.float64)
    for place in ((0, 0), (1234, 77), (2999, 499)):
        other = large.copy()
        other[place] = 1.0
        for one, two in ((large, other), (large[:, ::-1], other[:, ::-1])):
            assert digest_of([encode(one)]) != digest_of([encode(two)])
