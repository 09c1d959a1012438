"""Patterns of layer paths: what they match, and which of them counts."""

import pytest

from kerasdist.placement.patterns import Match, Patterns


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("encoder", "encoder"),
        ("encoder", "model/encoder"),
        ("encoder/.*", "encoder"),
        ("encoder/.*", "encoder/dense"),
        ("encoder/.*", "model/encoder/block/dense"),
        (".*dense.*", "model/my_dense_1/inner"),
        ("^model/dense$", "model/dense"),
        ("block_[01]", "encoder/block_1"),
        ("a|b", "model/b"),
    ],
)
def test_a_pattern_matches_a_path_or_the_end_of_one(pattern, path):
    assert Patterns({pattern: "D"}).find([path]) == Match(
        pattern=pattern, device="D", above=0
    )


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("dense_1", "dense_10"),
        ("dense", "my_dense"),
        ("encoder/.*", "encoder_2/dense"),
        ("^dense$", "model/dense"),
        ("a|b", "ab"),
        (".*", ""),
    ],
)
def test_it_doesnt_match_a_part_of_a_name(pattern, path):
    assert Patterns({pattern: "D"}).find([path]) is None


def test_the_innermost_match_counts_then_the_letters_then_the_first():
    patterns = Patterns({"encoder/.*": "A", "encoder/h.*": "B", "encoder/tail": "C"})
    assert patterns.find(["encoder/head"]).device == "A"
    assert patterns.find(["encoder/tail"]).device == "C"

    patterns = Patterns({"encoder": "A", "encoder/head": "B", "tail": "C"})
    assert patterns.find(["encoder/head"]).device == "B"
    assert patterns.find(["encoder/head/dense"]) == Match(
        pattern="encoder/head", device="B", above=1
    )
    assert patterns.find(["encoder/body/dense"]).above == 2


def test_of_two_names_of_a_layer_the_nearer_match_counts():
    patterns = Patterns({"encoder": "A", "dense": "B"})

    assert patterns.find(["dense_1", "model/encoder/dense_1"]).device == "A"
    assert patterns.find(["dense", "model/encoder/dense"]).device == "B"


def test_patterns_that_match_nothing_are_named():
    patterns = Patterns({"encoder/.*": "A", "decoder/.*": "B", "dens": "C"})

    assert patterns.unmatched([["encoder"], ["encoder/dense"]]) == [
        "decoder/.*",
        "dens",
    ]


def test_patterns_must_be_regular_expressions():
    with pytest.raises(
        ValueError, match=r"^The patterns of a placement must be .*'\(a' \(missing \)"
    ):
        Patterns({"(a": "A", "b": "B"})
