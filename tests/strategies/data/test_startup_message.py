import pytest

from kerasdist.strategies.sync.data import GivenData as Given
from kerasdist.strategies.sync.data import describe


@pytest.mark.parametrize(
    ("given", "replicas", "rank", "text"),
    [
        (None, [1, 1], 0, "2 workers with 2 replicas in all"),
        (None, [1], 0, "1 worker with 1 replica in all"),
        (Given(batch_size=5, samples=12), [2, 1], 0, "batch 5, per worker 3-4, 12 sam"),
        (Given(batch_size=5, samples=12), [2, 1], 0, "12 samples, 10 of them here"),
        (Given(), [1, 1], 0, "global batch unknown, number of samples unknown"),
        (Given(batch_size=4, endless=True), [1, 1], 0, "4, per worker 2, batches with"),
        (Given(batch_size=2, batches=5), [1] * 4, 0, "ranks [2, 3] never get a row (b"),
        (Given(batch_size=32, samples=3), [1] * 4, 3, "0 of them here, ranks [3] neve"),
        (Given(batch_size=3, batches=5), [2, 2], 0, "only 3 of 4 replicas get rows"),
    ],
)
def test_it_says_what_is_known(given, replicas, rank, text):
    assert text in describe(given, replicas, rank)
