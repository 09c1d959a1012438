"""Collectives in a graph run one after the other, in the order of the program."""

import mmap
import time

import numpy as np
import pytest
import tensorflow as tf

import kerasdist


@pytest.fixture
def ops():
    strategy = kerasdist.RingStrategy(["CPU:0"])
    yield strategy.extended.workers.ops
    strategy.close()


def test_order_over_functions_branches_and_loops(ops):
    """Each sleeps: one that doesn't wait for those before it would overtake them."""
    ran = []

    def collective(name):
        def function(array):
            ran.append(f"{name} begins")
            time.sleep(0.02)
            ran.append(f"{name} ends")
            return [array]

        one = tf.constant(1.0)
        return ops.call(function, [one], [one])[0]

    @tf.function
    def inner():
        return collective("inner 1"), collective("inner 2")

    @tf.function
    def outer(yes):
        first = collective("first")
        branch = tf.cond(
            yes, lambda: collective("branch"), lambda: tf.constant(np.float32(1))
        )
        inner()
        (rounds,) = tf.while_loop(
            lambda i: i < 3, lambda i: [i + collective("loop")], [tf.constant(0.0)]
        )
        return first, branch, rounds, collective("last")

    names = ["first", "branch", "inner 1", "inner 2", *["loop"] * 3, "last"]
    expected = [f"{name} {what}" for name in names for what in ("begins", "ends")]
    for _ in range(2):
        ran.clear()
        outer(tf.constant(True))
        assert ran == expected


def test_tensorflow_looks_for_no_line_of_a_collective_that_fails(ops):
    """Only for others' operations: it has crashed in that."""

    def fail(*arrays):
        raise OSError("broken")

    @tf.function(autograph=False)
    def step(ours):
        one = tf.constant(1.0)
        if ours:
            return ops.call(fail, [one], [one])
        return tf.numpy_function(fail, [one], one.dtype)

    for ours in (True, False):
        with pytest.raises(tf.errors.UnknownError, match="broken") as caught:
            step(ours)
        assert ("Detected at node" in caught.value.message) == (not ours)


def test_tensorflow_writes_to_no_memory_of_numpys():
    """Results that are lent are read by other workers, too: nothing may change them.

    Operations that write into their input where nobody else needs it, and variables
    that take a value over.
    """
    shape = (1024, 1024)
    memory = mmap.mmap(-1, 4 << 20)
    array = np.frombuffer(memory, np.float32).reshape(shape)
    lent = array.view()
    lent.flags.writeable = False

    def give():
        array[...] = 1
        return lent

    @tf.function
    def step(variable):
        tensor = tf.numpy_function(give, [], tf.float32)
        tensor.set_shape(shape)
        in_place = tf.nn.relu(-(tensor * 3.0 + 1.0))
        variable.assign(tensor)
        variable.assign_add(in_place + 5.0)
        variable.scatter_nd_add([[0, 0]], [7.0])
        return tensor

    variable = tf.Variable(tf.zeros(shape))
    for _ in range(3):
        result = step(variable)
        # Not copied either.
        assert (array == 1).all()
        array[0, 0] = 2
        assert result.numpy()[0, 0] == 2
        assert variable.numpy()[0, 0] == 13
