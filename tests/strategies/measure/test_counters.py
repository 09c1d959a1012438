"""`StepCounters`: counts and times are summed in graphs and eagerly."""

from __future__ import annotations

import time

import tensorflow as tf

from kerasdist.strategies.measure.counters import (
    BEGIN,
    END,
    ROWS,
    SLOTS,
    STEPS,
    StepCounters,
    time_after,
)


def test_steps_samples_and_times_are_summed():
    marks = StepCounters("/device:CPU:0")
    start = marks.read()

    @tf.function
    def step(batch):
        marks.add({STEPS: 1.0, ROWS: tf.shape(batch)[0]}, {END: time_after(batch)})

    begin = time.time()
    for rows in (8, 8, 0, 5):
        step(tf.zeros([rows, 2]))
        marks.add_eagerly({}, {BEGIN: begin})
    passed = time.time() - begin
    first = marks.read() - start
    assert first.shape == (SLOTS,)
    assert (first[STEPS], first[ROWS]) == (4, 21)
    assert 0 < first[END] - first[BEGIN] < 4 * passed
    step(tf.zeros([3, 2]))
    marks.add_eagerly({STEPS: 1.0, ROWS: 2.0})
    second = marks.read() - start - first
    assert (second[STEPS], second[ROWS], second[BEGIN]) == (2, 5, 0)
    assert not (marks.read() - start - first - second).any()
