"""What each compressor does: oracles of linear algebra, traces, published bytes."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from ranks import Job
from soak import soak

from groups import Group
from kerasdist.compression import Factors, HalfPrecision, PowerSGD, TopK
from kerasdist.compression.contract import OuterProducts
from kerasdist.strategies.reduce.compressed import Memories, compressed_sums
from kerasdist.strategies.reduce.graph_ops import CollectiveOps


def resnet18():
    """The shapes of ResNet-18 for CIFAR-10, as kernels of Keras."""
    shapes, before = [(3, 3, 3, 64), (64,), (64,)], 64
    for filters in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(3, 3, before, filters), (filters,), (filters,)]
            shapes += [(3, 3, filters, filters), (filters,), (filters,)]
            if block == 0 and filters != 64:
                shapes += [(1, 1, before, filters), (filters,), (filters,)]
            before = filters
    return [*shapes, (512, 10), (10,)]


def lstm():
    """The shapes of the language model: 3 x 650, tied, a vocabulary of 28,869."""
    layer = [(650, 2600), (650, 2600), (2600,), (2600,)]
    return [(28869, 650), *layer * 3, (28869,)]


def bytes_of(compressor, shapes):
    given = [tf.zeros(shape) for shape in shapes]
    memory = compressor.init(shapes)
    return compressor.reduce(given, memory, lambda each: list(each), lambda t: t)[2]


@pytest.mark.parametrize(
    ("shapes", "parameters", "steps", "whole", "by_rank"),
    [
        (resnet18(), 11_173_962, 24, 1023, {1: 4.2, 2: 7.5, 4: 14.2}),
        soak(lstm(), 28_949_319, 70, 7730, {1: 25, 2: 38, 4: 64}),
    ],
)
def test_published_bytes_of_power_sgd(shapes, parameters, steps, whole, by_rank):
    """Tables 3 and 4 of the paper, in MB of 2 ** 20 bytes for an epoch."""
    assert sum(int(np.prod(shape)) for shape in shapes) == parameters
    dense = PowerSGD(rank=10**6)  # which sends all as it is
    assert steps * bytes_of(dense, shapes) / 2**20 == pytest.approx(whole, abs=0.5)
    for rank, megabytes in by_rank.items():
        found = steps * bytes_of(PowerSGD(rank), shapes) / 2**20
        assert found == pytest.approx(megabytes, abs=0.5 if megabytes > 20 else 0.05)


def test_16_bits_are_half_of_the_bytes():
    assert bytes_of(HalfPrecision("bf16"), [(10, 10)]) == 200


def parts(size, shape, seed=0):
    random = np.random.default_rng(seed)
    return [[tf.constant(random.normal(size=shape), tf.float32)] for _ in range(size)]


def test_power_sgd_of_full_rank_is_dense():
    """A matrix of rank 3 is in the space of three columns after one step."""
    random = np.random.default_rng(0)
    matrix = random.normal(size=(40, 3)) @ random.normal(size=(3, 50))
    job = Job(PowerSGD(rank=3), 2, [(40, 50)])
    half = [tf.constant(matrix / 2, tf.float32)]
    (found,) = job.step([half, half])
    np.testing.assert_allclose(found, matrix, atol=1e-5 * np.abs(matrix).max())


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


def loss_of_classes(corrected, seed, steps=150, ranks=2, rate=0.1):
    """The loss of a small network; momentum is in the compressor, or after it."""
    random = np.random.default_rng(seed)
    y = random.integers(0, 10, 2000)
    x = random.uniform(size=(10, 64))[y] + 0.4 * random.normal(size=(2000, 64))
    x = x.astype("float32")
    shapes = [(64, 64), (64,), (64, 10), (10,)]
    weights = [tf.Variable(random.normal(size=s).astype("float32") / 8) for s in shapes]
    compressor = TopK(ratio=0.001, momentum=0.9 if corrected else 0.0)
    memories = [compressor.init(shapes) for _ in range(ranks)]
    velocity = [np.zeros(shape) for shape in shapes]

    def loss(x, y):
        hidden = tf.nn.relu(x @ weights[0] + weights[1])
        logits = hidden @ weights[2] + weights[3]
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        return tf.reduce_mean(each)

    @tf.function
    def compressed(x, y, memory):
        with tf.GradientTape() as tape:
            mean = loss(x, y) / ranks
        # Top-k is a sum of what each rank chooses by itself.
        return compressor.reduce(
            tape.gradient(mean, weights), memory, list, tf.identity
        )

    for _ in range(steps):
        totals = [np.zeros(shape) for shape in shapes]
        for rank in range(ranks):
            rows = random.integers(0, len(x), 32)
            sums, memories[rank], _ = compressed(x[rows], y[rows], memories[rank])
            totals = [t + s.numpy() for t, s in zip(totals, sums, strict=True)]
        for i, weight in enumerate(weights):
            velocity[i] = totals[i] if corrected else 0.9 * velocity[i] + totals[i]
            weight.assign_sub(rate * velocity[i])
    return float(loss(x, y))


@pytest.mark.soak
def test_momentum_correction_counts():
    """As in the paper: where little is sent, momentum after the sum is worse."""
    with_correction = np.mean([loss_of_classes(True, seed) for seed in range(3)])
    without = np.mean([loss_of_classes(False, seed) for seed in range(3)])
    assert with_correction < 0.8 * without, (with_correction, without)


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


def test_of_several_workers_of_a_host_one_sends_their_sum():
    compressor = TopK(ratio=0.05, momentum=0.5)
    rng = np.random.default_rng(0)
    first, second, third, fourth = rng.normal(size=(4, 3, 30, 20)).astype("float32")

    # In several threads at once TensorFlow's first dispatch of a function may crash: it
    # isn't safe there (`PyInstanceChecker`).
    some = [[tf.constant(first[0])], [tf.Variable(first[0])], 1.0]
    workers = SimpleNamespace(memories=Memories(compressor))
    compressed_sums(workers, *some, list, tf.identity)

    def steps(group, given):
        def work(communicator):
            ops = CollectiveOps(communicator, "/device:CPU:0")
            workers = SimpleNamespace(memories=Memories(compressor))
            owner = tf.Variable(first[0])
            within, far = communicator.within_host, not communicator.shares_memory
            leads = within is None or within.rank == 0
            found = [
                compressed_sums(
                    *(workers, [tf.constant(gradient)], [owner], 1.0),
                    *(ops.all_reduce, ops.all_gather),
                    in_host=ops.all_reduce_in_host if far else None,
                    leads=leads,
                )[0].numpy()
                for gradient in given[communicator.rank]
            ]
            kept = [variable.numpy() for variable in workers.memories.variables]
            return leads, [*found, *kept]

        return group.run(work)

    with Group("abab", 4) as group:
        four = steps(group, [first, second, third, fourth])
    with Group("tcp", 2) as group:
        two = steps(group, [first + third, second + fourth])
    assert [leads for leads, _ in four] == [True, True, False, False]
    for rank, (_, arrays) in enumerate(four):
        for mine, theirs in zip(arrays, two[rank % 2][1], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
