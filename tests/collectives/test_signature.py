"""What an all-reduce's buffers have in common on all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from kerasdist.collectives.checked import MOST_SIGNATURES, Signatures


def signature(arrays, signatures=None, scale=None, unscaled=0, lend=False):
    known = signatures or Signatures()
    return known.of(
        [np.asarray(array) for array in arrays], "sum", scale, unscaled, lend
    )


def test_groups_have_the_order_of_their_names_and_count_what_is_scaled():
    arrays = [np.ones(2), np.ones(3, np.float32), np.ones(1), np.ones(1, np.int64)]
    found = signature(arrays, scale=0.5, unscaled=2)
    assert found.groups == (
        ("float32", (1,), 1),
        ("float64", (0, 2), 1),
        ("int64", (3,), 0),
    )
    assert signature([]).groups == (("none", (), 0),)


def test_only_calls_of_one_signature_have_one_checksum():
    known = Signatures()
    calls = [
        {"arrays": [np.ones(2)]},
        {"arrays": [np.ones((2, 1))]},
        {"arrays": [np.ones(2, np.float32)]},
        {"arrays": [np.ones(1), np.ones(1)]},
        {"arrays": [np.ones(2)], "lend": True},
    ]
    first = [signature(**call, signatures=known).checksum for call in calls]
    again = [signature(**call, signatures=known).checksum for call in calls]
    elsewhere = [signature(**call).checksum for call in calls]
    assert first == again == elsewhere
    assert len(set(first)) == len(calls)


def test_a_call_that_was_valid_doesnt_make_another_one_valid():
    known = Signatures()
    whole = [np.ones(2, np.int64)]
    signature(whole, known)
    signature(whole, known, scale=0.5, unscaled=1)
    with pytest.raises(TypeError, match=r"^Only floats can be scaled\. .*scale=0\.5"):
        signature(whole, known, scale=0.5)
    with pytest.raises(TypeError, match=r"byte order"):
        signature([np.ones(2, ">i8")], known)
    with pytest.raises(ValueError, match=r"^Unknown reduction\."):
        known.of(whole, "mean", None, 0, False)


def test_many_different_calls_need_little_memory():
    known = Signatures()
    kept = signature([np.ones(1)], known)
    assert signature([np.ones(1)], known) is kept
    for length in range(2, MOST_SIGNATURES + 3):
        signature([np.ones(length)], known)
    assert signature([np.ones(1)], known) is not kept
