import pytest

from kerasdist.parameter_server import ServerSettings
from kerasdist.parameter_server.channel import Message, memory_pair
from kerasdist.parameter_server.server.handler import RequestHandler
from kerasdist.transport import Timeouts
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import Call, FrameType


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
