"""A worker's progress comes out of a message as it went in; damage is refused."""

from __future__ import annotations

import json

import pytest

from kerasdist.errors import ProtocolError
from kerasdist.parameter_server.membership import WorkerProgress
from kerasdist.transport.framing import read_record, to_object


def test_through_a_message():
    sent = WorkerProgress(
        met=7, clocks={0: 3, 1: 4}, claims={2: (5, (6, 8))}, joining=True
    )
    received = read_record(
        json.loads(json.dumps(to_object(sent))), WorkerProgress, "A hello"
    )
    assert (received.met, received.clocks, received.joining) == (7, {0: 3, 1: 4}, True)
    assert received.claims == {2: (5, (6, 8))}


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        [],
        {"met": "7", "clocks": 1, "claims": [1], "joining": 1},
        {"clocks": {"x": 1}, "claims": {"1": 2}},
        {"clocks": {"0": 1e999}, "claims": {"1": [None, []]}},
    ],
)
def test_what_is_damaged_is_refused(value):
    with pytest.raises(ProtocolError, match=r"^A hello is damaged\. Received: "):
        read_record(value, WorkerProgress, "A hello")
