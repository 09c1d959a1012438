"""Equal parts, and what else collectives of all kinds have in common."""

from __future__ import annotations

import pytest

from kerasdist.collectives.row_exchange import equal_part


@pytest.mark.parametrize("parts", range(1, 10))
@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 1000, 1001])
def test_parts_cover_everything_once_and_differ_by_one_at_most(length, parts):
    found = [equal_part(length, parts, i, start=5) for i in range(parts)]
    assert [x for p in found for x in range(p.start, p.stop)] == list(
        range(5, 5 + length)
    )
    lengths = [p.stop - p.start for p in found]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
