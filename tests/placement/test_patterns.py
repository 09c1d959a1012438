import pytest

from kerasdist.placement.patterns import Match, Patterns


@pytest.mark.parametrize(
    ("pattern", "paths", "others"),
    [
        ("encoder", ["model/encoder"], []),
        ("encoder/.*", ["encoder", "model/encoder/block/dense"], ["encoder_2/dense"]),
        (".*dense.*", ["model/my_dense_1/inner"], []),
        ("^model/dense$", ["model/dense"], []),
        ("a|b", ["model/b"], ["ab"]),
        ("dense_1", [], ["dense_10"]),
        ("dense", [], ["my_dense"]),
        ("^dense$", [], ["model/dense"]),
        (".*", [], [""]),
    ],
)
def test_a_pattern_matches_a_path_or_the_end_of_one(pattern, paths, others):
    match = Match(pattern=pattern, device="D", above=0)
    found = [Patterns({pattern: "D"}).find([path]) for path in (*paths, *others)]
    assert found == [match] * len(paths) + [None] * len(others)


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
    # Of two names of a layer the nearer match counts.
    assert patterns.find(["tail_1", "model/encoder/tail_1"]).device == "A"
    assert patterns.find(["tail", "model/encoder/tail"]).device == "C"


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
