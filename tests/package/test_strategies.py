"""The package of the strategies has them all."""

from __future__ import annotations

import pytest

import kerasdist
from kerasdist import strategies


def test_the_strategies_are_all_in_their_package():
    for name in strategies.__all__:
        assert getattr(strategies, name) is getattr(kerasdist, name)
    assert len(strategies.__all__) == 3
    with pytest.raises(AttributeError, match="no attribute 'NoStrategy'"):
        getattr(strategies, "NoStrategy")  # noqa: B009
