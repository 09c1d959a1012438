"""Records come out of messages as they went in; anything else is named and refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import pytest

from kerasdist.errors import ProtocolError
from kerasdist.transport.framing import Count, read_record, to_object, to_plain


class Named(TypedDict):
    """A dictionary with known names."""

    size: Count
    rest: Any


@dataclass(frozen=True)
class Inner:
    """A record in another one."""

    rank: Count
    state: Literal["live", "lost"] = "live"


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A message."""

    last: int = -1
    seconds: float
    flag: bool
    inner: tuple[Inner, ...]
    clocks: Mapping[int, tuple[str, int]]
    maybe: Inner | None = None


OUTER = Outer(seconds=1.5, flag=True, inner=(Inner(3),), clocks={7: ("a", 1)})


@pytest.mark.parametrize("form", [to_object, to_plain])
def test_records_survive(form):
    value = json.loads(json.dumps(form(OUTER)))
    assert read_record(value, Outer, "It") == OUTER


def test_an_object_may_leave_out_what_has_a_default_and_have_more():
    value = to_object(OUTER) | {"session": "x"}
    del value["last"], value["maybe"]
    assert read_record(value, Outer, "It") == OUTER


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"last": -2}, "last=-2"),
        ({"last": 1 << 62}, "last=4611686018427387904"),
        ({"last": True}, "last=True"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"seconds": False}, "seconds=False"),
        ({"flag": 1}, "flag=1"),
        ({"inner": [[-1, "live"]]}, "inner.rank=-1"),
        ({"inner": [{"rank": 1, "state": "odd"}]}, "inner.state='odd'"),
        ({"inner": [[1]]}, "inner="),
        ({"inner": {}}, "inner={}"),
        ({"clocks": {"x": ["a", 1]}}, "clocks="),
        ({"clocks": {"1": ["a"]}}, "clocks="),
        ({"clocks": []}, r"clocks=\[\]"),
        ({"maybe": "x"}, "maybe='x'"),
    ],
)
def test_wrong_fields_are_named(changes, said):
    value = to_object(OUTER) | changes
    with pytest.raises(ProtocolError, match=rf"^It is damaged\. Received: {said}"):
        read_record(value, Outer, "It")


@pytest.mark.parametrize("value", [None, 1, "x", [], [1], {}, {"seconds": 1}])
def test_other_values_are_refused(value):
    with pytest.raises(ProtocolError, match=r"^It is damaged\. Received: "):
        read_record(value, Outer, "It")


def test_dictionaries_with_known_names():
    assert read_record({"size": 1, "rest": [2]}, Named, "It") == {
        "size": 1,
        "rest": [2],
    }
    for value, said in [({"size": 1}, "rest is missing"), ([1, 2], r"\[1, 2\]")]:
        with pytest.raises(ProtocolError, match=said):
            read_record(value, Named, "It")
