"""Parts of batches for replicas in host memory, one after the other."""

from __future__ import annotations

import pytest
import tensorflow as tf

from kerasdist import _tf

HOST = "/device:CPU:0"


def parts(count):
    dataset = tf.data.Dataset.range(count).map(
        lambda n: (tf.fill([n % 3], n), {"n": n})
    )
    return _tf.PartsDataset(dataset, (HOST, HOST), HOST)


def numbers(batch):
    """The values of each replica's part."""
    fills, rest = batch
    return [
        (fill.numpy().tolist(), int(n))
        for fill, n in zip(fills.values, rest["n"].values, strict=True)
    ]


def test_each_replica_gets_one_part_of_a_batch():
    found = [numbers(batch) for batch in parts(6)]
    assert found == [
        [([], 0), ([1], 1)],
        [([2, 2], 2), ([], 3)],
        [([4], 4), ([5, 5], 5)],
    ]


def test_a_function_takes_iterators_and_is_traced_once():
    traced = []

    @tf.function
    def take(iterator):
        traced.append(iterator)
        first, second = next(iterator)[1]["n"].values
        return first * 10 + second

    dataset = parts(4)
    for _ in range(3):
        iterator = iter(dataset)
        assert [int(take(iterator)), int(take(iterator))] == [1, 23]
        with pytest.raises(tf.errors.OutOfRangeError):
            take(iterator)
    assert len(traced) == 1
