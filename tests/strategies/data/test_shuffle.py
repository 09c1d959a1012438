"""Pure functions of numbers: who takes which samples."""

from __future__ import annotations

import itertools

import numpy as np

from kerasdist.strategies.data.batch_split import own_rows, same_length


def test_same_length_is_what_own_rows_gives():
    found = set()
    for samples, batch, first, local in itertools.product(
        range(1, 14), (1, 2, 5, 6), (0, 1, 2), (1, 2)
    ):
        _, bounds = own_rows(np.arange(samples), batch, first, local, 4)
        lengths = set(np.diff(bounds).tolist())
        expected = lengths.pop() or None if len(lengths) == 1 else None
        assert same_length(samples, batch, first, local, 4) == expected
        found.add(expected)
    assert found == {None, 1, 2}
