"""What tasks tell each other comes out of a message as it went in, or is refused."""

from __future__ import annotations

import json

import pytest

from kerasdist.errors import ProtocolError
from kerasdist.parameter_server import Variable
from kerasdist.parameter_server.membership import Event, WorkerProgress
from kerasdist.transport.framing import read_record, to_plain

VARIABLES = tuple[Variable, ...]


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        (Event, Event("lost", 1, "host1:1", 7, "it was killed")),
        (
            WorkerProgress,
            WorkerProgress(
                met=7, clocks={0: 3, 1: 4}, claims={2: (5, (6, 8))}, joining=True
            ),
        ),
        (VARIABLES, (Variable(name="rows", shape=(9, 3), sparse=True),)),
    ],
)
def test_through_a_message(kind, sent):
    assert read_record(json.loads(json.dumps(to_plain(sent))), kind, "It") == sent


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Event, {"kind": "lost"}),
        (WorkerProgress, None),
        (WorkerProgress, []),
        (WorkerProgress, {"met": "7", "clocks": 1, "claims": [1], "joining": 1}),
        (WorkerProgress, {"clocks": {"x": 1}, "claims": {"1": 2}}),
        (WorkerProgress, {"clocks": {"0": 1e999}, "claims": {"1": [None, []]}}),
        (VARIABLES, None),
        (VARIABLES, [[]]),
        (VARIABLES, [["a", [-1], "float32", False]]),
        (VARIABLES, [["a", [1], "int8", 0]]),
    ],
)
def test_what_is_damaged_is_refused(kind, value):
    with pytest.raises(ProtocolError, match=r"^A hello is damaged"):
        read_record(value, kind, "A hello")
