import pytest
import tensorflow as tf

from kerasdist import _tf

HOST = "/device:CPU:0"


def parts(count):
    dataset = tf.data.Dataset.range(count).map(
        lambda n: (tf.fill([n % 3], n), {"n": n})
    )
    return _tf.PartsDataset(dataset, (HOST, HOST), HOST)


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
