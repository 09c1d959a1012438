import numpy as np
import pytest
import tensorflow as tf

from kerasdist.strategies.data.choice import checksum_of_batch
from kerasdist.strategies.elastic_data import SHARED_PASS, CountedDataset


def shuffled(context=None):
    del context
    return tf.data.Dataset.range(20).shuffle(20, seed=1).batch(3)


def of_replicas():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    return strategy.distribute_datasets_from_function(shuffled)


@pytest.mark.parametrize("data", [shuffled, of_replicas])
@pytest.mark.parametrize("taken", [0, 2, 6])
def test_a_pass_continues_after_the_batches_that_were_used_up(data, taken):
    expected = [batch.numpy().tolist() for batch in shuffled()]
    one = iter(CountedDataset(data(), SHARED_PASS))
    for _ in range(taken):
        next(one)
        one.commit()
    found = iter(CountedDataset(data(), SHARED_PASS))
    found.skip(one.taken)
    assert found.taken == taken
    checksum = checksum_of_batch(tf.constant(expected[taken], tf.int64))
    assert found.next_checksum() == one.next_checksum() == checksum
    rest = found.once.at_least_one() if data is of_replicas else found
    assert [np.asarray(batch).tolist() for batch in rest] == expected[taken:]


def test_there_is_no_batch_after_the_last_one():
    found = iter(CountedDataset(shuffled(), SHARED_PASS))
    found.skip(7)
    assert found.next_checksum() == 0
