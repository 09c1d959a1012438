import pytest
import tensorflow as tf

from kerasdist.strategies.measure.communication import Slot, StepCounters


@pytest.mark.parametrize("before", [0, 2**63 - 1, -(2**63), -1, 2**40 - 1])
def test_steps_and_samples_are_counted(before):
    """Also where the number that has both begins again."""
    marks = StepCounters("/device:CPU:0")
    marks._counted.assign(before)
    start = marks.read()

    @tf.function
    def step(batch):
        marks.count(tf.shape(batch, out_type=tf.int64)[0])

    for rows in (8, 8, 0, 5):
        step(tf.zeros([rows, 2]))
    first = marks.read() - start
    assert first.shape == (len(Slot),)
    assert (first[Slot.STEPS], first[Slot.ROWS]) == (4, 21)
    step(tf.zeros([3, 2]))
    marks.add_eagerly({Slot.STEPS: 1.0, Slot.ROWS: 2.0, Slot.MEASURED: 1.0})
    second = marks.read() - start - first
    assert (second[Slot.STEPS], second[Slot.ROWS], second[Slot.MEASURED]) == (2, 5, 1)
    assert not (marks.read() - start - first - second).any()
