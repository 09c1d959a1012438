import numpy as np
import pytest

from kerasdist.parameter_server import Variable
from kerasdist.parameter_server.snapshots import path_of, read_snapshot
from pace import bound
from servers import ServerProcesses, Servers
from waiting import wait_until


def test_a_collective_that_was_under_way_is_done_by_the_restarted_server(tmp_path):
    """One worker waits in it, the other is busy and comes back by itself."""
    work = """
    def work(client, table):
        steps(table, 5)
        say("GOING")
        if client.rank == 1:
            while client.connections[0].generation == 0:
                time.sleep(0.01)
        (total,) = client.communicator.all_reduce([np.full(3, client.rank + 1.0)])
        client.communicator.barrier()
        steps(table, 5)
        return [total.tolist(), table.clock]
    """
    with ServerProcesses(
        work, 2, snapshot_dir=str(tmp_path), snapshot_updates=1, max_staleness=1
    ) as job:
        job.going()
        job.restart(2)
        for rank in range(2):
            assert job.wait_one(rank).result == ["ok", [[3.0] * 3, 10]]
        status, stats = job.wait_one(2).result
        assert (status, stats["resumed"]) == ("ok", True)
        kinds = sorted(event["kind"] for event in stats["events"])
        assert kinds == ["finished"] * 2 + ["returned"] * 2
        # The job has ended well: nobody will need them.
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("returns", [True, False])
def test_workers_wait_for_the_same_server_and_so_long(tmp_path, returns):
    work = """
    def work(client, table):
        say("GOING")
        while True:
            steps(table, 1)
    """
    settings = {} if returns else {"restart_timeout": 1.0}
    timeouts = {"heartbeat": bound(1.5)}
    with ServerProcesses(
        work, 2, snapshot_dir=str(tmp_path), timeouts=timeouts, **settings
    ) as job:
        job.going()
        job.kill(2)
        if returns:
            job.wait_one(2)
            for file in tmp_path.iterdir():
                file.unlink()
            job.start_again(2)
        within = "couldn't be reached within 1 s"
        said = "has no snapshot of this job" if returns else within
        for rank in range(2):
            kind, message, fields = job.wait_one(rank).result
            assert (kind, fields["index"]) == ("ServerLost", 0)
            assert said in message


def test_a_job_that_is_started_again_goes_on_from_its_snapshots(tmp_path, said):
    zeros, ones = [np.zeros(40_000, "f4")], [np.ones(40_000, "f4")]
    variables = [Variable(name="v", shape=(40_000,))]
    settings = {"snapshot_dir": str(tmp_path), "snapshot_updates": 1}
    paths = [path_of(str(tmp_path), server) for server in range(2)]

    def work(client):
        table = client.open_table(variables, zeros)
        first = table.initial[0].copy()
        client.communicator.barrier()  # no worker may begin with the other's steps
        for _ in range(10):
            table.push_pull(ones)
        return first.tolist()

    with Servers(2, 2, **settings) as job:
        assert job.run(work) == [[0.0] * 40_000] * 2
        for path in paths:
            wait_until(
                lambda p=path: p.exists() and read_snapshot(p)[0]["updates"] == 20,
                "a snapshot of the last updates",
            )
        for server in job.servers:
            server.close()
        job.join()
    assert all(path.exists() for path in paths)
    with Servers(2, 2, **settings) as job:
        assert job.run(work) == [[20.0] * 40_000] * 2
    # A folder that was used before mustn't go unnoticed.
    line = f"the servers continue from their snapshots in {tmp_path}, not from the"
    assert sum(line in each for each in said()) == 1


def test_two_jobs_at_once_cannot_have_one_snapshot_dir(tmp_path):
    """The second one once began with the first one's weights, and removed its file."""
    work = """
    def work(client, table):
        steps(table, 5)
        say("GOING")
        while not os.path.exists(settings.snapshot_dir + "/end"):
            steps(table, 1)
        return True
    # What a child has of the lock mustn't outlive the server.
    if cluster.task_type == "ps":
        begin = ParameterServer.serve
        def serve(self):
            if os.fork() == 0:
                signal.pause()
            return begin(self)
        ParameterServer.serve = serve
    """
    arguments = {"snapshot_dir": str(tmp_path), "snapshot_updates": 1}
    with ServerProcesses(work, 1, **arguments) as job:
        job.going()
        wait_until(path_of(str(tmp_path), 0).exists, "a snapshot")
        with ServerProcesses(
            work, 1, timeouts={"startup": bound(1.0)}, **arguments
        ) as other:
            kind, message, _ = other.wait_one(1).result
            assert kind == "SnapshotError"
            assert f"process {job.processes[1].pid} on" in message
        assert path_of(str(tmp_path), 0).exists()
        # Its own server comes back, though a child of the one before lives.
        job.restart(1)
        job.wait_for_line(1, "LISTENING")
        (tmp_path / "end").touch()
        assert job.wait_one(0).result == ["ok", True]
        assert job.wait_one(1).result[0] == "ok"
    assert [file.name for file in tmp_path.iterdir()] == ["end"]
