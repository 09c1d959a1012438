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
    dataset = parts(6)
    assert iter(dataset).element_spec == dataset.element_spec
    leaves = tf.nest.flatten(dataset.element_spec, expand_composites=True)
    fill, number = tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)
    assert leaves == [fill, fill, number, number]
    found = [numbers(batch) for batch in dataset]
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


def test_an_optional_has_a_batch_or_none():
    # The last batch hasn't a part for each replica.
    iterator = iter(parts(5))
    assert isinstance(iterator, tf.distribute.DistributedIterator)

    @tf.function
    def count():
        total = tf.constant(0, tf.int64)
        batch = iterator.get_next_as_optional()
        while batch.has_value():
            first, second = batch.get_value()[1]["n"].values
            total += first * 10 + second
            batch = iterator.get_next_as_optional()
        return total

    assert int(count()) == 1 + 23
    assert not iterator.get_next_as_optional().has_value()
