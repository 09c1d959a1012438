import pytest

from groups import connections
from kerasdist.parameter_server import END, ServerSettings
from kerasdist.parameter_server.channel import Channel, Message
from kerasdist.parameter_server.server.handler import BatchQueue, RequestHandler
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.framing import Call, FrameType


@pytest.mark.parametrize(
    "value", [None, 3, [], [[1, 2]], [[1, 2], [3]], [[1, -2], [3, 4]], [["a", 1]] * 2]
)
def test_damaged_loads_are_refused(value):
    settings = ServerSettings(mode="async")
    handler = RequestHandler(0, 2, 1, settings, Timeouts())
    reported = []
    handler.on_split = reported.append
    one, other = connections()
    with one, other:
        mine, theirs = Channel(one), Channel(other)
        meta = {"do": "Split", "loads": value}
        mine.send(Message(FrameType.REQUEST, Call(0), meta, ()), Deadline(5))
        reason = handler.serve(handler.membership.workers[0], theirs)
        reply = mine.receive(Deadline(5), 1000)
    assert reason.startswith("it sent an invalid request (A request is damaged. Rec")
    assert reply.frame is FrameType.FAILURE
    assert reported == []


def test_a_queue_has_each_number_once_and_ends():
    batch_queue = BatchQueue()
    assert [batch_queue.claim(0, 1, 3, -1) for _ in range(5)] == [0, 1, 2, -1, -1]
    assert [batch_queue.claim(0, 2, 2, -1) for _ in range(3)] == [0, 1, -1]
    # The first epoch is over, for those who come late too.
    assert batch_queue.claim(0, 1, -1, -1) == -1
    assert [batch_queue.claim(1, 1, -1, -1) for _ in range(3)] == [0, 1, 2]


def test_a_restarted_server_goes_on_from_what_workers_know():
    batch_queue = BatchQueue()
    assert batch_queue.claim(0, 5, 10, 6) == 7
    assert batch_queue.claim(0, 5, 10, 3) == 8
    assert batch_queue.claim(0, 5, 10, 9) == -1


def test_a_queue_can_be_ended_for_all():
    batch_queue = BatchQueue()
    assert batch_queue.claim(0, 1, -1, -1) == 0
    assert batch_queue.claim(0, 1, -1, END) == -1
    assert batch_queue.claim(0, 1, -1, 0) == -1
    assert batch_queue.claim(0, 2, -1, -1) == 0


def test_old_queues_are_forgotten():
    batch_queue = BatchQueue()
    for dataset in range(1000):
        assert batch_queue.claim(dataset, 1, -1, -1) == 0
    assert [batch_queue.claim(dataset, 1, -1, -1) for dataset in (999, 500)] == [1, 0]


def test_a_restarted_dealer_goes_on_behind_what_the_workers_have():
    batch_queue = BatchQueue()
    batch_queue.resume(1, 3, [0, 2, 3, 7])
    batch_queue.resume(1, 3, [1, 5])
    # 4 and 6 were on their way to somebody: they go to whom they still can.
    assert [batch_queue.claim(1, 3, 12, last) for last in (5, 7, 3, 5)] == [6, 8, 4, 9]
    # Who is back late has no say in what others have got since.
    batch_queue.resume(1, 3, [2, 9])
    assert [batch_queue.claim(1, 3, 12, 9) for _ in range(3)] == [10, 11, -1]
    assert batch_queue.claim(1, 3, 12, -1) == -1


def test_after_a_restart_only_the_present_epoch_counts():
    batch_queue = BatchQueue()
    batch_queue.resume(1, 2, [40])
    batch_queue.resume(1, 3, [1])
    batch_queue.resume(1, 2, [50])
    batch_queue.resume(2, 1, [])
    assert [batch_queue.claim(1, 3, -1, -1) for _ in range(2)] == [0, 2]
    assert batch_queue.claim(1, 4, -1, -1) == 0
    assert batch_queue.claim(2, 1, -1, -1) == 0
