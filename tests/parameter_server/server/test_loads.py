"""What each server carries: counted, told, and put into words."""

from __future__ import annotations

import numpy as np
import pytest

from kerasdist.parameter_server import ServerSettings
from kerasdist.parameter_server.channel import Message, memory_pair
from kerasdist.parameter_server.server.handler import (
    Load,
    RequestHandler,
)
from kerasdist.transport import Timeouts
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import Call, FrameType
from servers import Servers


@pytest.mark.parametrize(
    "value", [None, 3, [], [[1, 2]], [[1, 2], [3]], [[1, -2], [3, 4]], [["a", 1]] * 2]
)
def test_damaged_loads_are_refused(value):
    settings = ServerSettings(mode="async")
    handler = RequestHandler(0, 2, 1, settings, Timeouts())
    reported = []
    handler.on_split = reported.append
    mine, theirs = memory_pair()
    meta = {"do": "Split", "loads": value}
    mine.send(Message(FrameType.REQUEST, Call(0), meta, ()), Deadline(5))
    reason = handler.serve(handler.membership.workers[0], theirs)
    assert reason.startswith("it sent an invalid request (A request is damaged. Rec")
    reply = mine.receive(Deadline(5), 1000)
    assert reply.frame is FrameType.FAILURE
    assert reported == []


def test_all_servers_hear_what_a_step_of_a_sync_job_brings():
    with Servers(2, 2, mode="sync") as job:

        def work(client):
            each = client.communicator
            each.all_reduce([np.ones(3)])
            for step in range(1, 4):
                each.step = step
                each.all_reduce([np.ones(50_000, "float32")])
                each.all_reduce([np.ones(10, "float32")])

        job.run(work)
        assert job.splits == [[Load(100_040, 2), Load(100_000, 1)]] * 2
