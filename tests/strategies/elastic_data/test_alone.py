"""Passes over a dataset by a worker alone: counted, and continued from a place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from kerasdist.strategies.data.choice import checksum_of_batch
from kerasdist.strategies.elastic_data import SHARED_PASS, CountedDataset


def shuffled() -> Any:
    return tf.data.Dataset.range(20).shuffle(20, seed=1).batch(3)


def rows(batches: Any) -> list[list[int]]:
    return [np.asarray(batch).tolist() for batch in batches]


@pytest.mark.parametrize("taken", [0, 2, 6])
def test_a_pass_continues_after_the_batches_that_were_used_up(taken: int) -> None:
    expected = rows(shuffled())
    data = CountedDataset(shuffled(), SHARED_PASS)
    one = iter(data)
    for _ in range(taken):
        next(one)
        one.commit()
    found = iter(CountedDataset(shuffled(), SHARED_PASS))
    found.skip(one.taken)
    assert found.taken == taken
    assert found.next_checksum() == one.next_checksum()
    assert found.next_checksum() == checksum_of_batch(
        tf.constant(expected[taken], tf.int64)
    )
    assert isinstance(found.once, tf.data.Iterator)
    assert rows(found) == expected[taken:]


def test_there_is_no_batch_after_the_last_one() -> None:
    found = iter(CountedDataset(shuffled(), SHARED_PASS))
    found.skip(7)
    assert found.next_checksum() == 0


def test_parts_of_replicas_are_one_batch() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    def parts(context: Any) -> Any:
        del context
        return shuffled()

    data = strategy.distribute_datasets_from_function(parts)
    found = iter(CountedDataset(data, SHARED_PASS))
    expected = rows(shuffled())
    found.skip(3)
    assert found.next_checksum() == checksum_of_batch(
        tf.constant(expected[3], tf.int64)
    )
    assert rows(found.once.at_least_one()) == expected[3:]
