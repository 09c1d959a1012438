import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from groups import in_threads, nothing_stays_open, outcomes
from kerasdist import errors
from kerasdist.parameter_server import ServerSettings, Variable
from kerasdist.parameter_server.membership import ServerHello
from kerasdist.parameter_server.server import registration
from kerasdist.parameter_server.server.handler import RequestHandler
from kerasdist.parameter_server.snapshots import path_of
from kerasdist.transport.deadline import Deadline, Timeouts
from kerasdist.transport.rendezvous import dial
from kerasdist.transport.rendezvous.dial import dial_address
from pace import bound
from servers import Servers
from waiting import wait_until


def test_a_worker_that_was_asked_for_something_else_is_refused():
    settings = ServerSettings(mode="async", max_staleness=3)
    with nothing_stays_open(), Servers(2, connected=False) as job:

        def connect(rank):
            return job.connect(rank, settings=settings if rank else job.settings)

        # At once, and not when the time is over: waiting wouldn't help.
        first, second = outcomes(2, connect, 10.0)
        job.join(30.0)
        for error in (first, second, job.ends[0]):
            assert isinstance(error, errors.StartupError)
            assert re.search("'max_staleness': 3.*here.*_staleness': None", str(error))
            assert "Give all tasks the same arguments" in str(error)


def test_a_worker_that_never_comes_is_named():
    timeouts = Timeouts(startup=bound(1.0))
    with nothing_stays_open(), Servers(2, connected=False, timeouts=timeouts) as job:
        name = rf"rank 1 \({job.workers[1]}\)"
        with pytest.raises(errors.StartupError, match=name):
            job.connect(0)
        job.join()
        assert isinstance(job.ends[0], errors.StartupError)
        assert re.search(name, str(job.ends[0]))


@pytest.mark.soak
def test_nobody_joins_a_synchronous_job():
    timeouts = Timeouts(startup=bound(1.0))
    with nothing_stays_open(), Servers(2, mode="sync", timeouts=timeouts) as job:
        job.clients[1].close(RuntimeError("preempted"))
        with pytest.raises(errors.StartupError):
            job.connect(1)


def test_servers_in_another_order_are_refused():
    """Two tasks whose clusters name the same servers in another order."""
    timeouts = Timeouts(startup=bound(1.0))
    with nothing_stays_open(), Servers(1, 2, connected=False, timeouts=timeouts) as job:
        job.addresses.reverse()
        with pytest.raises(errors.StartupError, match="This is server 1 of the job"):
            job.connect(0)


@pytest.fixture
def returning(monkeypatch):
    """Nobody comes back to a restarted server before this event is set.

    `returning.here` is set when a new process that may join has connected.
    """
    event = threading.Event()
    event.here = threading.Event()

    def handshakes():
        return [t for t in threading.enumerate() if t.name == "kerasdist-handshake"]

    def late(address, secret, hello, deadline, stop):
        if hello["resume"] is not None:
            # Whoever is closed meanwhile doesn't come back at all.
            wait_until(lambda: event.is_set() or stop.is_set(), "the time", 20)
        found = dial_address(address, secret, hello, deadline, stop)
        if hello.get("join_barrier"):
            wait_until(lambda: not handshakes(), "the server")
            event.here.set()
        return found

    monkeypatch.setattr(dial, "dial_address", late)
    return event


def lose_server_and_worker(job, folder):
    values = [np.zeros(3, "float32")]
    job.run(lambda c: c.open_table([Variable(name="v", shape=(3,))], values))
    wait_until(path_of(str(folder), 0).exists, "a snapshot")
    job.servers[0].close()
    job.join()
    job.clients[1].close(RuntimeError("preempted"))
    job.start_server(0)


def test_who_comes_before_those_who_only_come_back_joins_them(tmp_path, returning):
    with Servers(3, snapshot_dir=str(tmp_path)) as job:
        lose_server_and_worker(job, tmp_path)

        def work(rank):
            if rank == 1:
                client = job.clients[1] = job.connect(1, join_barrier=True)
                assert client.joining
                client.enter(1)
            else:
                assert returning.here.wait(bound(20))
                returning.set()
                client = job.clients[rank]
                while not client.communicator.join_barrier({"fit": 1}):
                    pass
            (total,) = client.communicator.all_reduce([np.full(2, rank + 1.0)])
            return total.tolist(), client.communicator.ranks

        assert in_threads(3, work, 40) == [([6.0, 6.0], (0, 1, 2))] * 3


def test_a_job_begun_anew_is_no_place_to_come_back_to(tmp_path, returning, monkeypatch):
    monkeypatch.setattr(registration, "RETURN_SECONDS", 0.2)
    with Servers(3, snapshot_dir=str(tmp_path)) as job:
        lose_server_and_worker(job, tmp_path)
        job.clients[1] = job.connect(1, join_barrier=True)
        assert not job.clients[1].joining
        returning.set()
        for rank in (0, 2):
            with pytest.raises(errors.ServerLost, match="the job was started again"):
                job.clients[rank].communicator.barrier()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_task_that_is_started_twice_does_not_displace_the_first_one(mode):
    timeouts = Timeouts(startup=60, collective=60, heartbeat=bound(1.0))
    with Servers(2, mode=mode, timeouts=timeouts) as job:
        with pytest.raises(errors.StartupError, match=r"^rank 1 .* is connected"):
            job.connect(1)
        both = job.run(lambda c: c.communicator.all_reduce([np.ones(2)])[0].tolist())
        assert both == [[2.0, 2.0]] * 2
        assert job.clients[0].events == []


def test_who_gives_up_because_of_a_lost_worker_is_not_taken_for_it_alone():
    """Both connections end between two looks, in whatever order."""
    settings, told = ServerSettings(), []
    handler = RequestHandler(0, 1, 4, settings, Timeouts())
    lines = [
        SimpleNamespace(ended=False, close=list, write_json=lambda *a: told.append(a))
        for _ in range(3)
    ]
    hello = ServerHello(
        server=0,
        line="control",
        settings=settings.agreed(),
        incarnation="x",
        replicas=1,
    )
    arrivals = [[(rank, line, hello) for rank, line in enumerate(lines)]]

    def take(seconds):
        lines[1].ended = not arrivals
        return arrivals.pop() if arrivals else []

    stop = threading.Event()
    # Meanwhile the other one is noticed.
    stop.wait = lambda timeout=None: setattr(lines[0], "ended", True)
    registrar = registration.Registrar(
        *(handler, "here:1", [f"w{rank}:1" for rank in range(4)], take, stop),
        lambda worker: None,
        once=True,
    )
    with pytest.raises(errors.StartupError, match=r"rank 0 \(w0:1\), rank 1 \(w1:1\)"):
        registrar.gather(Deadline(20.0))
    assert sorted(map(int, told[-1][1]["missing"])) == [0, 1]
