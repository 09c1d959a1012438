import threading
import time

import numpy as np
import pytest

from groups import in_threads
from kerasdist import errors
from kerasdist.parameter_server import Variable
from kerasdist.transport.deadline import Timeouts
from pace import bound
from servers import Servers

WORKERS = 4
# Worker r adds 1 to element r in each step: so a read shows whose steps it has.
SLOTS = [Variable(name="slots", shape=(WORKERS,))]


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_no_read_misses_an_update_older_than_its_bound(staleness):
    """The log of reads is checked by itself, whatever the servers believe."""
    variables = [*SLOTS, Variable(name="more", shape=(WORKERS,))]
    steps = 30
    with Servers(WORKERS, 2, kind="tcp", max_staleness=staleness) as job:

        def work(client):
            generator = np.random.default_rng(client.rank)
            zeros = np.zeros(WORKERS, "float32")
            table = client.open_table(variables, [zeros] * len(variables))
            mine = zeros.copy()
            mine[client.rank] = 1
            log = []
            for step in range(1, steps + 1):
                # Some are slower than others, each at its own times.
                if generator.random() < 0.2:
                    time.sleep(0.003 * client.rank)
                pulled = table.push_pull([mine] * len(variables))
                log.append((step, [v.copy() for v in pulled.values], pulled.staleness))
            client.communicator.barrier()
            return log

        logs = job.run(work)
    for rank, log in enumerate(logs):
        for step, reads, observed in log:
            for seen in reads:
                assert seen[rank] == step  # everybody reads its own
                if staleness is not None:
                    assert seen.min() >= step - staleness
            # What was observed is never less than what was missed.
            missed = max(step - seen.min() for seen in reads)
            assert observed >= missed
            if staleness is not None:
                assert observed <= staleness


def test_who_waits_at_the_end_of_an_epoch_holds_up_nobody():
    with Servers(2, 2, max_staleness=1) as job:

        def work(client):
            table = client.open_table(SLOTS, [np.zeros(WORKERS, "float32")])
            for _ in range([1, 6][client.rank]):
                table.push_pull([np.ones(WORKERS, "float32")])
            client.communicator.barrier()
            return table.clock, table.pull().values[0].tolist()

        assert job.run(work) == [(6, [7.0] * WORKERS)] * 2


def test_who_waits_too_long_names_whom_for():
    timeouts = Timeouts(startup=60, collective=bound(0.3), heartbeat=30)
    with Servers(2, max_staleness=1, timeouts=timeouts) as job:
        done = threading.Event()

        def work(client):
            table = client.open_table(SLOTS, [np.zeros(WORKERS, "float32")])
            try:
                if client.rank == 0:
                    for _ in range(3):
                        table.push_pull([None])
                done.wait(bound(10))
                client.communicator.barrier()
            finally:
                done.set()

        for error in job.outcomes(work):
            assert isinstance(error, errors.CollectiveTimeout)
            assert f"waited for rank 1 ({job.workers[1]})" in str(error)
            assert "has finished step 2" in str(error)


def test_a_push_that_is_repeated_is_added_once():
    """As after a connection that broke when the answer was on its way."""
    with Servers(1) as job:
        (client,) = job.clients
        table = client.open_table(SLOTS, [np.zeros(WORKERS, "float32")])
        one = np.ones(WORKERS, "float32")
        table.push_pull([one])
        table.push_pull([one])
        table.clock = 1  # asks for step 2 again
        assert (table.push_pull([one]).values[0] == 2).all()
        assert (table.push_pull([one]).values[0] == 3).all()


def test_the_chief_brings_the_values_or_nobody():
    with Servers(2) as job:

        def work(client):
            if client.rank == 0:
                client.close()
                return
            client.open_table(SLOTS, [np.zeros(WORKERS, "float32")])

        error = job.outcomes(work)[1]
        assert isinstance(error, errors.WorkerLost)
        assert error.rank == 0
        assert "before it sent the first values of a table" in str(error)


def test_nobody_reads_while_numbers_are_being_added():
    """A read holds all of a push, or nothing of it."""
    variable = Variable(name="large", shape=(200_000,))
    with Servers(3, kind="tcp") as job:

        def work(client):
            table = client.open_table([variable], [np.zeros(200_000, "float32")])
            ones = np.ones(200_000, "float32")
            for _ in range(8):
                values = table.push_pull([ones]).values[0]
                assert values.min() == values.max()

        in_threads(3, lambda rank: work(job.clients[rank]))


def test_the_first_value_of_a_variable_is_everybodys():
    """Whoever creates it first; nobody waits, and the server keeps it no longer."""
    with Servers(3, 2, kind="tcp") as job:

        def create(client, count):
            mine = np.full(2, client.rank + 1, "float32")
            return [client.first_value(mine).tolist() for _ in range(count)]

        first = create(job.clients[1], 2)
        second = create(job.clients[0], 3)
        assert first == [[2, 2]] * 2
        assert second == [[2, 2], [2, 2], [1, 1]]
        assert create(job.clients[2], 2) == [[2, 2], [2, 2]]
        assert sorted(job.servers[0].handler.tables.first_values) == [2]
        with pytest.raises(errors.CollectiveMismatch, match="shape \\(3,\\)"):
            job.clients[1].first_value(np.zeros(3, "float32"))


def test_a_table_that_is_not_opened_together_waits_for_nobody():
    with Servers(2, 2, kind="tcp") as job:
        values = [np.ones(WORKERS, "float32")]
        second = job.clients[1].open_table(SLOTS, values, together=False)
        second.push_pull([np.ones(WORKERS, "float32")])
        first = job.clients[0].open_table(SLOTS, values, together=False)
        np.testing.assert_array_equal(first.initial[0], [2] * WORKERS)
