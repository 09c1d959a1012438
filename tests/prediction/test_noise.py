"""The noise of gradients: published values, closed forms, a sample of known noise."""

import math

import numpy as np
import pytest

from kerasdist.prediction.noise import GradientNoise, GradientNorms, add_norms, noise_of


@pytest.mark.parametrize(
    ("gradient", "variance", "growth", "gain"),
    [
        (1.0, 0.0, 8, 1.0),  # all replicas have the same gradient
        (0.0, 5.0, 8, 8.0),  # nothing but noise
        (1.0, 3.0, 3, 2.0),  # (3 + 1) / (3 / 3 + 1)
        (0.0, 0.0, 8, 1.0),
    ],
)
def test_the_gain_of_adascale(gradient, variance, growth, gain):
    noise = GradientNoise(gradient=gradient, variance=variance)
    assert noise.gain(growth, 1) == gain


def test_goodput_is_that_of_pollux():
    """By its formulas (Qiao et al., OSDI 2021, sections 3.1 and 3.2), written out."""
    alpha, beta, network, growth, power = 0.12, 0.0057, 0.024, 0.0035, 1.6
    for nodes, local, square, variance in ((1, 32, 0.02, 0.005), (6, 50, 1e-3, 0.04)):
        start = 32.0
        compute = alpha + beta * local
        exchange = network + growth * max(nodes - 2, 0)
        seconds = (compute**power + exchange**power) ** (1 / power)
        batch = nodes * local
        scale = batch / start
        efficiency = (variance + square) / (variance / scale + square) / scale
        # Theirs is the variance of a batch of the initial size.
        noise = GradientNoise(gradient=square, variance=variance * start)
        expected = batch / seconds * efficiency
        assert noise.goodput(batch / seconds, batch, start) == pytest.approx(
            expected, rel=1e-9
        )


def test_one_worker_more():
    # Of batches far below the noise scale each is worth one, far above it nothing.
    noise = GradientNoise(gradient=1.0, variance=1e6)
    assert noise.scale == 1e6
    assert noise.next_worker(4, 32) == pytest.approx(1.0, abs=1e-3)
    assert noise.next_worker(4, 32e9) == pytest.approx(0.0, abs=1e-3)
    assert GradientNoise(gradient=0.0, variance=1.0).scale == math.inf


def norms_of(replicas, rows, gradients):
    """The sums of each replica as a worker, of steps of these samples' gradients."""
    found = [[GradientNorms()] for _ in replicas]
    for step in gradients:
        mean = step.mean(0) @ step.mean(0)
        for number, own in enumerate(np.split(step, np.cumsum(replicas)[:-1])):
            part = own.mean(0) @ own.mean(0) * len(own) / rows
            new = [GradientNorms(1, part, part * rows, mean, mean * rows, 1 / rows)]
            found[number] = add_norms(found[number], new)
    return [each[0] for each in found]


@pytest.mark.parametrize("replicas", [[8, 8], [4, 4, 4, 4], [3, 12, 1]])
def test_a_known_noise_is_found(replicas):
    """Of a quadratic: a sample's gradient is w - x, here with unequal parts of rows."""
    rng, rows = np.random.default_rng(0), sum(replicas)
    samples = rng.normal([0.5, 0, 1, 0.2], [1, 2, 0.5, 1], size=(4_000, rows, 4))
    noise = noise_of(norms_of(replicas, rows, samples), len(replicas))
    assert noise.variance == pytest.approx(1 + 4 + 0.25 + 1, rel=0.05)
    assert noise.gradient == pytest.approx(0.25 + 1 + 0.04, rel=0.05)


def test_without_noise_and_without_enough():
    same = norms_of([2, 2], 4, np.ones((3, 4, 2)))
    assert noise_of(same, 2) == GradientNoise(gradient=pytest.approx(2), variance=0)
    assert noise_of(same, 1) is None
    assert noise_of([GradientNorms(), GradientNorms()], 2) is None
    # Other workers: what was before isn't theirs.
    assert add_norms(same, same[:1]) == same[:1]
