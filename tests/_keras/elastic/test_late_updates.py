"""Updates that wait for the commit of their step, and steps that would notice it."""

import pytest
import tensorflow as tf

from kerasdist._keras.elastic.step import LateUpdates

BEFORE = {
    "nothing": lambda weight: None,
    "a read": lambda weight: weight.read_value(),
    "a write": lambda weight: weight.assign_add(1.0),
    "a write in a function": lambda weight: tf.function(weight.assign_add)(1.0),
}
AFTER = {
    "nothing": lambda weight: None,
    "a read": lambda weight: weight.read_value(),
    "a read in a branch": lambda weight: tf.cond(
        tf.random.uniform([]) < 2.0, weight.read_value, lambda: 0.0
    ),
    "a write": lambda weight: weight.assign_sub(1.0),
}


def trace(before, after, *, in_branch=False):
    weight, other = tf.Variable(1.0), tf.Variable(5.0)
    order: list[str] = []

    def note(event):
        return tf.numpy_function(
            lambda: order.append(event) or 0, [], tf.int64, name="note"
        )

    def parts():
        return [other.read_value()]

    def reduce(beside=()):
        return [weight.read_value() * 0.0, *(2.0 * each for each in beside)]

    def commit(sums):
        # What is summed has been changed after `add`.
        with tf.control_dependencies([tf.debugging.assert_equal(sums, [14.0])]):
            return [note("commit")]

    def update(gradients):
        assert len(gradients) == 1
        with tf.control_dependencies([note("update")]):
            weight.assign_add(10.0)
        return 0

    made = []

    @tf.function(autograph=False)
    def step():
        updates = LateUpdates([weight], parts, commit)
        made.append(updates)
        before(weight)
        other.assign_add(1.0)
        if in_branch:
            tf.cond(other > 0.0, lambda: int(updates.add(reduce, update)), lambda: 0)
        else:
            assert updates.add(reduce, update)
        after(weight)
        note("end")
        other.assign_add(1.0)
        updates.finish()

    step.get_concrete_function()
    if not made[-1].noticed:
        step()
        assert weight.numpy() == 11.0
        assert order.index("commit") < order.index("update")
    return made[-1].noticed


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("after", AFTER)
def test_a_step_notices_late_updates(before, after):
    noticed = trace(BEFORE[before], AFTER[after])
    assert noticed == ("write" in before or after != "nothing")


def test_an_update_in_a_branch_stays_there():
    assert trace(BEFORE["nothing"], AFTER["nothing"], in_branch=True)
