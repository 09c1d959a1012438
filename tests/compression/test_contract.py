import numpy as np
import pytest
import tensorflow as tf
from ranks import Job

from kerasdist.compression import Factors, HalfPrecision, PowerSGD, TopK, compressor_of

COMPRESSORS = [
    HalfPrecision("bf16"),
    Factors(),
    PowerSGD(rank=1),
    PowerSGD(rank=3, error_feedback=False),
    TopK(ratio=0.05, momentum=0.9),
    TopK(ratio=1.0, momentum=0.9, nesterov=True),
]
SHAPES = [(20, 30), (30,), (3, 3, 4, 16), (1, 7), ()]
each = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)


def gradients(size, seed=0, scale=1.0, dtypes=("float32",) * 5):
    random = np.random.default_rng(seed)
    return [
        [
            tf.constant(scale * random.normal(size=shape), dtype)
            for shape, dtype in zip(SHAPES, dtypes, strict=True)
        ]
        for _ in range(size)
    ]


def total(parts):
    return [
        np.sum([np.asarray(p, np.float64) for p in some], axis=0)
        for some in zip(*parts, strict=True)
    ]


@each
@pytest.mark.parametrize("size", [1, 3])
def test_sums_have_shapes_and_dtypes_and_are_the_same_on_all_ranks(compressor, size):
    dtypes = ("float32", "float32", "float16", "float64", "float32")
    job = Job(compressor, size, SHAPES)
    for seed in range(3):
        given = gradients(size, seed, 0.1, dtypes)
        sums = job.step(given)
        assert [each.dtype.name for each in sums] == list(dtypes)
        assert [each.shape for each in sums] == SHAPES
        assert all(np.isfinite(each).all() for each in sums)
        assert job.sent == sum(sent for _, sent in job.ranks.calls)
        job.ranks.calls.clear()


@pytest.mark.parametrize(
    "compressor", [Factors(), PowerSGD(rank=1), TopK(ratio=0.05)], ids=repr
)
def test_what_is_sent_and_what_is_kept_are_all_that_was_given(compressor):
    """With error feedback nothing is lost: over the steps, too."""
    job = Job(compressor, 3, SHAPES)
    given = [np.zeros(shape) for shape in SHAPES]
    sums = [np.zeros(shape) for shape in SHAPES]
    for seed in range(6):
        parts = gradients(3, seed)
        given = [g + t for g, t in zip(given, total(parts), strict=True)]
        sums = [s + t for s, t in zip(sums, job.step(parts), strict=True)]
    for number, shape in enumerate(SHAPES):
        kept = np.zeros(shape)
        for memory in job.memories:
            if memory[number]:
                rest = memory[number][0 if isinstance(compressor, PowerSGD) else -1]
                kept = kept + np.asarray(rest).reshape(shape)
        scale = np.abs(given[number]).max() + 1
        np.testing.assert_allclose(
            sums[number] + kept, given[number], rtol=0, atol=2e-6 * scale
        )


@each
def test_zeros_are_zeros_and_change_nothing_after_them(compressor):
    job = Job(compressor, 2, SHAPES)
    for sums in (job.step(gradients(2, scale=0.0)) for _ in range(2)):
        assert all(not each.any() for each in sums)
    sums = job.step(gradients(2, seed=1))
    assert all(each.any() for each in sums)


@each
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_not_finite_is_so_on_all_ranks_and_leaves_no_trace(compressor, bad):
    shapes = SHAPES[:3]
    job, other = (Job(compressor, 2, shapes) for _ in range(2))
    for seed in range(2):
        parts = [some[:3] for some in gradients(2, seed, 0.1)]
        job.step(parts), other.step(parts)
    parts = [some[:3] for some in gradients(2, 7, 0.1)]
    parts[1] = [
        tf.tensor_scatter_nd_update(g, [[0] * g.shape.rank], [bad]) for g in parts[1]
    ]
    sums = job.step(parts)
    assert not any(np.isfinite(each).all() for each in sums)
    for seed in range(2, 4):
        parts = [some[:3] for some in gradients(2, seed, 0.1)]
        for one, another in zip(job.step(parts), other.step(parts), strict=True):
            np.testing.assert_array_equal(one, another)


def test_names_and_objects():
    assert compressor_of(None) is None
    assert repr(compressor_of("powersgd")) == "PowerSGD(rank=2)"
    given = TopK(ratio=0.5)
    assert compressor_of(given) is given
    with pytest.raises(ValueError, match="Received: compression='zip'"):
        compressor_of("zip")
    with pytest.raises(ValueError, match="Received: compression=3"):
        compressor_of(3)


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (PowerSGD, "rank", (0, True, 1.5)),
        (TopK, "ratio", (0, 1.5, "1%")),
        (TopK, "momentum", (1.0, None)),
    ],
)
def test_parameters_out_of_range_are_refused(make, name, values):
    for value in values:
        with pytest.raises(ValueError, match="Received: "):
            make(**{name: value})
    with pytest.raises(ValueError, match="Received: "):
        HalfPrecision("fp8")
