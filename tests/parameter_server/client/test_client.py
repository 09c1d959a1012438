import numpy as np
import pytest

from groups import in_threads, nothing_stays_open
from kerasdist import errors
from kerasdist.parameter_server import Change, Rows, Variable
from servers import Servers

VARIABLES = [
    Variable(name="kernel", shape=(200, 100)),
    Variable(name="embedding", shape=(500, 8), sparse=True),
    Variable(name="bias", shape=(10,)),
    Variable(name="half", shape=(3, 2), dtype="float16"),
    Variable(name="scalar", shape=(), dtype="float64"),
]
# Kind, workers, servers.
JOBS = [("memory", 1, 1), ("tcp", 3, 2), ("shared_memory", 3, 2)]


def values_of(seed, variables=VARIABLES):
    """Small whole numbers: they are added exactly in any order."""
    generator = np.random.default_rng(seed)
    return [
        np.asarray(generator.integers(-4, 5, size=v.shape)).astype(v.dtype)
        for v in variables
    ]


def opened(job, variables=VARIABLES):
    return job.run(
        lambda client: client.open_table(variables, values_of(client.rank, variables))
    )


@pytest.fixture(params=JOBS, ids=lambda job: "-".join(map(str, job)))
def job(request):
    kind, workers, servers = request.param
    with nothing_stays_open(), Servers(workers, servers, kind=kind) as made:
        yield made


def test_the_table_is_the_chiefs_and_all_changes(job):
    steps = 12

    def changes(rank, step):
        found = values_of(1000 * rank + step)
        generator = np.random.default_rng([rank, step])
        count = int(generator.integers(0, 40))
        rows = generator.integers(-4, 5, size=(count, 8)).astype("float32")
        # In any order, some of them several times.
        found[1] = Rows(generator.integers(0, 500, size=count), rows)
        return [None if generator.random() < 0.2 else change for change in found]

    expected = values_of(0)
    for rank in range(job.size):
        for step in range(steps):
            for mine, change in zip(expected, changes(rank, step), strict=True):
                if isinstance(change, Rows):
                    np.add.at(mine, change.indices, change.values)
                elif change is not None:
                    mine += change

    def work(client):
        table = client.open_table(VARIABLES, values_of(client.rank))
        assert client.connections.transports == [job.kind] * client.servers
        client.communicator.barrier()  # before anyone changes them
        for mine, value in zip(table.initial, values_of(0), strict=True):
            assert (mine.dtype, mine.shape) == (value.dtype, value.shape)
            np.testing.assert_array_equal(mine, value)
        embedding = table.initial[1]
        for step in range(steps):
            found = changes(client.rank, step)
            if found[0] is not None and step % 2:
                # As a worker has it: its values now, and those before.
                found[0] = Change(found[0] + 2, np.full_like(found[0], 2))
            pulled = table.push_pull(found)
            assert pulled.clock == table.clock == step + 1
            rows = pulled.rows[1]
            assert (rows.indices[1:] > rows.indices[:-1]).all()
            embedding[rows.indices] = rows.values
        client.communicator.barrier()
        pulled = table.pull()
        rows = pulled.rows[1]
        embedding[rows.indices] = rows.values
        found = [None if v is None else v.copy() for v in pulled.values]
        assert found[1] is None
        found[1] = embedding
        assert table.pull().rows[1].indices.size == 0
        assert sum(table.observed.values()) == steps
        return found

    for found in job.run(work):
        for mine, value, variable in zip(found, expected, VARIABLES, strict=True):
            assert (mine.dtype, mine.shape) == (variable.dtype, variable.shape)
            np.testing.assert_array_equal(mine, value)


def test_a_dense_change_of_a_sparse_variable_sends_the_rows_that_are_not_0(job):
    def work(client):
        table = client.open_table(VARIABLES, values_of(0))
        change = np.zeros((500, 8), "float32")
        change[[3, 77]] = 1
        deltas = [None, change, None, None, None]
        before = client.traffic.bytes_sent
        table.push_pull(deltas)
        sent = client.traffic.bytes_sent - before
        client.communicator.barrier()
        rows = table.pull().rows[1]
        return sent, rows

    for sent, rows in job.run(work):
        dense = sum(v.rows * v.row_bytes for v in VARIABLES if not v.sparse)
        assert sent < dense + 2 * 36 + 600 * 2
        assert set(rows.indices.tolist()) <= {3, 77}


def test_changes_that_do_not_fit_are_refused_and_nothing_was_sent(job):
    tables = opened(job)
    nothing = [None] * 5
    kernel = np.zeros((200, 100), "float32")
    wrong = [
        ([Change(kernel, kernel[:5]), *nothing[1:]], "doesn't fit 'kernel'"),
        ([None] * 4, "4 changes, expected 5"),
        ([np.zeros(3), *nothing[1:]], r"'kernel'. Received: shape \(3,\), expected"),
        ([Rows(np.zeros(1, int), np.zeros((1, 100))), *nothing[1:]], "Changed rows"),
        ([None, Rows(np.array([500]), np.zeros((1, 8))), *nothing[2:]], "Changed rows"),
        ([None, Rows(np.array([-1]), np.zeros((1, 8))), *nothing[2:]], "Changed rows"),
        ([None, Rows(np.array([0.0]), np.zeros((1, 8))), *nothing[2:]], "Changed rows"),
        ([None, Rows(np.array([1]), np.zeros((2, 8))), *nothing[2:]], "Changed rows"),
    ]
    for table in tables:
        for deltas, message in wrong:
            with pytest.raises(ValueError, match=message):
                table.push_pull(deltas)
        assert table.clock == 0
    with pytest.raises(ValueError, match="aren't those of the table's variables"):
        job.clients[0].open_table(VARIABLES, [])
    job.run(lambda client: client.tables[0].push_pull(nothing))


def test_after_close_every_call_says_so(job):
    tables = opened(job)
    for client in job.clients:
        client.close()
        client.close()
    for client, table in zip(job.clients, tables, strict=True):
        for call in (table.pull, client.communicator.barrier, client.stats):
            with pytest.raises(errors.TransportClosed, match="closed"):
                call()


def test_the_first_failure_is_told_once_before_other_threads_may_end_the_process():
    # Rank 1, which fails, may hear of it as well.
    told, known = [[], []], []
    with Servers(2, mode="sync", connected=False) as job:

        def connect(rank):
            def note(error):
                told[rank].append(error)
                known.append(client.failure)

            client = job.connect(rank, on_failure=note)
            return client

        job.clients = in_threads(2, connect)
        job.clients[1].close(RuntimeError("out of paper"))
        reason = r"its script ended with RuntimeError: out of paper"
        for _ in range(2):
            with pytest.raises(errors.WorkerLost, match=reason):
                job.clients[0].communicator.barrier()
        assert [error.rank for error in told[0]] == [1]
        assert job.clients[0].failure is told[0][0]
    assert set(known) == {None}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_who_closes_a_strategy_is_not_waited_for_until_its_next_one(mode):
    with Servers(2, 1, kind="tcp", mode=mode) as job:
        first, second = job.clients
        first.use_again()
        second.use_again()
        second.leave(1)  # another one is open
        job.run(lambda client: client.communicator.barrier())
        second.leave(2)
        with pytest.raises(errors.TransportClosed, match="Create a new strategy"):
            second.check()
        first.use_again()
        second.use_again()
        job.run(lambda client: client.communicator.barrier())
        second.leave(3)
        if mode == "sync":
            with pytest.raises(errors.WorkerLost, match="closed its strategy"):
                first.communicator.barrier()
        else:
            first.communicator.barrier()
            assert first.communicator.ranks == (0,)
            kinds = [event.kind for event in first.events]
            assert set(kinds) == {"left"}


def test_a_goodbye_may_arrive_after_the_next_strategy_s_first_collective(monkeypatch):
    with Servers(2, 1, kind="tcp", mode="async") as job:
        second = job.clients[1]
        say, held = second.connections.send_goodbye, []
        monkeypatch.setattr(second.connections, "send_goodbye", held.append)
        second.leave(second.use)
        handler = job.servers[0].handler
        members = handler.membership

        def meet(rank):
            client = job.clients[rank]
            client.use_again()
            if rank == 0:
                with members.changed:
                    # Notified when the request's arrays are there.
                    joined = members.changed.wait_for(
                        lambda: members.workers[1].use > 1, 30
                    )
                    say(held[0])
                    assert joined
                    assert members.changed.wait_for(lambda: handler.events, 30)
            client.communicator.barrier()
            return client.communicator.ranks

        assert in_threads(2, meet) == [(0, 1), (0, 1)]
