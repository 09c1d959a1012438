"""ParameterServerStrategy as a user meets it: one process, servers, failures."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import textwrap
import threading

import keras
import numpy as np
import pytest

import kerasdist
from launching import launcher_in
from pace import bound
from workers import Workers, free_ports

pytestmark = pytest.mark.timeout(120)

TRAIN = """
import json, os, sys, time
import keras
import numpy as np
import kerasdist

strategy = kerasdist.ParameterServerStrategy(
    "sync", heartbeat_timeout=HEARTBEAT, timeout=40, startup_timeout=60)
with strategy.scope():
    m = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    m.compile("sgd", "mse")
x = np.ones((64, 8), "float32")

class Say(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            print("training", flush=True)
        FAULT

try:
    m.fit(x, x[:, :4], batch_size=16, epochs=EPOCHS, verbose=0, callbacks=[Say()])
except kerasdist.errors.CollectiveError as error:
    print("RESULT", json.dumps({
        "class": type(error).__name__,
        **{k: v for k, v in vars(error).items() if isinstance(v, (int, str))},
        "message": str(error),
    }), flush=True)
    sys.exit(7)
"""


def script_of(fault="pass", epochs=100_000, heartbeat=30.0):
    script = TRAIN.replace("FAULT", fault).replace("EPOCHS", str(epochs))
    return script.replace("HEARTBEAT", str(heartbeat))


def settings(monkeypatch, cluster, kind="worker", index=0):
    task = {"type": kind, "index": index}
    text = json.dumps({"cluster": cluster, "task": task})
    monkeypatch.setenv("TF_CONFIG", text)


# One process.


def test_without_settings_the_server_is_in_this_process():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 4)).astype("float32")
    y = x.sum(1, keepdims=True)

    def train():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return model.get_weights(), history.history["loss"]

    plain_weights, plain_loss = train()
    strategy = kerasdist.ParameterServerStrategy(devices=["CPU:0"])
    assert (strategy.rank, strategy.size, strategy.is_chief) == (0, 1, True)
    np.testing.assert_array_equal(strategy.communicator.all_reduce([[1, 2]])[0], [1, 2])
    with strategy.scope():
        weights, loss = train()
    for a, b in zip(weights, plain_weights, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-6)
    strategy.close()
    strategy.close()
    with pytest.raises(kerasdist.errors.TransportClosed, match="closed"):
        strategy.communicator.barrier()


def test_collected_without_close():
    def make():
        kerasdist.ParameterServerStrategy().scope()

    make()  # the check for what is left behind runs after each test


@pytest.mark.parametrize("kind", ["worker", "ps"])
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"mode": "slow"}, r"^`mode` must be one of .*\. Received: mode='slow'\.$"),
        ({"mode": None}, r"^`mode` must be one of .*\. Received: mode=None\.$"),
        ({"max_staleness": 1}, r"Received: max_staleness=1 with mode='sync'"),
        ({"mode": "async", "max_staleness": -1}, r"Received: max_staleness=-1; exp"),
        ({"mode": "async", "max_staleness": 1.5}, r"Received: max_staleness=1\.5; exp"),
        ({"mode": "async", "max_staleness": True}, "Received: max_staleness=True; exp"),
        ({"mode": "async", "compression": "bf16"}, "Received: compression='bf16'"),
        ({"snapshot_dir": "x"}, "Received: snapshot_dir='x' with mode='sync'"),
        ({"mode": "async", "snapshot_seconds": 0}, "Received: snapshot_seconds=0;"),
        ({"transport": "pigeon"}, r"^`transport` must .* Received: transport='pigeon'"),
        ({"timeout": 0}, "Received: collective=0"),
        ({"shard": "files"}, "Received: shard='files'"),
        ({"bucket_size": 0}, "Received: bucket_size=0"),
        ({"compression": "zip"}, "Received: compression='zip'"),
        ({"initial_state": "any"}, "Received: initial_state='any'"),
    ],
)
def test_wrong_arguments_are_an_error_on_every_task(
    monkeypatch, kind, arguments, match
):
    cluster = {"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
    settings(monkeypatch, cluster, kind)
    before = threading.active_count()
    with pytest.raises(ValueError, match=match):
        kerasdist.ParameterServerStrategy(**arguments)
    assert threading.active_count() == before


def test_wrong_devices():
    with pytest.raises(ValueError, match="'CPU:9' doesn't exist"):
        kerasdist.ParameterServerStrategy(devices=["CPU:9"])


def test_several_workers_need_a_server(monkeypatch):
    settings(monkeypatch, {"worker": ["127.0.0.1:1", "127.0.0.1:2"]})
    with pytest.raises(kerasdist.errors.ClusterError, match="but no parameter server"):
        kerasdist.ParameterServerStrategy()


def test_a_servers_port_in_use(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings(monkeypatch, {"worker": ["127.0.0.1:1"], "ps": [address]}, "ps")
        with pytest.raises(kerasdist.errors.AddressInUseError, match=address):
            kerasdist.ParameterServerStrategy()


def test_a_server_that_never_comes_is_named(monkeypatch):
    worker, server = (f"127.0.0.1:{port}" for port in free_ports(2))
    settings(monkeypatch, {"worker": [worker], "ps": [server]})
    with pytest.raises(
        kerasdist.errors.StartupError,
        match=rf"^Server 0 \({server}\) couldn't be reached within 1 s: .*refused",
    ):
        kerasdist.ParameterServerStrategy(startup_timeout=1)


def test_workers_that_never_come_are_named(monkeypatch):
    worker, server = (f"127.0.0.1:{port}" for port in free_ports(2))
    settings(monkeypatch, {"worker": [worker], "ps": [server]}, "ps")
    with pytest.raises(
        kerasdist.errors.StartupError,
        match=rf"server 0 \({server}\) within .*: rank 0 \({worker}\): it never",
    ):
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
    script = (
        script_of(epochs=2)
        + """
def gathered(strategy):
    found = strategy.communicator.all_gather(np.int64(strategy.rank))
    print("RESULT", json.dumps([int(each[0]) for each in found]))

same = {"timeout": 40, "startup_timeout": 60, "heartbeat_timeout": 30.0}
with kerasdist.ParameterServerStrategy(**same) as second:
    gathered(second)
gathered(strategy)
third = kerasdist.ParameterServerStrategy("async", max_staleness=3, **same)
gathered(third)
try:
    gathered(strategy)
except kerasdist.errors.TransportClosed:
    third.close()
fourth = kerasdist.ParameterServerStrategy(initial_state="broadcast", **same)
gathered(fourth)
"""
    )
    with Workers(script, 2, servers=2, deadline=90) as job:
        finished = job.succeed()
    for worker in finished[:2]:
        assert worker.results == [[0, 1]] * 4
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
        assert "RESULT" not in server.output


def test_servers_of_an_elastic_job_serve_all_strategies_of_a_script():
    script = """
import json
import numpy as np
import kerasdist

def gathered(strategy):
    found = strategy.communicator.all_gather(np.int64(strategy.rank))
    print("RESULT", json.dumps([int(each[0]) for each in found]))

def strategy():
    return kerasdist.ParameterServerStrategy(elastic=True, heartbeat_timeout=10)

with strategy() as first:
    gathered(first)
second, third = strategy(), strategy()
gathered(second)
gathered(third)
gathered(second)
try:
    kerasdist.ParameterServerStrategy(elastic=False)
except kerasdist.errors.ClusterError as error:
    print("RESULT", json.dumps(str(error)))
"""
    with Workers(script, 2, servers=2, deadline=90) as job:
        finished = job.succeed()
    for worker in finished[:2]:
        *gathered, message = worker.results
        assert gathered == [[0, 1]] * 4
        assert "elastic=False" in message
        assert "the one before has elastic=True" in message
    for server in finished[2:]:
        assert "has finished: 3 epochs, " in server.output


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_large_buffers_are_spread_over_the_servers(transport):
    script = """
import os
import numpy as np
import kerasdist
strategy = kerasdist.ParameterServerStrategy(transport=os.environ["TRANSPORT"])
for _ in range(3):
    (total,) = strategy.communicator.all_reduce([np.ones(1_000_000, np.float32)])
    assert (total == 2).all()
"""
    env = {"TRANSPORT": transport}
    with Workers(script, 2, servers=2, env=env, deadline=90) as job:
        servers = job.succeed()[2:]
    for server in servers:
        received = re.search(r" ([\d,]+) bytes received", server.output)
        # Half of 4 MB, of two workers, three times.
        assert received, server.output
        assert 12_000_000 <= int(received[1].replace(",", "")) < 12_010_000


@pytest.mark.parametrize(
    ("lost", "fault"),
    [
        pytest.param(0, signal.SIGSTOP, id="worker_frozen"),
        pytest.param(3, signal.SIGKILL, id="server_killed"),
        pytest.param(0, signal.SIGKILL, id="worker_killed", marks=pytest.mark.soak),
        pytest.param(3, signal.SIGSTOP, id="server_frozen", marks=pytest.mark.soak),
    ],
)
def test_who_is_lost_is_named_by_all_others(lost, fault):
    script = script_of(heartbeat=30.0 if fault == signal.SIGKILL else 3.0)
    with Workers(script, 2, servers=2, deadline=100) as job:
        for rank in range(2):
            job.wait_for_line(rank, "training")
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


def test_a_script_that_raises_is_named_on_all_other_tasks():
    fault = "if epoch == 3 and strategy.rank == 1: raise RuntimeError('my own mistake')"
    with Workers(script_of(fault), 2, servers=1, deadline=90) as job:
        first, second, server = job.wait()
    assert first.returncode == 7, first.output
    assert (first.result["class"], first.result["rank"]) == ("WorkerLost", 1)
    assert "RuntimeError: my own mistake" in first.result["message"]
    assert second.returncode == server.returncode == 1
    assert "WorkerLost: Rank 1" in server.output
    assert "RuntimeError: my own mistake" in server.output


def test_a_strategy_after_one_that_an_error_closed():
    script = """
    import json
    import kerasdist
    try:
        with kerasdist.ParameterServerStrategy():
            raise RuntimeError("a mistake")
    except RuntimeError:
        pass
    try:
        kerasdist.ParameterServerStrategy(startup_timeout=2)
    except kerasdist.errors.ClusterError as error:
        print("RESULT", json.dumps(str(error)))
    """
    with Workers(textwrap.dedent(script), 1, servers=1, deadline=60) as job:
        worker, server = job.wait()
    assert worker.returncode == 0, worker.output
    assert worker.result.startswith("An error closed an earlier strategy of this ")
    assert "no new ones were found within 2 s" in worker.result
    assert server.returncode == 1
    assert "RuntimeError: a mistake" in server.output


# `kerasdist run --ps`.


@pytest.mark.soak
def test_the_launcher_starts_servers_that_end_with_the_job(tmp_path):
    with launcher_in(tmp_path) as launcher:
        code, out, err = launcher.run(
            *("-n", 2, "--ps", 1, "--bind", "cores", "--log-dir", "logs", "script.py"),
            script=script_of(epochs=2) + "print(strategy.rank, 'of', strategy.size)\n",
        )
        assert code == 0, err
        assert out.splitlines()[-1] == "0 of 2"
        log = (tmp_path / "logs" / "ps-0.log").read_text()
        assert " serves 2 worker(s), mode='sync'." in log
        assert " has finished: " in log
        launcher.nothing_runs(within=5.0)


@pytest.mark.soak
@pytest.mark.parametrize(
    "how", ["killed", pytest.param("raises", marks=pytest.mark.soak)]
)
def test_the_launcher_lets_an_async_job_go_on_without_a_worker(tmp_path, how):
    prelude = "mark(f\"pid-{config['task']['type']}-{rank}\", os.getpid())\n"
    say = """
        if epoch == 1: mark(f"training-{strategy.rank}")
        if os.path.exists("lost"):
            if strategy.rank == 1 and HOW == "raises":
                raise RuntimeError("my own mistake")
            self.after = getattr(self, "after", 0) + 1
            self.model.stop_training = self.after > 3
""".replace("HOW", repr(how))
    script = script_of(say).replace('"sync", ', '"async", ')
    script += "\nmark(f'done-{strategy.rank}')\n"
    with launcher_in(tmp_path) as launcher:
        process = launcher.start(
            *("-n", 3, "--ps", 1, "--log-dir", "logs", "script.py"),
            script=prelude + script,
        )
        launcher.wait_for("training-0", "training-1", "training-2")
        (pid,) = launcher.pids("pid-worker-1")
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
        (tmp_path / "lost").touch()
        _, err = process.communicate(timeout=bound(60))
        assert "kerasdist run: rank 1 was lost: it" in err
        assert "kerasdist run: the job has finished without rank 1\n" in err
        if how == "killed":
            assert process.returncode == 0, err
        else:
            assert process.returncode == 1, err
            assert "rank 1 failed with exit code 1 by itself: this is no success" in err
            assert "RuntimeError: my own mistake" in err
        assert (tmp_path / "done-0").exists()
        assert (tmp_path / "done-2").exists()
        held = re.search(
            r" holds ([\d,]+) bytes in ", (tmp_path / "logs/ps-0.log").read_text()
        )
        assert held
        launcher.nothing_runs(within=5.0)
