"""What each compressor does: oracles of linear algebra, traces, published bytes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from ranks import Job

from kerasdist.compression import Factors, PowerSGD, TopK
from kerasdist.compression.contract import OuterProducts


def parts(size, shape, seed=0):
    random = np.random.default_rng(seed)
    return [[tf.constant(random.normal(size=shape), tf.float32)] for _ in range(size)]


def test_warm_start_converges_to_the_truncated_svd():
    random = np.random.default_rng(0)
    u, _ = np.linalg.qr(random.normal(size=(40, 40)))
    v, _ = np.linalg.qr(random.normal(size=(50, 40)))
    values = 0.8 ** np.arange(40)
    matrix = (u * values) @ v.T
    job = Job(PowerSGD(rank=2, error_feedback=False), 1, [(40, 50)])
    best = (u[:, :2] * values[:2]) @ v[:, :2].T
    errors = []
    for _ in range(40):
        (found,) = job.step([[tf.constant(matrix, tf.float32)]])
        errors.append(np.abs(found - best).max())
    assert errors[0] > 0.05
    assert errors[-1] < 1e-5


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_equal_the_compression_of_their_sum(size):
    several, one = (Job(PowerSGD(rank=2), n, [(20, 30)]) for n in (size, 1))
    for seed in range(4):
        given = parts(size, (20, 30), seed)
        total = [tf.add_n([each for (each,) in given])]
        np.testing.assert_allclose(
            several.step(given)[0], one.step([total])[0], atol=1e-4
        )


def distance(compressor, steps=60, rate=0.1):
    """How far from its optimum a quadratic of a matrix is after some steps."""
    random = np.random.default_rng(0)
    goal = random.normal(size=(20, 30))
    weights = np.zeros((20, 30))
    job = Job(compressor, 2, [(20, 30)])
    for _ in range(steps):
        half = [tf.constant((weights - goal) / 2, tf.float32)]
        weights = weights - rate * job.step([half, half])[0]
    return np.linalg.norm(weights - goal) / np.linalg.norm(goal)


def test_error_feedback_counts():
    with_feedback = distance(PowerSGD(rank=1))
    without = distance(PowerSGD(rank=1, error_feedback=False))
    assert with_feedback < 0.5 * without


def test_five_steps_of_a_scalar_by_hand():
    """u = 0.5 u + g, v = v + u; of two elements the larger is sent, and forgotten.

    g         u                v               sent
    (1, 0)    (1, 0)           (1, 0)          v[0] = 1
    (1, 3)    (1, 3)           (1, 3)          v[1] = 3
    (1, 1)    (1.5, 1)         (2.5, 1)        v[0] = 2.5
    (0, 1)    (0, 1.5)         (0, 2.5)        v[1] = 2.5
    (2, 0)    (2, 0)           (2, 0)          v[0] = 2
    """
    # Of (1, 8) elements one is sent; the other six are always 0.
    job = Job(TopK(ratio=0.1, momentum=0.5), 1, [(1, 8)])
    steps = [
        (1, 0, (0, 1)),
        (1, 3, (1, 3)),
        (1, 1, (0, 2.5)),
        (0, 1, (1, 2.5)),
        (2, 0, (0, 2)),
    ]
    for first, second, (place, value) in steps:
        gradient = tf.constant([[first, second, *[0] * 6]], tf.float32)
        (found,) = job.step([[gradient]])
        expected = np.zeros((1, 8))
        expected[0, place] = value
        np.testing.assert_allclose(found, expected, atol=1e-7)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_ratio_1_is_momentum(nesterov):
    """Each step's sum is the step of SGD with momentum, and a rate of 1."""
    job = Job(TopK(ratio=1.0, momentum=0.9, nesterov=nesterov), 2, [(4, 5), (5,)])
    sgd = tf.keras.optimizers.SGD(1.0, momentum=0.9, nesterov=nesterov)
    weights = [tf.Variable(tf.zeros(shape)) for shape in ((4, 5), (5,))]
    moved = [np.zeros(shape) for shape in ((4, 5), (5,))]
    for seed in range(5):
        random = np.random.default_rng(seed)
        given = [
            [tf.constant(random.normal(size=s), tf.float32) for s in ((4, 5), (5,))]
            for _ in range(2)
        ]
        sgd.apply([tf.add_n(list(pair)) for pair in zip(*given, strict=True)], weights)
        moved = [m - s for m, s in zip(moved, job.step(given), strict=True)]
    for one, other in zip(moved, weights, strict=True):
        np.testing.assert_allclose(one, other.numpy(), atol=1e-5)


def outer(rows, seed, shape=(30, 20)):
    random = np.random.default_rng(seed)
    left = tf.constant(random.normal(size=(rows, shape[0])), tf.float32)
    right = tf.constant(random.normal(size=(rows, shape[1])), tf.float32)
    return OuterProducts(left, right)


@pytest.mark.parametrize(
    ("rows", "kind"), [((3, 4), "rows"), ((3, 0), "rows"), ((30, 40), "whole")]
)
def test_factors_are_exact_and_sent_where_they_are_smaller(rows, kind):
    job = Job(Factors(), 2, [(30, 20), (20,)])
    given = [[outer(n, seed), tf.ones(20)] for seed, n in enumerate(rows)]
    kernel, bias = job.step(given)
    expected = sum(np.asarray(each.product()) for each, _ in given)
    np.testing.assert_allclose(kernel, expected, atol=1e-5)
    np.testing.assert_array_equal(bias, 2.0)
    sent = rows[0] * 50 * 4 if kind == "rows" else 30 * 20 * 4
    assert job.sent == 8 + 20 * 4 + sent
