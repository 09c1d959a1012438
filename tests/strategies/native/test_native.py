"""`transport="native"`: TensorFlow's own collectives, in real processes.

A process can be a worker of only one native cluster and can't leave it, so nothing
of this runs inside the test's own process.
"""

import signal

import pytest
import tensorflow as tf
from scripts import PRELUDE, long_fit, with_prelude
from soak import soak

import kerasdist
from kerasdist.cluster import Cluster
from kerasdist.collectives import connect
from places import SUPPORT
from sessions import Session
from transports import ALL_TRANSPORTS
from workers import Workers

pytestmark = pytest.mark.timeout(300)


CONTRACT = f"""
import os, sys
sys.path.insert(0, {str(SUPPORT)!r})
del os.environ["KERASDIST_SECRET"]  # the tests do so too, but later
import numpy as np
from kerasdist import RingStrategy
from kerasdist.cluster import resolve
from kerasdist.collectives import connect
from process_group import run_contract

place = resolve()
side = connect(place, transport="tcp")
strategies = []  # one that is forgotten is closed

def exchange(data):
    parts = side.communicator.all_gather(np.frombuffer(data, np.uint8))
    return [part.tobytes() for part in parts]

def make_job():
    # The contract's tests take variables of a surrounding job away.
    os.environ["KERASDIST_ALLOW_OPEN_SERVERS"] = "1"
    strategies.append(RingStrategy(cluster=place, transport="native"))
    return strategies[-1]

run_contract("native", place.size, make_job, exchange)
"""


@pytest.mark.parametrize("size", [2, soak(4)])
def test_contract_of_communicators(size):
    Workers(CONTRACT, size, deadline=250).run()


SETUP = with_prelude("""
import socket
logical_devices(2)
from kerasdist import RingStrategy, errors
from kerasdist.strategies.native_communicator import Server
""")


@pytest.fixture(scope="module")
def session():
    with Session(SETUP, 2) as made:
        yield made


def test_it_needs_the_users_word_and_listens_at_the_tasks_address_only(session):
    """A stranger who reached the port on another address read and wrote all files."""
    results = session.run("""
word = os.environ.pop("KERASDIST_ALLOW_OPEN_SERVERS")
found = [refused(lambda: RingStrategy(transport="native"))]
os.environ["KERASDIST_ALLOW_OPEN_SERVERS"] = word
secret = os.environ.pop("KERASDIST_SECRET")
other = {
    "cluster": {"worker": ["203.0.113.1:2222", "203.0.113.2:2222"]},
    "task": {"type": "worker", "index": 0},
}
text = refused(lambda: RingStrategy(transport="native", cluster=other))
found.append([text, Server.address])
os.environ["KERASDIST_SECRET"] = secret
strategy = RingStrategy(transport="native")
port = int(Server.address.rpartition(":")[2])
for ip in ("127.0.0.1", "127.0.0.2", "::1"):
    error = error_of(lambda: socket.create_connection((ip, port), timeout=1).close())
    found.append(error[0] if error else ip)
strategy.communicator.barrier()
result(found)
""")
    for text, (secret, address), *reached in results:
        assert secret.startswith("This job has no secret")
        assert address == ""
        assert text.startswith("transport='native' makes TensorFlow open a port on")
        assert reached == ["127.0.0.1", "TimeoutError", "TimeoutError"]


@pytest.mark.soak
def test_strategies_in_one_process_do_not_disturb_each_other(session):
    """A worker with one replica used to call another collective than one with two."""
    finished = session.finish("""
first = RingStrategy(["CPU:0"], transport="native")
second = RingStrategy(["CPU:0"], transport="native")
assert second.communicator.all_reduce([1])[0] == 2
((total,),) = first.extended.workers.ops.reduce_replicas([[tf.ones(2)]])
assert total.numpy().tolist() == [2, 2]
first.close()
first.close()
((total,),) = second.extended.workers.ops.reduce_replicas([[tf.ones(2)]])
assert total.numpy().tolist() == [2, 2]
names = ["CPU:0", "CPU:1"] if first.rank == 0 else ["CPU:1"]
third = RingStrategy(names, transport="native")
assert third.communicator.all_gather(third.rank)[1] == 1

def reduce():
    context = tf.distribute.get_replica_context()
    mine = tf.fill([3], float(context.replica_id_in_sync_group + 1))
    return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

@tf.function
def step():
    return third.run(reduce)

found = third.experimental_local_results(step())
operations = step.get_concrete_function().graph.get_operations()
where = {op.device[-5:] for op in operations if op.type == "CollectiveReduceV2"}
result([[v.numpy().tolist() for v in found], sorted(where)])

config = json.loads(os.environ["TF_CONFIG"])
config["cluster"]["worker"].reverse()
config["task"]["index"] = 1 - config["task"]["index"]
result(refused(lambda: RingStrategy(cluster=config, transport="native")))
assert second.communicator.all_reduce([1])[0] == 2
""")
    other = "A process can be a worker of only one cluster with transport='native'"
    for worker, numbers in zip(finished, ([[6.0] * 3] * 2, [[6.0] * 3]), strict=True):
        (found, where), refused = worker.results
        assert found == numbers
        assert where == ["CPU:0", "CPU:1"][-len(numbers) :]
        assert refused.startswith(other)
        assert "was used before" not in worker.output


@pytest.mark.soak
def test_graphs_that_differ_are_a_mismatch_on_every_rank(session):
    """The last one of the session: its collectives have failed for good."""
    finished = session.finish("""
strategy = RingStrategy(["CPU:0"], transport="native", timeout=60)
ops = strategy.extended.workers.ops
reduce = tf.function(lambda x: ops.reduce_replicas([[x]])[0][0])
assert reduce(tf.ones(3)).numpy().tolist() == [2, 2, 2]
try:
    reduce(tf.ones(4 + strategy.rank))
except tf.errors.OpError as error:
    failure = ops.failure(error)
    assert strategy.communicator.failure is not None
    assert isinstance(failure, errors.CollectiveMismatch), failure
    assert "Shape mismatch" in str(failure), failure
    result(True)
result(error_of(strategy.communicator.barrier)[0] == "CollectiveMismatch")
""")
    assert [worker.results for worker in finished] == [[True, True]] * 2


def train(size, *args):
    results = Workers(
        ALL_TRANSPORTS, size, args=[str(arg) for arg in args], deadline=120
    ).results()
    assert all(result["equal"] for result in results)
    for result in results[1:]:
        assert result["outputs"] == results[0]["outputs"]
        assert result["loss"] == results[0]["loss"]
    return results[0]


@pytest.mark.parametrize(
    ("size", "devices", "mode"), [(2, 2, "graph"), (2, 2, "eager"), soak(3, 1, "eager")]
)
def test_training_gives_the_numbers_of_the_other_transports(size, devices, mode):
    native = train(size, "native", devices, mode)
    other = train(1, "auto", 1, "graph")
    for name in ("weights", "loss", "evaluated"):
        assert native[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)
    for mine, theirs in zip(native["outputs"], other["outputs"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    if devices == 1:
        assert native["step"] == 8


@pytest.mark.parametrize(
    ("signum", "rank", "size"), [(signal.SIGKILL, 0, 2), soak(signal.SIGSTOP, 2, 3)]
)
def test_a_worker_that_is_gone_is_named_on_every_survivor(rank, signum, size):
    # A killed one is noticed by its connections, not by its silence.
    script = long_fit(
        "RingStrategy", heartbeat=30.0 if signum == signal.SIGKILL else 3.0
    ).replace("timeout=40", "timeout=60, transport='native'")
    with Workers(script, size, deadline=150) as job:
        job.wait_for_lines("training", size)
        job.kill(rank, signum)
        for each in set(range(size)) - {rank}:
            survivor = job.wait_one(each)
            assert survivor.returncode == 7, survivor.output
            assert survivor.result["class"] == "WorkerLost"
            assert survivor.result["rank"] == rank
            assert survivor.result["step"] > 0


@pytest.mark.soak
def test_tensors_of_every_dtype_in_graphs_and_eagerly():
    script = """
strategy = kerasdist.RingStrategy(transport="native", timeout=60)
ops, rank, size = strategy.extended.workers.ops, strategy.rank, strategy.size
names = ["int32", "int64", "float16", "bfloat16", "float32", "float64"]

for name in names:
    values = [tf.cast(tf.fill(shape, rank + 1), name) for shape in ([], [2, 3], [0])]
    def collect(*values):
        return ops.reduce_replicas([[value] for value in values])
    for run in (collect, tf.function(collect)):
        for (total,), value in zip(run(*values), values, strict=True):
            assert total.dtype == value.dtype and total.shape == value.shape
            assert (total.numpy() == size * (size + 1) // 2).all(), total
assert ops.reduce_replicas([[tf.constant(True)]]) is None  # the host adds others

# A collective inside of a loop and of a condition.
@tf.function
def loop(x):
    for _ in tf.range(5):
        total = lambda: ops.all_reduce(ops.reduce_replicas([[x]])[0])[0]
        x = tf.cond(tf.reduce_sum(x) > 0, total, lambda: x)
    return x
assert loop(tf.ones(2)).numpy().tolist() == [float(size) ** 10] * 2
"""
    Workers(PRELUDE + script, 3, deadline=120).run()


def test_a_script_that_used_tensorflow_before_is_warned():
    script = """
    import tensorflow as tf
    tf.constant(1)
    import kerasdist
    kerasdist.RingStrategy(transport="native")
    """
    for worker in Workers(script, 2, deadline=120).run():
        assert "TensorFlow was used before transport='native'" in worker.output


def test_one_worker_needs_no_server():
    with kerasdist.RingStrategy(transport="native", cluster={}) as strategy:
        assert strategy.communicator.all_reduce([2.0])[0] == 2
    assert "worker" not in tf.config.list_logical_devices()[0].name


def test_connect_alone_cannot_do_it():
    alone = Cluster(rank=0, size=1)
    with pytest.raises(
        ValueError, match=r"^TensorFlow's collectives need a strategy\. Received:"
    ):
        connect(alone, transport="native")
