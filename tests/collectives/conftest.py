import numpy as np
import pytest

from groups import Group, each_kind

# The largest buffer of tests with `group`.
LARGEST_BYTES = 4 << 20


@pytest.fixture(scope="module", params=each_kind(), ids=lambda k: f"{k[0]}-{k[1]}")
def group(request):
    with Group(*request.param) as made:
        # Shared memory grows to its full size now, so that no test is blamed for it.
        zeros = np.zeros(LARGEST_BYTES, np.uint8)
        made.run(lambda c: (c.all_reduce([zeros]), c.broadcast([zeros], c.size - 1)))
        yield made
