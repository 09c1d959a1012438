"""ParameterServerStrategy as a user meets it: servers, failures.

What one process does without them is in `test_ring_strategy.py`.
"""

import functools
import json
import re
import signal
import socket
import threading

import pytest
from scripts import long_fit, with_prelude
from soak import soak

import kerasdist
from workers import Workers, free_ports

script_of = functools.partial(long_fit, "ParameterServerStrategy")


def settings(monkeypatch, cluster, kind="worker", index=0):
    task = {"type": kind, "index": index}
    text = json.dumps({"cluster": cluster, "task": task})
    monkeypatch.setenv("TF_CONFIG", text)


# One process.


@pytest.mark.parametrize("kind", ["worker", "ps"])
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"mode": "slow"}, r"^`mode` must be 'sync' or .*\. Received: mode='slow'\.$"),
        ({"max_staleness": 1}, r"Received: max_staleness=1 with mode='sync'"),
        ({"mode": "async", "max_staleness": -1}, r"Received: max_staleness=-1; exp"),
        ({"mode": "async", "max_staleness": True}, "Received: max_staleness=True; exp"),
        ({"mode": "async", "compression": "bf16"}, "Received: compression='bf16'"),
        ({"snapshot_dir": "x"}, "Received: snapshot_dir='x' with mode='sync'"),
        ({"mode": "async", "snapshot_seconds": 0}, "Received: snapshot_seconds=0;"),
        ({"transport": "pigeon"}, r"^`transport` must .* Received: transport='pigeon'"),
        ({"shard": "files"}, "Received: shard='files'"),
        ({"bucket_size": 0}, "Received: bucket_size=0"),
        ({"initial_state": "any"}, "Received: initial_state='any'"),
    ],
)
def test_wrong_arguments_are_an_error_on_all_tasks(monkeypatch, kind, arguments, match):
    cluster = {"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
    settings(monkeypatch, cluster, kind)
    before = threading.active_count()
    with pytest.raises(ValueError, match=match):
        kerasdist.ParameterServerStrategy(**arguments)
    assert threading.active_count() == before


def test_a_servers_port_in_use(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings(monkeypatch, {"worker": ["127.0.0.1:1"], "ps": [address]}, "ps")
        with pytest.raises(kerasdist.errors.AddressInUseError, match=address):
            kerasdist.ParameterServerStrategy()


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("worker", r"^Server 0 \({server}\) couldn't be reached within 1 s: .*refused"),
        ("ps", r"server 0 \({server}\) within .*: rank 0 \({worker}\): it never"),
    ],
)
def test_who_never_comes_is_named(monkeypatch, kind, match):
    worker, server = (f"127.0.0.1:{port}" for port in free_ports(2))
    settings(monkeypatch, {"worker": [worker], "ps": [server]}, kind)
    match = match.format(worker=worker, server=server)
    with pytest.raises(kerasdist.errors.StartupError, match=match):
        kerasdist.ParameterServerStrategy(startup_timeout=1)


SHARES = [
    r"\d+ bytes in \d pieces?, 100\.0 % of \d+ bytes",
    r"0 bytes in 0 pieces, 0\.0 % of \d+ bytes",
]

# Several processes. That the numbers are those of one process is for
# `test_equivalence.py`.


def test_servers_serve_until_all_workers_have_finished_and_end_well():
    # Also a second strategy of the script, a third with other settings, which ends
    # both, and a fourth when all are closed.
    script = script_of(epochs=2)
    script += """
def gathered(strategy):
    found = strategy.communicator.all_gather(np.int64(strategy.rank))
    result([int(each[0]) for each in found])

same = {"timeout": 40, "startup_timeout": 60, "heartbeat_timeout": 30.0}
with kerasdist.ParameterServerStrategy(**same) as second:
    gathered(second)
gathered(strategy)
third = kerasdist.ParameterServerStrategy("async", max_staleness=3, **same)
gathered(third)
assert error_of(lambda: gathered(strategy))[0] == "TransportClosed"
third.close()
fourth = kerasdist.ParameterServerStrategy(initial_state="broadcast", **same)
gathered(fourth)
# Half of 4 MB is for each server.
(total,) = fourth.communicator.all_reduce([np.ones(1_000_000, np.float32)])
print("RESULT", total.max())
"""
    with Workers(script, 2, servers=2, deadline=90) as job:
        finished = job.succeed()
    for worker in finished[:2]:
        assert worker.results == [[0, 1]] * 4 + [2.0]
    for index, server in enumerate(finished[2:]):
        name = rf"kerasdist: server {index} of 2 \({job.addresses[2 + index]}\)"
        found = re.search(
            rf"{name} serves 2 worker\(s\), mode='sync'\.\n"
            # The loss's gradients and a count of rows, too small to be cut.
            rf"{name} gets of each worker and step: {SHARES[index]}\.\n[^\0]*"
            rf"{name} has finished: [\d,]+ requests, ([\d,]+) bytes received, [^\0]*"
            rf"{name} serves 2 worker\(s\), mode='async'\.\n[^\0]*"
            rf"{name} serves 2 worker\(s\), mode='sync'\.\n",
            server.output,
        )
        assert found, server.output
        received = re.findall(r" ([\d,]+) bytes received", server.output)
        assert int(received[-1].replace(",", "")) in range(4_000_000, 4_100_000)
        assert "RESULT" not in server.output


def test_servers_of_an_elastic_job_serve_all_strategies_of_a_script():
    script = with_prelude("""
def gathered(strategy):
    found = strategy.communicator.all_gather(np.int64(strategy.rank))
    result([int(each[0]) for each in found])

def strategy():
    return kerasdist.ParameterServerStrategy(elastic=True, heartbeat_timeout=10)

with strategy() as first:
    gathered(first)
second, third = strategy(), strategy()
gathered(second)
gathered(third)
gathered(second)
result(refused(lambda: kerasdist.ParameterServerStrategy(elastic=False)))
""")
    finished = Workers(script, 2, servers=2, deadline=90).run()
    for worker in finished[:2]:
        *gathered, message = worker.results
        assert gathered == [[0, 1]] * 4
        assert "elastic=False" in message
        assert "the one before has elastic=True" in message
    for server in finished[2:]:
        assert "has finished: 3 epochs, " in server.output


@pytest.mark.parametrize(
    ("lost", "fault"),
    [
        pytest.param(0, signal.SIGSTOP, id="worker_frozen"),
        pytest.param(3, signal.SIGKILL, id="server_killed"),
        soak(0, signal.SIGKILL, id="worker_killed"),
        soak(3, signal.SIGSTOP, id="server_frozen"),
    ],
)
def test_who_is_lost_is_named_by_all_others(lost, fault):
    script = script_of(heartbeat=30.0 if fault == signal.SIGKILL else 3.0)
    with Workers(script, 2, servers=2, deadline=100) as job:
        job.wait_for_lines("training", 2)
        job.kill(lost, fault)
        workers = [job.wait_one(rank) for rank in range(2) if rank != lost]
        servers = [job.wait_one(task) for task in (2, 3) if task != lost]
        job.kill(lost, signal.SIGKILL)
    address = job.addresses[lost]
    for worker in workers:
        assert worker.returncode == 7, worker.output
        seen = worker.result
        assert seen["step"] >= 4
        if lost == 0:
            assert (seen["class"], seen["rank"]) == ("WorkerLost", 0)
            assert f"Rank 0 ({address}) was lost at step" in seen["message"]
        else:
            assert (seen["class"], seen["index"]) == ("ServerLost", 1)
            assert f"Server 1 ({address}) was lost at step" in seen["message"]
    for server in servers:
        # A server that is left ends with the job's error, whichever was lost.
        assert server.returncode == 1, server.output
        text = "WorkerLost: Rank 0" if lost == 0 else "ServerLost: Server 1"
        assert text in server.output


def test_a_strategy_after_one_that_an_error_closed():
    script = with_prelude("""
with contextlib.suppress(RuntimeError), kerasdist.ParameterServerStrategy():
    raise RuntimeError("a mistake")
result(refused(lambda: kerasdist.ParameterServerStrategy(startup_timeout=2)))
""")
    with Workers(script, 1, servers=1, deadline=60) as job:
        worker, server = job.wait()
    assert worker.returncode == 0, worker.output
    assert worker.result.startswith("An error closed an earlier strategy of this ")
    assert "no new ones were found within 2 s" in worker.result
    assert server.returncode == 1
    assert "RuntimeError: a mistake" in server.output
