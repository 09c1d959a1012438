import pytest

from kerasdist.strategies.sync.data import GivenData, describe


@pytest.mark.parametrize(
    ("given", "replicas", "rank", "text"),
    [
        (None, [1, 1], 0, "2 workers with 2 replicas in all"),
        (None, [1], 0, "1 worker with 1 replica in all"),
        (
            GivenData(batch_size=5, samples=12),
            *([2, 1], 0, "global batch 5, per worker 3-4, 12 samples, 10 of them here"),
        ),
        (GivenData(), [1, 1], 0, "global batch unknown, number of samples unknown"),
        (
            GivenData(batch_size=4, endless=True),
            *([1, 1], 0, "global batch 4, per worker 2, batches without end"),
        ),
        (
            GivenData(batch_size=2, batches=5),
            *([1] * 4, 0, "ranks [2, 3] never get a row (batches of 2 rows for 4 rep"),
        ),
        (
            GivenData(batch_size=32, samples=3),
            *([1] * 4, 3, "3 samples, 0 of them here, ranks [3] never get a row (bat"),
        ),
        (
            GivenData(batch_size=3, batches=5),
            *([2, 2], 0, "only 3 of 4 replicas get rows in any batch"),
        ),
    ],
)
def test_it_says_what_is_known(given, replicas, rank, text):
    assert text in describe(given, replicas, rank)
