import types

import numpy as np
import pytest
import tensorflow as tf

from kerasdist.strategies.asynchronous.extended import compare_evidence
from kerasdist.strategies.asynchronous.live_group import LiveJob
from kerasdist.strategies.data.chief_data import verify_or_adopt_arrays
from kerasdist.strategies.data.choice import DataChoice, SameBatches
from kerasdist.strategies.data.pydataset_exchange import compare_items
from kerasdist.strategies.options import Options
from kerasdist.strategies.reduce import consensus
from kerasdist.strategies.reduce.workers import Workers
from servers import Servers
from waiting import wait_until

OPTIONS = Options(
    initial_state="check", shard="rows", data="auto", bucket_size=1, compression=None
)


def arrays(workers, rank):
    rows = np.arange(8.0) + rank
    data = types.SimpleNamespace(
        samples=8, batch_size=2, shuffle=True, leaves=lambda: ([rows], [])
    )
    verify_or_adopt_arrays(workers.communicator, DataChoice("same", print), data)


def items(workers, rank):
    data = types.SimpleNamespace(
        length=4, shuffle=False, read=lambda index: np.full((4, 2), float(rank))
    )
    compare_items(workers.communicator, data)


def weights(workers, rank):
    variable = np.float32([rank])
    consensus.check_state(workers, [("kernel", variable)])


def batches(workers, rank):
    def call(compare, tensors, *_):
        return compare(*(tensor.numpy() for tensor in tensors))

    ops = types.SimpleNamespace(call=call)
    live = types.SimpleNamespace(communicator=workers.communicator, ops=ops)
    SameBatches(live).compare(tf.constant(rank, tf.int64))


@pytest.mark.parametrize(
    ("differ", "text"),
    [
        (arrays, "rank 1: shuffle=True, .*samples=8; rank 2: shuffle=True"),
        (items, r"item 0 of ranks \[2\] differs from rank 1\'s"),
        (weights, r"variables of ranks \[2\] differ from rank 1\'s: \[\'kernel\'\]"),
        (batches, r"ranks \[2\] differ from rank 1\. "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_lost_worker_shifts_nobodys_rank(differ, text):
    with Servers(3) as job:
        job.clients[0].close(RuntimeError("preempted"))
        wait_until(lambda: job.servers[0].handler.events, "the loss")

        def work(client):
            if client.rank:
                live = LiveJob(client)
                live.communicator.barrier()
                return differ(Workers(live, ["CPU:0"], None, OPTIONS), client.rank)

        _, *failures = job.outcomes(work)
    for failure in failures:
        assert isinstance(failure, ValueError), failure
        assert failure.args
        with pytest.raises(ValueError, match=text):
            raise failure


def test_batches_that_differ_are_compared_with_the_first_who_knows_them():
    with pytest.raises(ValueError, match=r"ranks \[4\] differ from rank 2\."):
        compare_evidence((1, 2, 4), [{}, {"0.1": 5}, {"0.1": 6}])
