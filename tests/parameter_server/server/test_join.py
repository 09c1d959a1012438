import threading

import numpy as np
import pytest

from groups import in_threads
from kerasdist import errors
from kerasdist.parameter_server import Variable
from pace import bound
from servers import KINDS, Servers


def come_again(job, rank):
    job.clients[rank].close(RuntimeError("preempted"))
    job.clients[rank] = job.connect(rank, join_barrier=True)
    return job.clients[rank]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_joiner_goes_on_with_the_others_from_a_gate_on(kind):
    def work(rank):
        client = job.clients[rank]
        facts = {}
        if rank == 1:
            client = come_again(job, rank)
            assert client.joining
            facts = client.enter(1).facts
            assert client.communicator.ranks == (0, 1, 2)
        else:
            joined = ()
            while not joined:
                # Nobody waits here for who only joins.
                client.communicator.barrier()
                joined = client.communicator.join_barrier({"fit": 1, "epoch": 7})
            assert joined == (1,)
        totals = [
            client.communicator.all_reduce([np.full(3, rank + 1.0)])[0].tolist()
            for _ in range(20)
        ]
        assert not client.joining
        assert client.communicator.join_barrier({"fit": 1}) == ()
        return totals, client.communicator.ranks, facts

    with Servers(workers=3, servers=2, kind=kind) as job:
        found = in_threads(3, work, 40)
    for totals, ranks, _ in found:
        assert totals == [[6.0] * 3] * 20
        assert ranks == (0, 1, 2)
    assert found[1][2] == {"fit": 1, "epoch": 7}


def test_who_comes_too_late_for_a_fit_hears_it():
    told = threading.Event()

    def work(rank):
        if rank == 1:
            with pytest.raises(errors.CollectiveError) as caught:
                come_again(job, rank).enter(1)
            told.set()
            return str(caught.value)
        while not told.is_set():
            job.clients[rank].communicator.join_barrier({"fit": 2})
        return job.clients[rank].communicator.ranks

    with Servers(workers=2) as job:
        ranks, message = in_threads(2, work, 40)
    assert ranks == (0,)
    assert "fit` number 1 of its script, the others are in number 2" in message


def test_who_comes_when_all_others_have_gone_hears_it():
    with Servers(workers=2) as job:
        client = come_again(job, 1)
        job.clients[0].close()
        with pytest.raises(errors.CollectiveError, match="all others have finished"):
            client.enter(1)


def test_a_joiner_waits_no_longer_than_the_others_may_rest():
    from kerasdist.transport.deadline import Timeouts

    timeouts = Timeouts(startup=60, collective=bound(0.5), heartbeat=30)
    with Servers(workers=2, timeouts=timeouts) as job:
        client = come_again(job, 1)
        with pytest.raises(errors.CollectiveTimeout, match="none of them took a step"):
            client.enter(1)


def test_a_joiner_with_another_model_leaves_the_others_alone():
    def open_table(client, shape):
        variable = Variable(name="w", shape=shape)
        return client.open_table([variable], [np.zeros(shape, "float32")])

    with Servers(workers=2) as job:
        job.run(lambda client: open_table(client, (3,)))
        client = come_again(job, 1)
        with pytest.raises(errors.CollectiveMismatch, match="another model"):
            open_table(client, (4,))
        job.clients[0].communicator.barrier()


def test_the_seed_is_the_same_for_all_also_for_a_joiner():
    with Servers(workers=2, servers=2) as job:
        assert job.clients[0].seed == job.clients[1].seed > 0
        assert come_again(job, 1).seed == job.clients[0].seed
